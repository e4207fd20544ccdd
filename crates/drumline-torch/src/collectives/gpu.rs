//! Collectives on GPU tensors: with NCCL, by windows of a GPU that ranks share, or in pieces through host memory. The
//! first collective of a group chooses the route, and the group keeps it.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use drumline_comm::{ProcessGroup, ReduceOp};
use serde::{Deserialize, Serialize};
use tch::Tensor;

use super::facts::facts;
use super::over_nccl::OverNccl;
use super::places::{NcclVersion, Place, RouteChoice, choose};
use super::resident::{Resident, whole_and_part};
use super::staged::Staged;
use super::windows::{Windows, can_reduce};
use crate::cuda::Properties;
use crate::error::TorchError;
use crate::nccl::{Communicator, Nccl, SharedGpu, UniqueId, stand_in};
use crate::recordable::{HostRoute, NotRecordable};

type Result<T = ()> = std::result::Result<T, TorchError>;

/// The route of a group, once it has made a collective on a GPU tensor.
#[derive(Debug, Default)]
struct Kept(Mutex<Option<Arc<Gpu>>>);

/// A group's route for tensors on this rank's GPU.
#[derive(Debug)]
pub(super) struct Gpu {
    device: usize,
    route: Route,
}

#[derive(Debug)]
enum Route {
    Nccl(Communicator),
    Windows(Windows),
    Staged(Staged),
}

