//! Distributed data parallelism: one process per replica. Replicas start equal, get equal gradients, and so stay equal.
//!
//! ```text
//!   forward (buffers of rank 0) ─▶ loss ─▶ backward ─┬─▶ gradient ready ─▶ its place in a bucket ─▶ bucket full
//!                                                    │                                                 │ Lane: all-reduce
//!                                                    └─▶ end: all buckets reduced ◀────────────────────┘
//! ```
//! On a GPU all of this is asynchronous: copies into buckets and reductions are queued on streams, and work after
//! backward waits for them on the GPU.
//!
//! Read in this order: `../layout.rs`, `progress.rs`, `lane.rs`, `reducer.rs`; then `queues.rs` for GPUs, and
//! `engine.rs` for training loops.

mod engine;
mod lane;
mod norm_calls;
mod observer;
mod progress;
mod queues;
mod reducer;
mod shared_buffers;
mod uneven;

use std::cell::Cell;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use drumline_comm::{ProcessGroup, call_site, on_behalf_of};
use drumline_torch::{GradHook, Named, buffers, frozen, parameters};
use tch::Tensor;
use tch::nn::{ModuleT, VarStore};

pub(crate) use lane::BucketShape;
pub use lane::{AllReduce, CommHook, GradBucket};
pub use observer::{ReducedBucket, ReductionObserver};
pub use uneven::{DivideBy, Uneven, UnevenTurn};

use crate::arena::Arena;
use crate::error::{NotRecordable, ParallelError};
use crate::layout::Caps;
use crate::sync_group::{SyncCall, SyncGroup};
use norm_calls::NormCalls;
use reducer::Reducer;
use shared_buffers::SharedBuffers;

type Result<T = ()> = std::result::Result<T, ParallelError>;

/// Settings of [`Ddp`]. The defaults are PyTorch's.
pub struct DdpOptions {
    /// The size of a bucket in bytes.
    pub bucket_cap: usize,
    /// The size of the first bucket, which is small so that reduction begins early.
    pub first_bucket: usize,
    /// Whether a forward in training first broadcasts the buffers of rank 0.
    pub broadcast_buffers: bool,
    /// The communication hook, which reduces a bucket.
    pub hook: Box<dyn CommHook>,
    /// The group of the model's [`SyncBatchNorm`](crate::SyncBatchNorm) layers, if it has any.
    pub sync_group: Option<SyncGroup>,
    /// Names of parameters and buffers that are not synchronised.
    pub ignored: Vec<String>,
    /// Is called when a bucket is reduced; on a GPU with NCCL, when the reduction is queued.
    pub observer: Option<Arc<dyn ReductionObserver>>,
    /// Whether a single rank reduces as if there were several, to measure the cost.
    pub reduces_alone: bool,
}

impl Default for DdpOptions {
    fn default() -> Self {
        Self {
            bucket_cap: 25 << 20,
            first_bucket: 1 << 20,
            broadcast_buffers: true,
            hook: Box::new(AllReduce),
            sync_group: None,
            ignored: Vec::new(),
            observer: None,
            reduces_alone: false,
        }
    }
}

impl std::fmt::Debug for DdpOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            bucket_cap,
            first_bucket,
            broadcast_buffers,
            ignored,
            reduces_alone,
            hook: _,
            sync_group: _,
            observer: _,
        } = self;
        f.debug_struct("DdpOptions")
            .field("bucket_cap", bucket_cap)
            .field("first_bucket", first_bucket)
            .field("broadcast_buffers", broadcast_buffers)
            .field("ignored", ignored)
            .field("reduces_alone", reduces_alone)
            .finish_non_exhaustive()
    }
}

/// The tensors that are not trained.
struct Rest {
    /// Broadcast once.
    frozen: Vec<Named>,
    /// Changed by each forward.
    buffers: Vec<Named>,
}

