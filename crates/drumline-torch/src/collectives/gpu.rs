//! Collectives on GPU tensors: with NCCL, or in pieces through host memory. The first collective of a group chooses the
//! route, and the group keeps it.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

use drumline_comm::{ProcessGroup, ReduceOp};
use serde::{Deserialize, Serialize};
use tch::Tensor;

use super::facts::facts;
use super::over_nccl::OverNccl;
use super::places::{NcclVersion, Place, RouteChoice, choose};
use super::staged::Staged;
use crate::cuda::Properties;
use crate::error::TorchError;
use crate::nccl::{Communicator, Nccl, SharedGpu, UniqueId, stand_in};
use crate::recordable::NotRecordable;

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
        let mut bus = Properties::of(device)?.pci_bus_id;
        if stand_in().is_some() || SharedGpu::from_env()? == SharedGpu::Nccl {
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
            RouteChoice::ThroughHost(reason) => {
                if group.rank() == 0 {
                    tracing::warn!("{reason}: their collectives go through host memory");
                }
                Route::Staged(Staged::new(device, reason)?)
            }
        };
        Ok(Self { device, route })
    }

    /// An error that says why, if collectives cannot be recorded in a CUDA graph.
    pub(super) fn is_recordable(&self) -> std::result::Result<(), NotRecordable> {
        match &self.route {
            Route::Nccl(_) => Ok(()),
            Route::Staged(staged) => Err(NotRecordable::ThroughHost(staged.reason.clone())),
        }
    }

    /// NCCL, if that is the route.
    pub(super) fn nccl<'a>(&'a self, group: &'a ProcessGroup) -> Option<OverNccl<'a>> {
        match &self.route {
            Route::Nccl(communicator) => Some(OverNccl { group, communicator, gpu: self.device }),
            Route::Staged(_) => None,
        }
    }

    /// All-reduces each tensor. Returns false if the host must do it.
    #[track_caller]
    pub(super) fn all_reduce(&self, group: &ProcessGroup, tensors: &[Tensor], op: ReduceOp) -> Result<bool> {
        match &self.route {
            Route::Nccl(communicator) => {
                OverNccl { group, communicator, gpu: self.device }.all_reduce(tensors, op)
            }
            Route::Staged(staged) => staged.all_reduce(group, tensors, op),
        }
    }

    /// Broadcasts each tensor. Returns false if the host must do it.
    #[track_caller]
    pub(super) fn broadcast(&self, group: &ProcessGroup, tensors: &[Tensor], root: usize) -> Result<bool> {
        match &self.route {
            Route::Nccl(communicator) => {
                OverNccl { group, communicator, gpu: self.device }.broadcast(tensors, root)?;
                Ok(true)
            }
            Route::Staged(staged) => staged.broadcast(group, tensors, root),
        }
    }
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