impl Gpu {
    /// The route of a call on these tensors, if one of them is on a GPU. Tensors on the CPU take the same route. The
    /// first call is made by all ranks of the group together, because choosing a route is a collective.
    #[track_caller]
    pub(super) fn of<'t>(
        group: &ProcessGroup,
        tensors: impl IntoIterator<Item = &'t Tensor>,
    ) -> Result<Option<Arc<Self>>> {
        let devices = devices(tensors)?;
        let Some(&device) = devices.first() else { return Ok(None) };
        let kept = group.attached(Kept::default);
        let mut kept = kept.0.lock().unwrap_or_else(PoisonError::into_inner);
        let own = kept.as_ref().map_or(device, |gpu| gpu.device);
        check_devices(group, own, &devices)?;
        Ok(Some(match &*kept {
            Some(gpu) => gpu.clone(),
            None => kept.insert(Arc::new(Self::new(group, device)?)).clone(),
        }))
    }

    /// An error, on all ranks, if one of the tensors is on another GPU.
    pub(super) fn check(&self, group: &ProcessGroup, tensors: &[Tensor]) -> Result {
        check_devices(group, self.device, &devices(tensors)?)
    }

    #[track_caller]
    fn new(group: &ProcessGroup, device: usize) -> Result<Self> {
        let (mut bus, shared) = (Properties::of(device)?.pci_bus_id, SharedGpu::from_env()?);
        if stand_in().is_some() || shared == SharedGpu::Nccl {
            // Ranks may share a GPU.
            bus = format!("{bus}, of rank {}", group.rank());
        }
        let nccl = match Nccl::open().and_then(Nccl::version) {
            Ok(version) => NcclVersion::Found(version),
            Err(error) => NcclVersion::Missing(error.to_string()),
        };
        let places = group.all_gather_object(&Place::of(bus, nccl))?;
        let route = match choose(&places) {
            RouteChoice::Nccl => Route::Nccl(communicator(group, device)?),
            RouteChoice::ThroughHost(reason) => without_nccl(group, device, shared, reason)?,
        };
        Ok(Self { device, route })
    }

    /// An error that says why, if collectives cannot be recorded in a CUDA graph.
    pub(super) fn is_recordable(&self) -> std::result::Result<(), NotRecordable> {
        match &self.route {
            Route::Nccl(_) => Ok(()),
            Route::Windows(windows) => Err(windows.not_recordable()),
            Route::Staged(staged) => Err(NotRecordable::ThroughHost(staged.reason.clone())),
        }
    }

    /// NCCL, if that is the route.
    pub(super) fn nccl<'a>(&'a self, group: &'a ProcessGroup) -> Option<OverNccl<'a>> {
        match &self.route {
            Route::Nccl(communicator) => Some(OverNccl { group, communicator, gpu: self.device }),
            Route::Windows(_) | Route::Staged(_) => None,
        }
    }

    /// All-reduces each tensor. Returns false if the host must do it.
    #[track_caller]
    pub(super) fn all_reduce(&self, group: &ProcessGroup, tensors: &[Tensor], op: ReduceOp) -> Result<bool> {
        match &self.route {
            Route::Nccl(communicator) => {
                OverNccl { group, communicator, gpu: self.device }.all_reduce(tensors, op)
            }
            Route::Windows(windows) => windows.all_reduce(group, tensors, op),
            Route::Staged(staged) => staged.all_reduce(group, tensors, op),
        }
    }

    /// A new tensor of the type of `like` on this GPU.
    pub(super) fn room(&self, like: &Tensor, sizes: &[i64]) -> Result<Tensor> {
        Ok(Resident::room(like, sizes, self.device)?.into_tensor())
    }

    /// Gathers all ranks' inputs. Returns false if the host must do it.
    #[track_caller]
    pub(super) fn all_gather(&self, group: &ProcessGroup, output: &Tensor, input: &Tensor) -> Result<bool> {
        if matches!(self.route, Route::Staged(_)) {
            return Ok(false);
        }
        let (output, input) = whole_and_part(output, input, group.rank(), self.device)?;
        match &self.route {
            Route::Nccl(communicator) => {
                OverNccl { group, communicator, gpu: self.device }.all_gather(&output, &input)?;
            }
            Route::Windows(windows) => windows.all_gather(group, &output, &input)?,
            Route::Staged(_) => {}
        }
        self.finish(group, output)
    }

    /// Reduces all ranks' inputs, and gives each its part. Returns false if the host must do it.
    #[track_caller]
    pub(super) fn reduce_scatter(
        &self,
        group: &ProcessGroup,
        output: &Tensor,
        input: &Tensor,
        op: ReduceOp,
    ) -> Result<bool> {
        let pair = || {
            let (output, input) = whole_and_part(output, input, group.rank(), self.device)?;
            output.carried.check(op)?;
            Ok::<_, TorchError>((output, input))
        };
        let output = match &self.route {
            Route::Nccl(communicator) => {
                let (output, input) = pair()?;
                let nccl = OverNccl { group, communicator, gpu: self.device };
                if !nccl.reduce_scatter(&output, input, op)? {
                    return Ok(false);
                }
                output
            }
            Route::Windows(windows) if can_reduce(input, op) => {
                let (output, input) = pair()?;
                windows.reduce_scatter(group, &output, &input, op)?;
                output
            }
            Route::Windows(_) | Route::Staged(_) => return Ok(false),
        };
        self.finish(group, output)
    }

    /// Finishes a tensor that was written.
    fn finish(&self, group: &ProcessGroup, written: Resident) -> Result<bool> {
        match self.nccl(group) {
            Some(nccl) => nccl.finish([written])?,
            None => written.finish()?,
        }
        Ok(true)
    }

    /// Broadcasts each tensor. Returns false if the host must do it.
    #[track_caller]
    pub(super) fn broadcast(&self, group: &ProcessGroup, tensors: &[Tensor], root: usize) -> Result<bool> {
        match &self.route {
            Route::Nccl(communicator) => {
                OverNccl { group, communicator, gpu: self.device }.broadcast(tensors, root)?;
                Ok(true)
            }
            Route::Windows(windows) => {
                windows.broadcast(group, tensors, root)?;
                Ok(true)
            }
            Route::Staged(staged) => staged.broadcast(group, tensors, root),
        }
    }
}

/// The route of ranks that cannot use NCCL.
#[track_caller]
fn without_nccl(group: &ProcessGroup, device: usize, shared: SharedGpu, reason: HostRoute) -> Result<Route> {
    // All ranks have the same reason.
    let is_on_one_gpu = matches!(&reason, HostRoute::SharedGpu { ranks, .. } if ranks.len() == group.size());
    if is_on_one_gpu
        && shared == SharedGpu::Ipc
        && let Some(windows) = Windows::new(group, device, reason.clone())?
    {
        if group.rank() == 0 && !has_mps() {
            tracing::warn!(
                "{reason} and take turns on it; try NVIDIA's MPS, with which they compute at the same time: \
                            nvidia-cuda-mps-control -d"
            );
        }
        return Ok(Route::Windows(windows));
    }
    if group.rank() == 0 {
        tracing::warn!("{reason}: their collectives go through host memory");
    }
    Ok(Route::Staged(Staged::new(device, reason)?))
}

