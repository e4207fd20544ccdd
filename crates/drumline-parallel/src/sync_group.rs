//! The group through which layers communicate in the middle of forward and backward.
//!
//! It is a separate group, so that a layer's calls never mix with those of gradient buckets. It records the calls of a
//! step, so that a rank without data can make the same calls with zeros:
//!
//! ```text
//!   rank 0   begin_step  forward: statistics(64) statistics(128)   backward: gradients(128) gradients(64)
//!   rank 1   (no data)            shadow: the same four, with a count of 0 and with zeros
//! ```

use std::panic::{AssertUnwindSafe, Location, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use drumline_comm::{CommError, ProcessGroup, ReduceOp, on_behalf_of};
use drumline_torch::{TensorCollectives, TorchError};
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use crate::error::NotRecordable;

/// A call that a layer makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum SyncCall {
    /// In forward: all ranks' counts, means and variances.
    Statistics {
        /// Channels of the layer.
        channels: usize,
    },
    /// In backward: the sums for the gradient of the input.
    Gradients {
        /// Channels of the layer.
        channels: usize,
    },
}

/// Ranks whose layers share statistics. Cheap to clone; clones are the same group.
#[derive(Debug, Clone)]
pub struct SyncGroup {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    group: ProcessGroup,
    /// The calls of this step; `None` before the first `begin_step`.
    calls: Mutex<Option<Vec<SyncCall>>>,
    failure: Mutex<Option<CommError>>,
    /// Whether this is inside [`SyncGroup::catch`].
    is_caught: AtomicBool,
    /// The GPU of the layers, if they are on one. Their calls are then on tensors there.
    gpu: Mutex<Option<usize>>,
    /// Where the program called the current forward or backward.
    site: Mutex<Option<&'static Location<'static>>>,
    /// Whether layers do not communicate; see [`SyncGroup::alone`].
    is_alone: AtomicBool,
}

