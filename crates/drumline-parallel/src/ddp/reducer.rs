//! Moves the gradients of a step from autograd into buckets, and has them reduced.
//!
//! ```text
//!   autograd ─hook─▶ move_grad: into its place in the bucket ─▶ Progress: bucket full, its turn ─▶ Lane
//!   end of backward: a missing gradient is zero; if it is missing on all ranks, it stays undefined
//! ```
//! On a GPU the gradients of a bucket are moved together, when all of them are ready.

use std::sync::Arc;

use drumline_comm::{ProcessGroup, call_site, on_behalf_of};
use drumline_torch::{FunctionError, Named, TensorCollectives, grad, move_grad, set_grad};

use super::DdpOptions;
use super::lane::{GradBucket, Job, Lane, Site};
use super::observer::Watch;
use super::progress::Progress;
use super::queues::Queues;
use crate::arena::Arena;
use crate::error::{NotRecordable, ParallelError};
use crate::layout::Caps;

type Result<T = ()> = std::result::Result<T, ParallelError>;

/// The mode of a backward.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Mode {
    /// It was not called through `Ddp`: an error, because ranks would silently diverge.
    Unexpected,
    /// It is inside `no_sync`: gradients stay where autograd puts them.
    Unreduced,
    Reducing,
}

/// The state of the order of buckets.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Order {
    /// The reverse order of creation.
    Guessed,
    /// The first step has shown the real order, and all ranks know rank 0's.
    Agreed,
    /// The buckets use it.
    InUse,
}

pub(super) struct Reducer {
    group: Arc<ProcessGroup>,
    /// The places of the gradients.
    arena: Arena,
    order: Vec<usize>,
    stage: Order,
    progress: Progress,
    mode: Mode,
    /// Where the program called the current backward.
    site: Site,
    lane: Lane,
    /// For gradients on a GPU.
    queues: Option<Queues>,
    /// Whether the hook can be recorded in a graph.
    has_recordable_hook: bool,
    /// Parameters without a gradient in the last step; logged when it changes.
    unused: Vec<usize>,
    /// The error with which a hook has ended the current backward: libtorch passes on only its text.
    refusal: Option<ParallelError>,
}

impl Reducer {
    #[track_caller]
    pub(super) fn new(group: Arc<ProcessGroup>, params: Vec<Named>, options: DdpOptions) -> Result<Self> {
        // Gradients become ready roughly in the reverse order of creation.
        let order: Vec<usize> = (0..params.len()).rev().collect();
        let caps = Caps { first: options.first_bucket, others: options.bucket_cap };
        let arena = Arena::new(&group, params, &order, caps)?;
        arena.broadcast_tensors(&group, 0)?;
        let queues = Queues::of(arena.device())?;
        let stream = queues.as_ref().map(|queues| queues.lane);
        let has_recordable_hook = options.hook.is_recordable();
        let lane = Lane::new(group.clone(), options.hook, Watch(options.observer), stream);
        let lane =
            lane.map_err(|cause| ParallelError::Thread { what: "the thread that reduces gradients", cause })?;
        let (stage, mode) = (Order::Guessed, Mode::Unexpected);
        let (progress, unused) = (Progress::default(), Vec::new());
        Ok(Self {
            group,
            arena,
            order,
            stage,
            progress,
            mode,
            site: call_site(),
            lane,
            queues,
            has_recordable_hook,
            unused,
            refusal: None,
        })
    }

    pub(super) fn params(&self) -> &[Named] {
        &self.arena.tensors
    }

    /// The sizes of the buckets in bytes.
    pub(super) fn bucket_bytes(&self) -> Vec<usize> {
        self.arena.layout.buckets.iter().map(|bucket| self.arena.bytes(bucket)).collect()
    }

    /// An error that says why, if a backward cannot be recorded in a CUDA graph.
    pub(super) fn is_recordable(&self) -> std::result::Result<(), NotRecordable> {
        match (&self.queues, self.stage, self.has_recordable_hook) {
            (None, ..) => Err(NotRecordable::GradientsOnHost),
            (Some(_), Order::InUse, true) => Ok(self.group.is_recordable()?),
            (Some(_), _, true) => Err(NotRecordable::OrderNotKnown),
            (Some(_), _, false) => Err(NotRecordable::Hook),
        }
    }

    /// Sets whether a backward without `begin` is allowed; its gradients are not reduced.
    pub(super) fn allow_unreduced(&mut self, allowed: bool) {
        self.mode = if allowed { Mode::Unreduced } else { Mode::Unexpected };
    }

    /// Begins a backward that reduces. Its calls report `site` as their location.
    pub(super) fn begin(&mut self, site: Site) -> Result {
        self.site = site;
        self.refusal = None;
        if self.stage == Order::Agreed {
            self.use_order()?;
        }
        self.progress.begin(&self.arena.layout);
        self.queues.iter_mut().for_each(Queues::begin);
        self.mode = Mode::Reducing;
        Ok(())
    }

    /// Autograd has accumulated the gradient of `param`. An error ends the backward. libtorch passes on only its text;
    /// [`refusal`](Self::refusal) returns the error itself.
    pub(super) fn note_ready(&mut self, param: usize) -> std::result::Result<(), FunctionError> {
        self.arrived(param).map_err(|error| {
            let text = error.to_string();
            self.refusal.get_or_insert(error);
            text.into()
        })
    }

    /// The error with which a hook has ended the backward, if one has.
    pub(super) fn refusal(&mut self) -> Option<ParallelError> {
        self.refusal.take()
    }