/// Whether NVIDIA's MPS serves this process, by the pipe through which programs find it.
fn has_mps() -> bool {
    let folder = std::env::var_os("CUDA_MPS_PIPE_DIRECTORY").unwrap_or_else(|| "/tmp/nvidia-mps".into());
    Path::new(&folder).join("control").exists()
}

/// The GPUs of the tensors.
fn devices<'t>(tensors: impl IntoIterator<Item = &'t Tensor>) -> Result<BTreeSet<usize>> {
    tensors.into_iter().filter_map(|tensor| facts(tensor).map(|facts| facts.gpu()).transpose()).collect()
}

/// An error if a tensor is on another GPU than the rank's own. Other ranks may have queued the call already, and their
/// GPUs wait in it, so this aborts the group.
fn check_devices(group: &ProcessGroup, own: usize, devices: &BTreeSet<usize>) -> Result {
    match devices.iter().find(|device| **device != own) {
        None => Ok(()),
        Some(other) => Err(group.abort(&two_gpus(own, *other)).into()),
    }
}

fn two_gpus(own: usize, other: usize) -> String {
    format!("it uses GPU {own}, and passed a tensor on GPU {other}; try one GPU for each rank")
}

/// What rank 0 sends to the others: the id of the new communicator, or why there is none.
#[derive(Serialize, Deserialize)]
enum IdOfRank0 {
    Id(Vec<u8>),
    Failed(String),
}

/// Creates the group's communicator. Rank 0 sends its id to the others through the group.
#[track_caller]
fn communicator(group: &ProcessGroup, device: usize) -> Result<Communicator> {
    let made = (group.rank() == 0).then(|| match Nccl::open().and_then(Nccl::new_unique_id) {
        Ok(UniqueId(id)) => IdOfRank0::Id(id.to_vec()),
        Err(error) => IdOfRank0::Failed(error.to_string()),
    });
    let id = match group.broadcast_object(made.as_ref(), 0)? {
        IdOfRank0::Id(id) => id,
        IdOfRank0::Failed(message) => {
            return Err(TorchError::Library {
                operation: "rank 0 cannot begin an NCCL communicator",
                message,
            });
        }
    };
    let id: [u8; 128] =
        id.try_into().map_err(|_| TorchError::Internal { what: "an NCCL id does not have 128 bytes" })?;
    let companion = group.companion("gpu")?;
    Communicator::new(group, &companion, UniqueId(id), device).inspect_err(|error| {
        // The other ranks wait for this one while they create theirs.
        group.abort(&error.to_string());
    })
}

/// An error that says why, if the collectives of a group on GPU tensors cannot be recorded in a CUDA graph. Known after
/// the first one.
pub(super) fn is_recordable(group: &ProcessGroup) -> std::result::Result<(), NotRecordable> {
    let kept = group.attached(Kept::default);
    let kept = kept.0.lock().unwrap_or_else(PoisonError::into_inner);
    match &*kept {
        Some(gpu) => gpu.is_recordable(),
        None => Err(NotRecordable::NoCollectiveYet { group: group.name().to_string() }),
    }
}

#[cfg(test)]
mod tests {
    use drumline_comm::{CommError, GroupOptions, LocalGroup};

    use super::*;

    #[test]
    fn a_tensor_of_another_gpu_is_an_error_on_all_ranks() {
        let outcomes = |given: [usize; 2]| {
            LocalGroup::outcomes(2, &GroupOptions::default(), move |group| {
                let devices = if group.rank() == 0 { given.into() } else { BTreeSet::from([0]) };
                match check_devices(&group, 0, &devices) {
                    Err(TorchError::Comm(error)) => Err(*error),
                    Err(other) => panic!("refused in another way: {other}"),
                    Ok(()) => group.barrier(),
                }
            })
        };
        assert!(outcomes([0, 0]).iter().all(|outcome| outcome.is_ok()), "control: all on one");
        for outcome in outcomes([0, 1]) {
            let error = outcome.unwrap_err();
            assert!(matches!(error, CommError::CalledOff { by: 0, .. }), "{error}");
            assert!(error.to_string().contains("it uses GPU 0, and passed a tensor on GPU 1"), "{error}");
        }
    }
}