/// What a replica shares with other ranks.
struct WithOthers {
    hooks: Vec<GradHook>,
    reducer: Arc<Mutex<Reducer>>,
    buffers: Option<SharedBuffers>,
}

impl WithOthers {
    fn new(group: &Arc<ProcessGroup>, params: &[Named], rest: Rest, options: DdpOptions) -> Result<Self> {
        let broadcast_buffers = options.broadcast_buffers;
        let reducer = Arc::new(Mutex::new(Reducer::new(group.clone(), params.to_vec(), options)?));
        if !rest.frozen.is_empty() {
            let order: Vec<usize> = (0..rest.frozen.len()).collect();
            Arena::new(group, rest.frozen, &order, Caps::NONE)?.broadcast_tensors(group, 0)?;
        }
        let buffers = SharedBuffers::new(group.clone(), rest.buffers)?;
        buffers.broadcast(0)?;
        let hooks = hooks(params, &reducer)?;
        Ok(Self { hooks, reducer, buffers: broadcast_buffers.then_some(buffers) })
    }

    fn reducer(&self) -> MutexGuard<'_, Reducer> {
        self.reducer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for WithOthers {
    fn drop(&mut self) {
        // Breaks a cycle: parameters own their hooks, hooks own the reducer, and the reducer owns the parameters.
        self.hooks.clear();
    }
}

/// A replica of a model, one on each rank of the group.
///
/// ```no_run
/// use drumline_comm::ProcessGroup;
/// use drumline_parallel::{Ddp, DdpOptions};
/// use tch::{Device, Kind, Tensor, nn};
///
/// let group = ProcessGroup::from_env()?;
/// let vs = nn::VarStore::new(Device::Cpu);
/// let model = nn::linear(vs.root(), 10, 1, Default::default());
/// let model = Ddp::new(model, &vs, &group, DdpOptions::default())?;
/// let loss = model.forward(&Tensor::rand([32, 10], (Kind::Float, Device::Cpu)))?.square().mean(Kind::Float);
/// model.backward(&loss)?; // every rank now has the mean of all ranks' gradients
/// # Ok::<(), anyhow::Error>(())
/// ```
pub struct Ddp<M> {
    module: M,
    group: Arc<ProcessGroup>,
    params: Vec<Named>,
    /// Parameters that were frozen when this was made, and have no place in a bucket.
    frozen: Vec<Named>,
    /// `None` for a single rank.
    others: Option<WithOthers>,
    sync_group: Option<SyncGroup>,
    /// The calls of synchronised norms, for steps in which ranks have different numbers of batches.
    norm_calls: NormCalls,
    /// Whether backward reduces gradients.
    is_syncing: Cell<bool>,
    /// Whether the next forward begins a step: the previous backward was not inside `no_sync`.
    is_new_step: Cell<bool>,
    /// Whether `begin_step` has begun the current step, so that all its forwards belong to it.
    is_begun: Cell<bool>,
    /// The rank whose buffers are broadcast: rank 0, or with uneven inputs the last rank that has data.
    buffers_of: Cell<usize>,
    /// The factor of a loss before its backward.
    loss_factor: Cell<f64>,
}

impl<M> std::fmt::Debug for Ddp<M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ddp")
            .field("group", &self.group.name())
            .field("params", &self.params.len())
            .finish_non_exhaustive()
    }
}

impl<M> Ddp<M> {
    /// Makes `module`, whose variables are in `store`, a replica. All ranks of the group call it.
    ///
    /// It checks that all ranks have built the same model. Then all ranks get the parameters and buffers of rank 0.
    #[track_caller]
    pub fn new(module: M, store: &VarStore, group: &ProcessGroup, options: DdpOptions) -> Result<Self> {
        on_behalf_of(call_site(), || Self::make(module, store, group, options))
    }

