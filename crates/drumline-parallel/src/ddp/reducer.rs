//! The gradients of one model on their way through the step: from autograd into buckets, and around.
//!
//! ```text
//!   autograd ─hook─▶ move_grad: into its place in the bucket ─▶ Progress: bucket full, its turn ─▶ Lane
//!   end of backward: what has no gradient here counts as zero; where nobody has one, none is left
//! ```
//! On a GPU gradients are moved when their bucket is full, all of it in one go.

use std::sync::Arc;

use drumline_comm::{ProcessGroup, call_site, on_behalf_of};
use drumline_torch::{Named, TensorCollectives, grad, move_grad, set_grad};

use super::DdpOptions;
use super::lane::{GradBucket, Job, Lane, Site};
use super::observer::Watch;
use super::progress::Progress;
use super::queues::Queues;
use crate::arena::Arena;
use crate::error::ParallelError;
use crate::layout::Caps;

type Result<T = ()> = std::result::Result<T, ParallelError>;

/// What a backward is.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Mode {
    /// Not one of ours: ranks would grow apart without a word.
    Unexpected,
    /// One inside `no_sync`: gradients are left where autograd puts them.
    Unreduced,
    Reducing,
}

/// How far the order of buckets has come.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Order {
    /// The reverse of creation.
    Guessed,
    /// The first step has shown the real one; all ranks know rank 0's.
    Agreed,
    /// The buckets have it.
    InUse,
}

pub(super) struct Reducer {
    group: Arc<ProcessGroup>,
    /// For each parameter the place of its gradient.
    arena: Arena,
    order: Vec<usize>,
    stage: Order,
    progress: Progress,
    mode: Mode,
    /// Where the program called the backward that is under way.
    site: Site,
    lane: Lane,
    /// For gradients on a GPU.
    queues: Option<Queues>,
    /// Whether the hook can be recorded in a graph.
    has_recordable_hook: bool,
    /// What had no gradient in the last step; told when it changes.
    unused: Vec<usize>,
    /// Why a hook has ended the backward that is under way: libtorch passes on only the text.
    refusal: Option<ParallelError>,
}

impl Reducer {
    #[track_caller]
    pub(super) fn new(group: Arc<ProcessGroup>, params: Vec<Named>, options: DdpOptions) -> Result<Self> {
        // Gradients come roughly in the reverse order of creation.
        let order: Vec<usize> = (0..params.len()).rev().collect();
        let caps = Caps { first: options.first_bucket, others: options.bucket_cap };
        let arena = Arena::new(&group, params, &order, caps)?;
        arena.broadcast_tensors(&group, 0)?;
        let queues = Queues::of(arena.device())?;
        let stream = queues.as_ref().map(|queues| queues.lane);
        let has_recordable_hook = options.hook.is_recordable();
        let lane = Lane::new(group.clone(), options.hook, Watch(options.observer), stream);
        let lane = lane.map_err(|error| {
            ParallelError::Unfit(format!("cannot start the thread that reduces gradients: {error}"))
        })?;
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

    /// Bytes of the buckets.
    pub(super) fn bucket_bytes(&self) -> Vec<usize> {
        self.arena.layout.buckets.iter().map(|bucket| self.arena.bytes(bucket)).collect()
    }

    /// Whether a backward can be recorded in a graph; if not, why.
    pub(super) fn is_recordable(&self) -> std::result::Result<(), String> {
        match (&self.queues, self.stage, self.has_recordable_hook) {
            (None, ..) => Err("gradients are reduced in the host's memory".into()),
            (Some(_), Order::InUse, true) => self.group.is_recordable(),
            (Some(_), _, true) => Err("the first two steps show in which order gradients come".into()),
            (Some(_), _, false) => Err("the communication hook does not do the same in each step".into()),
        }
    }

    /// Whether backwards that are not announced may go on without reduction.
    pub(super) fn allow_unreduced(&mut self, allowed: bool) {
        self.mode = if allowed { Mode::Unreduced } else { Mode::Unexpected };
    }

    /// A backward that reduces is about to begin; its calls name `site`.
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

    /// Autograd has accumulated the gradient of `param`. An error ends the backward, in words; [`refusal`](Self::refusal) has the error itself.
    pub(super) fn hear(&mut self, param: usize) -> std::result::Result<(), String> {
        self.arrived(param).map_err(|error| {
            let text = error.to_string();
            self.refusal.get_or_insert(error);
            text
        })
    }

    /// Why a hook has ended the backward, if one has.
    pub(super) fn refusal(&mut self) -> Option<ParallelError> {
        self.refusal.take()
    }

    fn arrived(&mut self, param: usize) -> Result {
        match self.mode {
            Mode::Reducing => {}
            Mode::Unreduced => return Ok(()),
            Mode::Unexpected => {
                return Err(ParallelError::Unfit(format!(
                    "a backward of rank {} would not be reduced over ranks; try `model.backward(&loss)`, \
                     or `model.no_sync(|| …)` around it to add up gradients",
                    self.group.rank()
                )));
            }
        }
        if self.progress.is_ready(param) {
            return Err(self.came_twice(param));
        }
        match &mut self.queues {
            Some(queues) => queues.note_current()?,
            None => drop(move_grad(&self.arena.tensors[param].tensor, &self.arena.places[param])?),
        }
        self.send_ready(param)
    }

    fn send_ready(&mut self, param: usize) -> Result {
        let buckets = self.progress.ready(param, &self.arena.layout);
        for bucket in buckets.ok_or_else(|| self.came_twice(param))? {
            let ready = self.queues.as_ref().map(|queues| queues.fill(&self.arena, bucket)).transpose()?;
            self.lane.send(self.site, Job::Reduce(self.bucket(bucket), ready));
        }
        Ok(())
    }

    /// The bucket may have been reduced with the first part of the gradient alone.
    fn came_twice(&self, param: usize) -> ParallelError {
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

    /// Backward is over: sends what is left, does something else, and waits for all of it.
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

    /// Sends what this backward did not reach; says which parameters have a gradient here.
    fn send_rest(&mut self) -> Result<Vec<u8>> {
        let mut used = vec![1u8; self.params().len()];
        for (param, used) in used.iter_mut().enumerate() {
            // What this backward did not reach may have a gradient of an earlier one; else it counts as zero.
            if !self.progress.is_ready(param) {
                *used = u8::from(self.arena.take_in(param)?);
                self.send_ready(param)?;
            }
        }
        self.lane.send(self.site, Job::Flags(used.clone()));
        Ok(used)
    }

    /// Backward failed here: tells the others, who wait for gradients that will not come.
    pub(super) fn abandon(&mut self, cause: &str) {
        self.mode = Mode::Unexpected;
        self.group.abort(cause);
        let _ = self.lane.wait();
    }

    /// Others may have used what was unused here; where nobody did, there is no gradient.
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

    /// From the next step on all ranks reduce in the order in which rank 0's gradients came. Agreed on here, where all ranks are at the same
    /// point: before a step one may have to answer another's forward first.
    fn agree_on_order(&mut self, arrived: &[usize]) -> Result {
        let mut order: Vec<u64> = arrived.iter().map(|param| *param as u64).collect();
        on_behalf_of(self.site, || self.group.broadcast(&mut order, 0))?;
        self.order = order.into_iter().map(|param| param as usize).collect();
        self.stage = Order::Agreed;
        Ok(())
    }

    fn use_order(&mut self) -> Result {
        // Gradients of earlier backwards lie in places that are about to be given to others.
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
