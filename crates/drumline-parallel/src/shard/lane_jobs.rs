//! The reductions of units, which the lane carries out one after the other.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use drumline_comm::ReduceOp;
use drumline_torch::cuda::{Event, Stream, Timing};
use drumline_torch::{HeapTensor, TensorCollectives};
use tch::{Device, Kind, Tensor};

use super::groups::Groups;
use crate::error::ParallelError;
use crate::lane::{Done, Worker};
use crate::observer::{ReducedBucket, Watch};

type Result<T = ()> = std::result::Result<T, ParallelError>;

/// A job of the lane.
pub(super) enum Job {
    Reduce(Reduce),
    /// Which parameters have a gradient on this rank; the result is: on any rank.
    Flags(Vec<u8>),
}

/// Memory for gradients until they are reduced.
#[derive(Clone)]
pub(super) struct GradMemory {
    pub(super) tensor: Arc<HeapTensor>,
    /// The last reduction from here; only on a GPU.
    last: Option<Arc<Mutex<LastReduction>>>,
}

/// A reduction on a GPU.
struct LastReduction {
    /// Is recorded after it.
    end: Event,
    /// Whether it is of the current backward. One of an earlier backward has ended, and work that is being recorded in a
    /// graph must not wait for it.
    is_recent: bool,
}

impl GradMemory {
    /// Zeros. All ranks call it together.
    pub(super) fn zeros(groups: &Groups, device: Device, kind: Kind, len: usize) -> Result<Self> {
        let tensor = Arc::new(HeapTensor::zeros_on(&groups.shard, device, kind, len)?);
        let last = match device {
            Device::Cuda(_) => {
                let last = LastReduction { end: Event::new(Timing::Off)?, is_recent: false };
                Some(Arc::new(Mutex::new(last)))
            }
            _ => None,
        };
        Ok(Self { tensor, last })
    }

    fn last(&self) -> Option<MutexGuard<'_, LastReduction>> {
        self.last.as_ref().map(|last| last.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Begins a backward, after all reductions of the one before.
    pub(super) fn begin(&self) {
        self.last().iter_mut().for_each(|last| last.is_recent = false);
    }

    /// Makes later work of this thread on a GPU wait for the last reduction from here, which was queued before.
    pub(super) fn wait_until_reduced(&self) -> Result {
        match (self.last(), self.tensor.device()) {
            (Some(last), Device::Cuda(device)) if last.is_recent => {
                Ok(Stream::current(device)?.wait_for(&last.end)?)
            }
            _ => Ok(()),
        }
    }

    fn mark_reduced(&self, stream: Option<Stream>) -> Result {
        if let (Some(mut last), Some(stream)) = (self.last(), stream) {
            last.end.record(stream)?;
            last.is_recent = true;
        }
        Ok(())
    }
}

/// A reduction of gradients, of which each rank gets its part.
pub(super) struct Reduce {
    /// The place of their unit in the order of reductions.
    pub(super) bucket: usize,
    /// Where the gradients of this rank are.
    pub(super) memory: GradMemory,
    /// On a GPU, the event after which they are there.
    pub(super) ready: Option<Event>,
    /// Ranges with equal parts of all ranks, each with the memory for this rank's part of the mean. Without one it stays
    /// where it is.
    pub(super) parts: Vec<(Range<usize>, Option<Tensor>)>,
    /// Whether it is added to what is there.
    pub(super) adds: bool,
}

/// Carries out the reductions.
pub(super) struct UnitWorker {
    groups: Groups,
    watch: Watch,
    device: Device,
    /// For gradients on a GPU.
    stream: Option<Stream>,
    /// The largest number of elements of this rank in a unit.
    longest: usize,
    /// Memory for means that are added to earlier ones, one for each kind of element.
    scratch: Vec<Tensor>,
}

impl UnitWorker {
    pub(super) fn new(
        groups: Groups,
        watch: Watch,
        device: Device,
        stream: Option<Stream>,
        longest: usize,
    ) -> Self {
        Self { groups, watch, device, stream, longest, scratch: Vec::new() }
    }

    fn reduce(&mut self, reduce: &Reduce) -> Result {
        if let (Some(stream), Some(ready)) = (self.stream, &reduce.ready) {
            stream.wait_for(ready)?;
        }
        let memory = &reduce.memory.tensor;
        for (range, into) in &reduce.parts {
            let Some(own) = into else {
                self.mean_in_place(memory, range)?;
                continue;
            };
            let all = memory.part(range.clone())?;
            if !reduce.adds {
                self.mean_into(&mut own.shallow_clone(), &all)?;
                continue;
            }
            let mut mean = self.scratch(own.kind())?.f_narrow(0, 0, own.size1()?)?;
            self.mean_into(&mut mean, &all)?;
            let _ = own.shallow_clone().f_add_(&mean)?;
        }
        reduce.memory.mark_reduced(self.stream)
    }

    /// The mean over all ranks, of which this rank's part stays where it is.
    fn mean_in_place(&self, memory: &HeapTensor, range: &Range<usize>) -> Result {
        let group = &self.groups.shard;
        memory.reduce_scatter_in_place(group, range.clone(), ReduceOp::Avg)?;
        if self.groups.replicas.size() > 1 {
            let len = range.len() / group.size();
            let own = range.start + group.rank() * len;
            self.groups.replicas.all_reduce_tensor(&mut memory.part(own..own + len)?, ReduceOp::Avg)?;
        }
        Ok(())
    }

    /// The mean over all ranks, of which this rank gets its part.
    fn mean_into(&self, own: &mut Tensor, all: &Tensor) -> Result {
        self.groups.shard.reduce_scatter_tensor(own, all, ReduceOp::Avg)?;
        if self.groups.replicas.size() > 1 {
            self.groups.replicas.all_reduce_tensor(own, ReduceOp::Avg)?;
        }
        Ok(())
    }

    fn scratch(&mut self, kind: Kind) -> Result<Tensor> {
        if let Some(found) = self.scratch.iter().find(|scratch| scratch.kind() == kind) {
            return Ok(found.shallow_clone());
        }
        let scratch = Tensor::f_zeros([self.longest as i64], (kind, self.device))?;
        self.scratch.push(scratch.shallow_clone());
        Ok(scratch)
    }
}

impl Worker for UnitWorker {
    type Job = Job;

    fn stream(&self) -> Option<Stream> {
        self.stream
    }

    fn abort(&self, cause: &str) {
        self.groups.abort(cause);
    }

    fn carry_out(&mut self, job: Job) -> Done {
        match job {
            Job::Reduce(reduce) => {
                let (index, size) = (reduce.bucket, reduce.memory.tensor.kind().elt_size_in_bytes());
                let bytes = reduce.parts.iter().map(|(range, _)| range.len() * size).sum();
                let watch = self.watch.clone();
                watch.over(
                    || self.reduce(&reduce),
                    |observer, begin, end| {
                        observer.bucket_reduced(ReducedBucket { index, bytes, begin, end });
                    },
                )?;
                Ok(None)
            }
            Job::Flags(mut flags) => {
                self.groups.all.all_reduce(&mut flags, ReduceOp::Max)?;
                Ok(Some(flags))
            }
        }
    }
}