    fn make(module: M, store: &VarStore, group: &ProcessGroup, options: DdpOptions) -> Result<Self> {
        let kept = |named: &Named| !options.ignored.contains(&named.name);
        let mut params = parameters(store);
        let mut shared = buffers(store);
        params.retain(kept);
        shared.retain(kept);
        // A tensor with two names has one gradient.
        let mut seen = std::collections::HashSet::new();
        params.retain(|named| named.tensor.numel() == 0 || seen.insert(named.tensor.data_ptr()));
        crate::same_model::check(group, &[params.clone(), shared.clone()].concat())?;
        let group = Arc::new(crate::own_group(group)?);
        let sync_group = options.sync_group.clone();
        let mut frozen = frozen(store);
        frozen.retain(|named| !options.ignored.contains(&named.name));
        let others = match group.size() {
            1 if !options.reduces_alone => None,
            _ => {
                let is_frozen = |named: &Named| frozen.iter().any(|frozen| frozen.name == named.name);
                let (frozen, buffers) = shared.into_iter().partition(is_frozen);
                Some(WithOthers::new(&group, &params, Rest { frozen, buffers }, options)?)
            }
        };
        Ok(Self {
            module,
            group,
            params,
            frozen,
            others,
            norm_calls: NormCalls::new(sync_group.clone()),
            sync_group,
            is_syncing: Cell::new(true),
            is_new_step: Cell::new(true),
            is_begun: Cell::new(false),
            buffers_of: Cell::new(0),
            loss_factor: Cell::new(1.0),
        })
    }

    /// The model.
    pub fn module(&self) -> &M {
        &self.module
    }

    /// The group in which gradients are reduced: a new group with the same ranks as the one given.
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// Runs backward from the mean loss over this rank's batch. Afterwards every rank has the mean of all ranks'
    /// gradients, which are views of the buckets. All ranks call it. Ranks need not use all parameters.
    #[track_caller]
    pub fn backward(&self, loss: &Tensor) -> Result {
        let site = call_site();
        if self.is_syncing.get() {
            self.end_step();
        }
        let factor = self.loss_factor.get();
        let scaled = if factor == 1.0 { loss.shallow_clone() } else { loss * factor };
        let Some(others) = self.others.as_ref().filter(|_| self.is_syncing.get()) else {
            return Ok(scaled.f_backward()?);
        };
        self.check_frozen(others)?;
        others.reducer().begin(site)?;
        self.sync_group.iter().for_each(|group| group.called_at(site));
        if let Err(error) = scaled.f_backward() {
            let refusal = others.reducer().refusal();
            let cause = refusal.as_ref().map_or_else(|| error.to_string(), ToString::to_string);
            others.reducer().abandon(&cause);
            self.sync_group.iter().for_each(|group| group.abort(&cause));
            // libtorch passes on only the text of a layer's error; this returns the error itself.
            let failure = self.sync_group.as_ref().and_then(SyncGroup::failure);
            return Err(refusal.or_else(|| failure.map(Into::into)).unwrap_or_else(|| error.into()));
        }
        others.reducer().finish(|| Ok(()))
    }

    /// An error if a parameter was unfrozen after this was made: each rank would have a different gradient.
    fn check_frozen(&self, others: &WithOthers) -> Result {
        let Some(unfrozen) = self.frozen.iter().find(|named| named.tensor.requires_grad()) else {
            return Ok(());
        };
        let error = ParallelError::Unfrozen { rank: self.group.rank(), name: unfrozen.name.clone() };
        others.reducer().abandon(&error.to_string());
        Err(error)
    }

    /// Takes part in a backward of the other ranks without a batch: this rank's gradients are zero, and its
    /// synchronised norms have no samples.
    #[track_caller]
    pub fn backward_nothing(&self) -> Result {
        if self.sync_group.as_ref().is_some_and(|group| !group.has_stepped()) {
            return self.refuse_first_step();
        }
        let calls = self.sync_group.as_ref().map_or_else(Vec::new, SyncGroup::calls);
        self.backward_nothing_beside(&calls)
    }