impl SyncGroup {
    /// A new group with the ranks of `group`, all of which call this.
    #[track_caller]
    pub fn new(group: &ProcessGroup) -> Result<Self, CommError> {
        let ranks: Vec<usize> = (0..group.size()).collect();
        // Every rank is on the list.
        let own = group.new_group(&ranks)?.unwrap_or_else(|| group.clone());
        let shared = Shared {
            group: own,
            calls: Mutex::new(None),
            failure: Mutex::new(None),
            gpu: Mutex::new(None),
            site: Mutex::new(None),
            is_caught: false.into(),
            is_alone: false.into(),
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// The number of ranks.
    pub fn size(&self) -> usize {
        self.shared.group.size()
    }

    /// Begins a step: forgets the calls of the step before.
    pub fn begin_step(&self) {
        *lock(&self.shared.calls) = Some(Vec::new());
    }

    /// The calls since [`begin_step`](Self::begin_step).
    pub fn calls(&self) -> Vec<SyncCall> {
        lock(&self.shared.calls).clone().unwrap_or_default()
    }

    /// Makes these calls with zeros, as a rank that has run out of data does while the others make a step. They are the
    /// [`calls`](Self::calls) of an earlier step, or of another rank.
    pub fn shadow(&self, calls: &[SyncCall]) -> Result<(), CommError> {
        if let Some(gpu) = *lock(&self.shared.gpu) {
            return self.shadow_on_gpu(gpu, calls);
        }
        for call in calls {
            match *call {
                SyncCall::Statistics { channels } => {
                    self.gathered(&vec![0.0; statistics_len(channels)])?;
                }
                SyncCall::Gradients { channels } => {
                    self.summed(&mut vec![0.0; gradients_len(channels)])?;
                }
            }
        }
        Ok(())
    }

    /// Notes the device of a layer.
    pub(crate) fn note_device(&self, device: Device) {
        if let Device::Cuda(gpu) = device {
            *lock(&self.shared.gpu) = Some(gpu);
        }
    }

    /// An error that says why, if the layers' calls cannot be recorded in a CUDA graph.
    pub(crate) fn is_recordable(&self) -> Result<(), NotRecordable> {
        match *lock(&self.shared.gpu) {
            Some(_) => Ok(self.shared.group.is_recordable()?),
            None => Err(NotRecordable::NormsOnHost),
        }
    }

    fn shadow_on_gpu(&self, gpu: usize, calls: &[SyncCall]) -> Result<(), CommError> {
        let zeros = |len| Tensor::zeros([len as i64], (Kind::Double, Device::Cuda(gpu)));
        for call in calls {
            let shadowed = match *call {
                SyncCall::Statistics { channels } => {
                    self.gathered_on_gpu(&zeros(statistics_len(channels))).map(drop)
                }
                SyncCall::Gradients { channels } => self.summed_on_gpu(&mut zeros(gradients_len(channels))),
            };
            shadowed.map_err(|error| match error {
                TorchError::Comm(error) => *error,
                other => self.shared.group.abort(&other.to_string()),
            })?;
        }
        Ok(())
    }

    /// Runs a forward that the other ranks do not make: layers behave as in evaluation, and do not communicate.
    pub fn alone<R>(&self, body: impl FnOnce() -> R) -> R {
        let _before =
            Alone { shared: &self.shared, before: self.shared.is_alone.swap(true, Ordering::Relaxed) };
        body()
    }

    /// The error that ended the group. The error of a backward has only its text.
    pub fn failure(&self) -> Option<CommError> {
        lock(&self.shared.failure).clone()
    }

    /// Whether a step has begun here, so that its calls are known.
    pub(crate) fn has_stepped(&self) -> bool {
        lock(&self.shared.calls).is_some()
    }

    /// Runs a forward whose layers panic if the group fails, and returns that failure.
    pub(crate) fn catch<R>(&self, body: impl FnOnce() -> R) -> Result<R, CommError> {
        self.shared.is_caught.store(true, Ordering::Relaxed);
        let outcome = catch_unwind(AssertUnwindSafe(body));
        self.shared.is_caught.store(false, Ordering::Relaxed);
        outcome.or_else(|panic| match self.failure() {
            Some(failure) => Err(failure),
            None => resume_unwind(panic),
        })
    }

    /// Whether this is inside [`alone`](Self::alone).
    pub(crate) fn is_alone(&self) -> bool {
        self.shared.is_alone.load(Ordering::Relaxed)
    }

    /// Aborts the group: this rank will not make its calls.
    pub(crate) fn abort(&self, cause: &str) {
        self.shared.group.abort(cause);
    }

    /// Ends a layer that cannot return an error, by a panic.
    pub(crate) fn panic_with(&self, error: &dyn std::fmt::Display) -> ! {
        if self.shared.is_caught.load(Ordering::Relaxed) && self.failure().is_some() {
            // `catch` returns the failure, so the panic needs no message on stderr.
            resume_unwind(Box::new("the group of a layer failed"));
        }
        panic!("{error}")
    }

    /// All ranks' statistics, in rank order.
    pub(crate) fn gather_statistics(&self, channels: usize, mine: &[f64]) -> Result<Vec<f64>, CommError> {
        debug_assert_eq!(mine.len(), statistics_len(channels));
        self.note(SyncCall::Statistics { channels });
        self.gathered(mine)
    }

    /// The sums over all ranks.
    pub(crate) fn sum_gradients(&self, channels: usize, sums: &mut [f64]) -> Result<(), CommError> {
        debug_assert_eq!(sums.len(), gradients_len(channels));
        self.note(SyncCall::Gradients { channels });
        self.summed(sums)
    }

    /// All ranks' statistics, a row for each rank; asynchronous on the GPU.
    pub(crate) fn gather_on_gpu(&self, channels: usize, mine: &Tensor) -> Result<Tensor, TorchError> {
        self.note(SyncCall::Statistics { channels });
        self.gathered_on_gpu(mine)
    }

    /// The sums over all ranks; asynchronous on the GPU.
    pub(crate) fn sum_on_gpu(&self, channels: usize, sums: &mut Tensor) -> Result<(), TorchError> {
        self.note(SyncCall::Gradients { channels });
        self.summed_on_gpu(sums)
    }

    fn gathered_on_gpu(&self, mine: &Tensor) -> Result<Tensor, TorchError> {
        let mut all = Tensor::f_zeros([self.size() as i64, mine.size()[0]], (mine.kind(), mine.device()))?;
        self.kept_on_gpu(self.named(|group| group.all_gather_into_tensor(&mut all, mine)))?;
        Ok(all)
    }

    fn summed_on_gpu(&self, sums: &mut Tensor) -> Result<(), TorchError> {
        self.kept_on_gpu(self.named(|group| group.all_reduce_tensor(sums, ReduceOp::Sum)))
    }

    fn kept_on_gpu(&self, outcome: Result<(), TorchError>) -> Result<(), TorchError> {
        outcome.inspect_err(|error| {
            if let Some(error) = error.comm_error() {
                lock(&self.shared.failure).get_or_insert_with(|| error.clone());
            }
        })
    }

    /// From now on calls report this location in the program, and not the layer's location in this library.
    pub(crate) fn called_at(&self, site: &'static Location<'static>) {
        *lock(&self.shared.site) = Some(site);
    }

    fn named<R>(&self, call: impl FnOnce(&ProcessGroup) -> R) -> R {
        let (site, group) = (*lock(&self.shared.site), &self.shared.group);
        match site {
            Some(site) => on_behalf_of(site, || call(group)),
            None => call(group),
        }
    }

    fn note(&self, call: SyncCall) {
        if let Some(calls) = &mut *lock(&self.shared.calls) {
            calls.push(call);
        }
    }

    fn gathered(&self, mine: &[f64]) -> Result<Vec<f64>, CommError> {
        let mut all = vec![0.0; mine.len() * self.size()];
        self.kept(self.named(|group| group.all_gather(mine, &mut all)))?;
        Ok(all)
    }

    fn summed(&self, sums: &mut [f64]) -> Result<(), CommError> {
        self.kept(self.named(|group| group.all_reduce(sums, ReduceOp::Sum)))
    }

    fn kept(&self, outcome: Result<(), CommError>) -> Result<(), CommError> {
        outcome.inspect_err(|error| {
            lock(&self.shared.failure).get_or_insert_with(|| error.clone());
        })
    }
}

/// Ends [`SyncGroup::alone`].
struct Alone<'a> {
    shared: &'a Shared,
    before: bool,
}

impl Drop for Alone<'_> {
    fn drop(&mut self) {
        self.shared.is_alone.store(self.before, Ordering::Relaxed);
    }
}

/// A count, and a mean and a variance for each channel.
pub(crate) fn statistics_len(channels: usize) -> usize {
    1 + 2 * channels
}

/// Two sums for each channel.
fn gradients_len(channels: usize) -> usize {
    2 * channels
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
