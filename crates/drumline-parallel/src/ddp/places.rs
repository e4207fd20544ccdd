//! The places of gradients in buckets, each of which is reduced on all ranks.
//!
//! On a GPU the gradients of a bucket are moved together, when all of them are ready.

use std::sync::Arc;

use drumline_comm::ProcessGroup;
use drumline_torch::cuda::Stream;
use drumline_torch::{Named, TensorCollectives, grad, move_grad, set_grad};
use tch::Tensor;

use super::DdpOptions;
use super::bucket::{BucketWorker, GradBucket, Job};
use crate::arena::Arena;
use crate::error::{NotRecordable, ParallelError};
use crate::lane::Lane;
use crate::layout::Caps;
use crate::observer::Watch;
use crate::queues::Queues;
use crate::reducer::{OrderKnown, Places, Reducer, guessed_order};
use crate::reduction::Site;

type Result<T = ()> = std::result::Result<T, ParallelError>;

/// The places of all gradients of a replica.
pub(super) struct Buckets {
    group: Arc<ProcessGroup>,
    arena: Arena,
    /// For gradients on a GPU.
    queues: Option<Queues>,
    /// Whether the hook can be recorded in a graph.
    has_recordable_hook: bool,
}

/// The reducer of a replica. All ranks get the parameters of rank 0.
#[track_caller]
pub(super) fn reducer(
    group: Arc<ProcessGroup>,
    params: Vec<Named>,
    options: DdpOptions,
) -> Result<Reducer<Buckets>> {
    let caps = Caps { first: options.first_bucket, others: options.bucket_cap };
    let order = guessed_order(params.len());
    let arena = Arena::new(&group, params, &order, caps)?;
    arena.broadcast_tensors(&group, 0)?;
    let queues = Queues::of(arena.device())?;
    let stream = queues.as_ref().map(|queues| queues.lane);
    let has_recordable_hook = options.hook.is_recordable();
    let watch = Watch(options.observer);
    let worker = BucketWorker { group: group.clone(), hook: options.hook, watch: watch.clone(), stream };
    let buckets = Buckets { group: group.clone(), arena, queues, has_recordable_hook };
    Ok(Reducer::new(group, buckets, Lane::new(worker, watch)?))
}

impl Places for Buckets {
    type Job = Job;

    fn params(&self) -> &[Named] {
        &self.arena.tensors
    }

    fn bucket_of(&self) -> &[usize] {
        &self.arena.layout.bucket_of
    }

    fn begin(&mut self) -> Result {
        self.queues.iter_mut().for_each(Queues::begin);
        Ok(())
    }

    fn store(&mut self, param: usize, _: &mut Lane<Job>) -> Result {
        match &mut self.queues {
            Some(queues) => queues.note_current(),
            None => {
                move_grad(&self.arena.tensors[param].tensor, &self.arena.places[param])?;
                Ok(())
            }
        }
    }

    fn store_missing(&mut self, param: usize, _: &mut Lane<Job>) -> Result<bool> {
        Ok(self.arena.collect_grad(param)?)
    }

    fn send(&mut self, index: usize, site: Site, lane: &mut Lane<Job>) -> Result {
        let arena = &self.arena;
        let bucket = &arena.layout.buckets[index];
        let leaves: Vec<&Tensor> = bucket.params.iter().map(|param| &arena.tensors[*param].tensor).collect();
        let places: Vec<&Tensor> = bucket.params.iter().map(|param| &arena.places[*param]).collect();
        let ready = self.queues.as_ref().map(|queues| queues.fill(&leaves, &places)).transpose()?;
        let bucket = GradBucket {
            index,
            num_buckets: arena.layout.buckets.len(),
            flat: arena.flats[bucket.flat].clone(),
            range: bucket.range.clone(),
            gradients: bucket.params.iter().map(|param| arena.places[*param].shallow_clone()).collect(),
        };
        lane.send(site, Job::Reduce(bucket, ready));
        Ok(())
    }

    fn flags(&self, used: Vec<u8>) -> Job {
        Job::Flags(used)
    }

    /// Sets the gradients of parameters that only other ranks used. If no rank used one, it has no gradient.
    fn settle(&mut self, used: &[u8], used_anywhere: &[u8]) -> Result {
        self.queues.as_ref().map_or(Ok(()), Queues::join)?;
        for param in (0..used.len()).filter(|param| used[*param] == 0 && used_anywhere[*param] == 1) {
            set_grad(&self.arena.tensors[param].tensor, Some(&self.arena.places[param]))?;
        }
        Ok(())
    }

    fn reorder(&mut self, order: &[usize]) -> Result {
        // Gradients of earlier backwards are in places that other gradients will get.
        for param in &self.arena.tensors {
            if let Some(held) = grad(&param.tensor)?.filter(|held| self.arena.holds(held)) {
                set_grad(&param.tensor, Some(&held.copy()))?;
            }
        }
        self.arena.reorder(order)
    }

    fn bytes(&self) -> Vec<usize> {
        self.arena.layout.buckets.iter().map(|bucket| self.arena.bytes(bucket)).collect()
    }

    fn abort(&self, cause: &str) {
        self.group.abort(cause);
    }

    fn stream(&self) -> Result<Option<Stream>> {
        self.queues.as_ref().map(Queues::current).transpose()
    }

    fn is_recordable(&self, order: OrderKnown) -> std::result::Result<(), NotRecordable> {
        match (&self.queues, order, self.has_recordable_hook) {
            (None, ..) => Err(NotRecordable::GradientsOnHost),
            (Some(_), OrderKnown::Yes, true) => Ok(self.group.is_recordable()?),
            (Some(_), OrderKnown::NotYet, true) => Err(NotRecordable::OrderNotKnown),
            (Some(_), _, false) => Err(NotRecordable::Hook),
        }
    }
}