    /// A rank without data in its first step does not know the calls of synchronised norms, and so cannot take part in
    /// them.
    fn refuse_first_step(&self) -> Result {
        let Some(others) = self.others.as_ref().filter(|_| self.is_syncing.get()) else { return Ok(()) };
        let error = ParallelError::NoFirstStep { rank: self.group.rank() };
        let text = error.to_string();
        others.reducer().abandon(&text);
        self.sync_group.iter().for_each(|group| group.abort(&text));
        Err(error)
    }

    /// The same, if the other ranks' synchronised norms make `calls`, and not those of the step before. Gradients of
    /// earlier backwards inside [`no_sync`](Self::no_sync) are reduced.
    #[track_caller]
    pub fn backward_nothing_beside(&self, calls: &[SyncCall]) -> Result {
        let site = call_site();
        self.end_step();
        let Some(others) = self.others.as_ref().filter(|_| self.is_syncing.get()) else { return Ok(()) };
        let mut reducer = others.reducer();
        reducer.begin(site)?;
        self.sync_group.iter().for_each(|group| group.called_at(site));
        // Buckets are reduced on another thread, so that this thread can join the calls of the other ranks' norms
        // meanwhile.
        reducer.finish(|| match &self.sync_group {
            Some(sync_group) => Ok(sync_group.shadow(calls)?),
            None => Ok(()),
        })
    }

    /// Backwards in `body` are not reduced: they accumulate gradients on this rank. The next backward outside reduces
    /// the sum.
    ///
    /// ```no_run
    /// # use drumline_parallel::{Ddp, ParallelError};
    /// # use tch::{Tensor, nn};
    /// # fn step(model: &Ddp<nn::Linear>, micro_batches: &[Tensor]) -> Result<(), ParallelError> {
    /// let (last, others) = micro_batches.split_last().expect("there is a batch");
    /// let loss = |x: &Tensor| Ok::<_, ParallelError>(model.forward(x)?.mean(tch::Kind::Float) / micro_batches.len() as f64);
    /// model.no_sync(|| others.iter().try_for_each(|x| model.backward(&loss(x)?)))?;
    /// model.backward(&loss(last)?) // reduces once
    /// # }
    /// ```
    pub fn no_sync<R>(&self, body: impl FnOnce() -> R) -> R {
        let _before = Restore { ddp: self, to: self.is_syncing.get() };
        self.set_syncing(false);
        body()
    }

    fn set_syncing(&self, is_syncing: bool) {
        self.is_syncing.set(is_syncing);
        self.others.iter().for_each(|others| others.reducer().allow_unreduced(!is_syncing));
    }

    /// Broadcasts the buffers of rank 0, as a forward in training does. Call it before an evaluation, in which ranks
    /// may have different numbers of batches.
    #[track_caller]
    pub fn sync_buffers(&self) -> Result {
        let buffers = self.others.as_ref().and_then(|others| others.buffers.as_ref());
        let broadcast = |buffers: &SharedBuffers| buffers.broadcast(self.buffers_of.get());
        on_behalf_of(call_site(), || buffers.map_or(Ok(()), broadcast))
    }

    /// Begins a step in which some ranks may have no data. All ranks call it and get the buffers of rank `buffers_of`.
    /// Then ranks with data make any number of forwards and backwards, of which the last backward reduces; the others
    /// call [`backward_nothing`](Self::backward_nothing). That ends the step.
    #[track_caller]
    pub fn begin_step(&self, buffers_of: usize) -> Result {
        let site = call_site();
        self.sync_group.iter().for_each(|group| group.called_at(site));
        self.buffers_of.set(buffers_of);
        self.is_new_step.set(true);
        self.is_begun.set(true);
        self.sync_buffers()
    }

    fn end_step(&self) {
        if self.is_begun.replace(false) {
            self.is_new_step.set(true);
        }
    }