    fn arrived(&mut self, param: usize) -> Result {
        match self.mode {
            Mode::Reducing => {}
            Mode::Unreduced => return Ok(()),
            Mode::Unexpected => {
                return Err(ParallelError::BackwardOutsideDdp { rank: self.group.rank() });
            }
        }
        if self.progress.is_ready(param) {
            return Err(self.ready_twice(param));
        }
        match &mut self.queues {
            Some(queues) => queues.note_current()?,
            None => drop(move_grad(&self.arena.tensors[param].tensor, &self.arena.places[param])?),
        }
        self.send_ready(param)
    }

    fn send_ready(&mut self, param: usize) -> Result {
        let buckets = self.progress.ready(param, &self.arena.layout);
        for bucket in buckets.ok_or_else(|| self.ready_twice(param))? {
            let ready = self.queues.as_ref().map(|queues| queues.fill(&self.arena, bucket)).transpose()?;
            self.lane.send(self.site, Job::Reduce(self.bucket(bucket), ready));
        }
        Ok(())
    }

    /// The bucket may have been reduced with only the first part of the gradient.
    fn ready_twice(&self, param: usize) -> ParallelError {
        ParallelError::MarkedReadyTwice { rank: self.group.rank(), name: self.params()[param].name.clone() }
    }

    fn bucket(&self, index: usize) -> GradBucket {
        let arena = &self.arena;
        let bucket = &arena.layout.buckets[index];
        GradBucket {
            index,
            num_buckets: arena.layout.buckets.len(),
            flat: arena.flats[bucket.flat].clone(),
            range: bucket.range.clone(),
            gradients: bucket.params.iter().map(|param| arena.places[*param].shallow_clone()).collect(),
        }
    }

    /// Ends a backward: sends the remaining buckets, runs `meanwhile`, and waits for all reductions.
    pub(super) fn finish(&mut self, meanwhile: impl FnOnce() -> Result) -> Result {
        self.mode = Mode::Unexpected;
        let arrived = self.progress.order(&self.order);
        let used = match self.send_rest().and_then(|used| meanwhile().map(|()| used)) {
            Ok(used) => used,
            Err(error) => {
                self.abandon(&error.to_string());
                return Err(error);
            }
        };
        let used_anywhere = self.lane.wait()?.unwrap_or_default();
        self.queues.as_ref().map_or(Ok(()), Queues::join)?;
        self.settle_unused(&used, &used_anywhere)?;
        if self.stage == Order::Guessed {
            self.agree_on_order(&arrived)?;
        }
        Ok(())
    }

    /// Sends the buckets that this backward did not complete. Returns which parameters have a gradient on this rank.
    fn send_rest(&mut self) -> Result<Vec<u8>> {
        let mut used = vec![1u8; self.params().len()];
        for (param, used) in used.iter_mut().enumerate() {
            // A parameter that this backward did not reach may have an earlier gradient; otherwise its gradient is
            // zero.
            if !self.progress.is_ready(param) {
                *used = u8::from(self.arena.collect_grad(param)?);
                self.send_ready(param)?;
            }
        }
        self.lane.send(self.site, Job::Flags(used.clone()));
        Ok(used)
    }

    /// Backward failed on this rank. Aborts the group, because other ranks wait for its gradients.
    pub(super) fn abandon(&mut self, cause: &str) {
        self.mode = Mode::Unexpected;
        self.group.abort(cause);
        let _ = self.lane.wait();
    }

    /// Sets the gradients of parameters that only other ranks used. If no rank used one, it has no gradient.
    fn settle_unused(&mut self, used: &[u8], used_anywhere: &[u8]) -> Result {
        let unused: Vec<usize> = (0..used.len()).filter(|param| used[*param] == 0).collect();
        for &param in unused.iter().filter(|param| used_anywhere[**param] == 1) {
            set_grad(&self.params()[param].tensor, Some(&self.arena.places[param]))?;
        }
        if unused != self.unused {
            let names: Vec<&str> = unused.iter().map(|param| self.params()[*param].name.as_str()).collect();
            let rank = self.group.rank();
            tracing::debug!(
                rank,
                count = names.len(),
                ?names,
                "parameters that this rank's loss does not use"
            );
            self.unused = unused;
        }
        Ok(())
    }

    /// From the next step on all ranks reduce in the order in which rank 0's gradients became ready. Ranks agree on it
    /// here, at the end of backward, where all are at the same point: before a step a rank may have to join another's
    /// forward first.
    fn agree_on_order(&mut self, arrived: &[usize]) -> Result {
        let mut order: Vec<u64> = arrived.iter().map(|param| *param as u64).collect();
        on_behalf_of(self.site, || self.group.broadcast(&mut order, 0))?;
        self.order = order.into_iter().map(|param| param as usize).collect();
        self.stage = Order::Agreed;
        Ok(())
    }

    fn use_order(&mut self) -> Result {
        // Gradients of earlier backwards are in places that other gradients will get.
        for param in self.params() {
            if let Some(held) = grad(&param.tensor)?.filter(|held| self.arena.holds(held)) {
                set_grad(&param.tensor, Some(&held.copy()))?;
            }
        }
        self.arena.reorder(&self.order)?;
        self.stage = Order::InUse;
        let megabytes: Vec<_> = self.bucket_bytes().iter().map(|bytes| *bytes as f64 / 1e6).collect();
        tracing::debug!(rank = self.group.rank(), ?megabytes, "buckets in the order of the first step");
        Ok(())
    }
}
