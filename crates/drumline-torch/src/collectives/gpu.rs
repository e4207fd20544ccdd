//! Collectives on tensors of a GPU: by NCCL, or in pieces through the host's memory. Which way is found out in the first one that a group
//! makes, and kept with the group.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

use drumline_comm::{ProcessGroup, ReduceOp};
use tch::Tensor;

use super::facts::facts;
use super::over_nccl::OverNccl;
use super::places::{Place, Way, choose};
use super::staged::Staged;
use crate::cuda::Properties;
use crate::error::TorchError;
use crate::nccl::{Communicator, Nccl, UniqueId, stand_in};

type Result<T = ()> = std::result::Result<T, TorchError>;

/// What a group has once it has made a collective on a GPU's tensor.
#[derive(Debug, Default)]
struct Kept(Mutex<Option<Arc<Gpu>>>);

/// A group's way for tensors of this rank's GPU.
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
    /// The way for a call on these tensors, if one of them is on a GPU; those that are on the CPU go along. The first time all ranks of the
    /// group are here: the call that is made is a collective.
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

    /// An error, on all ranks, if one of the tensors is on another GPU than this one.
    pub(super) fn check(&self, group: &ProcessGroup, tensors: &[Tensor]) -> Result {
        check_devices(group, self.device, &devices(tensors)?)
    }

    #[track_caller]
    fn new(group: &ProcessGroup, device: usize) -> Result<Self> {
        let mut bus = Properties::of(device)?.pci_bus_id;
        if stand_in().is_some() {
            // It does not mind ranks that share a GPU.
            bus = format!("{bus}, of rank {}", group.rank());
        }
        let nccl = Nccl::open().and_then(Nccl::version).map_err(|error| error.to_string());
        let places = group.all_gather_object(&Place::of(bus, nccl))?;
        let route = match choose(&places) {
            Way::Nccl => Route::Nccl(communicator(group, device)?),
            Way::ThroughHost(why) => {
                if group.rank() == 0 {
                    tracing::warn!("{why}: their collectives go through the host's memory");
                }
                Route::Staged(Staged::new(device, why)?)
            }
        };
        Ok(Self { device, route })
    }

    /// Whether collectives here can be recorded in a graph; if not, why.
    pub(super) fn is_recordable(&self) -> std::result::Result<(), String> {
        match &self.route {
            Route::Nccl(_) => Ok(()),
            Route::Staged(staged) => {
                Err(format!("{}, so gradients go through the host's memory", staged.why))
            }
        }
    }

    /// NCCL's way, if it is that.
    pub(super) fn nccl<'a>(&'a self, group: &'a ProcessGroup) -> Option<OverNccl<'a>> {
        match &self.route {
            Route::Nccl(communicator) => Some(OverNccl { group, communicator, gpu: self.device }),
            Route::Staged(_) => None,
        }
    }

    /// All-reduces each; false if that must be done on the host.
    #[track_caller]
    pub(super) fn all_reduce(&self, group: &ProcessGroup, tensors: &[Tensor], op: ReduceOp) -> Result<bool> {
        match &self.route {
            Route::Nccl(communicator) => {
                OverNccl { group, communicator, gpu: self.device }.all_reduce(tensors, op)
            }
            Route::Staged(staged) => staged.all_reduce(group, tensors, op),
        }
    }

    /// Broadcasts each; false if that must be done on the host.
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

/// The GPUs that the tensors are on.
fn devices<'t>(tensors: impl IntoIterator<Item = &'t Tensor>) -> Result<BTreeSet<usize>> {
    tensors.into_iter().filter_map(|tensor| facts(tensor).map(|facts| facts.gpu()).transpose()).collect()
}

/// An error if there are others than the rank's own. The others may have queued the call already, and their GPUs wait in it: the group is called off.
fn check_devices(group: &ProcessGroup, own: usize, devices: &BTreeSet<usize>) -> Result {
    match devices.iter().find(|device| **device != own) {
        None => Ok(()),
        Some(other) => Err(group.abort(&two_gpus(own, *other)).into()),
    }
}

fn two_gpus(own: usize, other: usize) -> String {
    format!("it speaks for GPU {own}, and gave a tensor of GPU {other}; try one GPU for each rank")
}

/// The id travels by the group, as all that ranks must agree on.
#[track_caller]
fn communicator(group: &ProcessGroup, device: usize) -> Result<Communicator> {
    let made = (group.rank() == 0).then(|| {
        let id = Nccl::open().and_then(Nccl::new_unique_id);
        id.map(|UniqueId(id)| id.to_vec()).map_err(|error| error.to_string())
    });
    let id: std::result::Result<Vec<u8>, String> = group.broadcast_object(made.as_ref(), 0)?;
    let id = id.map_err(|why| TorchError::Unfit(format!("rank 0 cannot begin a communicator: {why}")))?;
    let id: [u8; 128] = id.try_into().map_err(|_| TorchError::Unfit("an id of NCCL has 128 bytes".into()))?;
    let companion = group.companion("gpu")?;
    Communicator::new(group, companion, UniqueId(id), device).inspect_err(|error| {
        // The others wait for this rank in the making of theirs.
        group.abort(&error.to_string());
    })
}

/// Whether the collectives of a group on tensors like this one can be recorded in a graph; if not, why. Known after the first of them.
pub(super) fn is_recordable(group: &ProcessGroup) -> std::result::Result<(), String> {
    let kept = group.attached(Kept::default);
    let kept = kept.0.lock().unwrap_or_else(PoisonError::into_inner);
    match &*kept {
        Some(gpu) => gpu.is_recordable(),
        None => Err(format!("group `{}` has made no collective on a GPU's tensor yet", group.name())),
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
            assert!(error.to_string().contains("it speaks for GPU 0, and gave a tensor of GPU 1"), "{error}");
        }
    }
}