    /// Runs any forward in training: `body` gets the model. Otherwise like [`forward`](Self::forward).
    ///
    /// ```no_run
    /// # use drumline_parallel::{Ddp, ParallelError};
    /// # use tch::Tensor;
    /// # struct Translator;
    /// # impl Translator { fn logits(&self, source: &Tensor, target: &Tensor) -> Tensor { source + target } }
    /// # fn step(model: &Ddp<Translator>, source: &Tensor, target: &Tensor) -> Result<(), ParallelError> {
    /// let logits = model.forward_with(|translator| translator.logits(source, target))?;
    /// model.backward(&logits.mean(tch::Kind::Float))
    /// # }
    /// ```
    #[track_caller]
    pub fn forward_with<R>(&self, body: impl FnOnce(&M) -> R) -> Result<R> {
        let is_begun = self.is_begun.get();
        if !is_begun {
            // In a closure this would be the location of the closure.
            let site = call_site();
            self.sync_group.iter().for_each(|group| group.called_at(site));
        }
        if self.is_new_step.replace(self.is_syncing.get() && !is_begun) {
            if !is_begun {
                self.sync_buffers()?;
            }
            self.sync_group.iter().for_each(SyncGroup::begin_step);
            self.norm_calls.restart();
        }
        match &self.sync_group {
            Some(group) => Ok(group.catch(|| body(&self.module))?),
            None => Ok(body(&self.module)),
        }
    }

    /// The size of each bucket in bytes, in the order of their reduction; empty for a single rank.
    pub fn bucket_bytes(&self) -> Vec<usize> {
        self.others.as_ref().map_or_else(Vec::new, |others| others.reducer().bucket_bytes())
    }

    /// Whether backward reduces over ranks: there are several, or `reduces_alone` is set.
    pub fn is_reducing(&self) -> bool {
        self.others.is_some()
    }

    /// An error that says why, if a step of this model cannot be recorded as a CUDA graph. Call it after the first two
    /// steps, which show in which order gradients become ready.
    pub fn is_recordable(&self) -> std::result::Result<(), NotRecordable> {
        self.sync_group.as_ref().map_or(Ok(()), SyncGroup::is_recordable)?;
        self.others.as_ref().map_or(Ok(()), |others| others.reducer().is_recordable())
    }

    /// Aborts all groups that steps use: this rank will not continue, and other ranks may be waiting in any of them.
    pub fn abort(&self, cause: &str) {
        self.group.abort(cause);
        self.sync_group.iter().for_each(|group| group.abort(cause));
    }

    /// The parameters whose gradients are reduced.
    pub fn parameters(&self) -> Vec<Named> {
        self.params.clone()
    }
}

impl<M: ModuleT> Ddp<M> {
    /// Forward in training. It first broadcasts the buffers of rank 0. Of the micro-batches of a step, of which all but
    /// the last are inside [`no_sync`](Self::no_sync), only the first does so.
    #[track_caller]
    pub fn forward(&self, input: &Tensor) -> Result<Tensor> {
        self.forward_with(|module| module.forward_t(input, true))
    }

    /// Forward in evaluation: without gradients and without communication.
    pub fn evaluate(&self, input: &Tensor) -> Tensor {
        tch::no_grad(|| self.module.forward_t(input, false))
    }
}

struct Restore<'a, M> {
    ddp: &'a Ddp<M>,
    to: bool,
}

impl<M> Drop for Restore<'_, M> {
    fn drop(&mut self) {
        self.ddp.set_syncing(self.to);
    }
}

fn hooks(params: &[Named], reducer: &Arc<Mutex<Reducer>>) -> Result<Vec<GradHook>> {
    let hook = |(index, named): (usize, &Named)| {
        let reducer = reducer.clone();
        GradHook::new(&named.tensor, move || {
            let mut reducer = reducer.lock().unwrap_or_else(PoisonError::into_inner);
            reducer.note_ready(index)
        })
    };
    Ok(params.iter().enumerate().map(hook).collect::<std::result::Result<_, _>>()?)
}
