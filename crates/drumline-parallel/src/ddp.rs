//! One process per replica: every replica starts equal, receives equal gradients and stays equal.
//!
//! ```text
//!   forward (buffers of rank 0) ─▶ loss ─▶ backward ─┬─▶ gradient ready ─▶ its place in a bucket ─▶ bucket full
//!                                                    │                                                 │ Lane: all-reduce, beside backward
//!                                                    └─▶ end: all buckets reduced ◀────────────────────┘
//! ```
//! On a GPU nothing waits for it: gradients are queued for their buckets, buckets for the lane's stream, and what follows backward comes after that.
//!
//! Read in this order: `../layout.rs`, `progress.rs`, `lane.rs`, `reducer.rs`; for GPUs `queues.rs`.

mod lane;
mod observer;
mod progress;
mod queues;
mod reducer;
mod shared_buffers;

use std::cell::Cell;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use drumline_comm::{ProcessGroup, call_site, on_behalf_of};
use drumline_torch::{GradHook, Named, buffers, frozen, parameters};
use tch::Tensor;
use tch::nn::{ModuleT, VarStore};

pub(crate) use lane::BucketShape;
pub use lane::{AllReduce, CommHook, GradBucket};
pub use observer::{DdpObserver, ReducedBucket};

use crate::arena::Arena;
use crate::error::ParallelError;
use crate::layout::Caps;
use crate::sync_group::{SyncCall, SyncGroup};
use reducer::Reducer;
use shared_buffers::SharedBuffers;

type Result<T = ()> = std::result::Result<T, ParallelError>;

/// How [`Ddp`] does its work. The defaults are PyTorch's.
pub struct DdpOptions {
    /// Bytes after which a bucket is full.
    pub bucket_cap: usize,
    /// The same for the first bucket, which is small so that reduction begins early.
    pub first_bucket: usize,
    /// Whether a forward in training gives all ranks the buffers of rank 0 first.
    pub broadcast_buffers: bool,
    /// How a bucket is reduced.
    pub hook: Box<dyn CommHook>,
    /// The group of the model's [`SyncBatchNorm`](crate::SyncBatchNorm) layers, if it has some and ranks may run out of data.
    pub sync_group: Option<SyncGroup>,
    /// Names of parameters and buffers that every rank keeps to itself.
    pub ignored: Vec<String>,
    /// Who hears when each bucket is reduced; costs nothing where there is nobody. On a GPU with NCCL: when it is queued.
    pub observer: Option<Arc<dyn DdpObserver>>,
    /// Whether a rank that is alone does as one of several, such as to measure what that costs.
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

/// What is not trained.
struct Rest {
    /// Given to all ranks once.
    frozen: Vec<Named>,
    /// Changed by each forward.
    buffers: Vec<Named>,
}

/// What a replica has in common with others.
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
        // Parameters own their hooks, hooks the reducer, and the reducer the parameters.
        self.hooks.clear();
    }
}

/// A replica of a model, one of as many as the group has ranks.
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
    /// Parameters that were frozen when this was made: they have no place in a bucket.
    frozen: Vec<Named>,
    /// Nothing where this is the only rank.
    others: Option<WithOthers>,
    sync_group: Option<SyncGroup>,
    /// Whether backward reduces.
    is_syncing: Cell<bool>,
    /// Whether the next forward begins a step: the one before it was not inside `no_sync`.
    is_new_step: Cell<bool>,
    /// Whether `begin_step` has begun the step that is under way: all its forwards belong to it.
    is_begun: Cell<bool>,
    /// Who gives its buffers: rank 0, and where inputs are uneven the last rank that has data.
    pub(crate) buffers_of: Cell<usize>,
    /// What a loss is multiplied with before its backward.
    pub(crate) loss_factor: Cell<f64>,
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
    /// Makes `module`, whose variables are in `store`, a replica; called by all ranks of the group.
    ///
    /// All must have built the same model, which is checked first. Then all get the parameters and buffers of rank 0.
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
        // One tensor under two names has one gradient.
        let mut seen = std::collections::HashSet::new();
        params.retain(|named| named.tensor.numel() == 0 || seen.insert(named.tensor.data_ptr()));
        crate::agreement::check(group, &[params.clone(), shared.clone()].concat())?;
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
            sync_group,
            is_syncing: Cell::new(true),
            is_new_step: Cell::new(true),
            is_begun: Cell::new(false),
            buffers_of: Cell::new(0),
            loss_factor: Cell::new(1.0),
        })
    }

    /// The model itself.
    pub fn module(&self) -> &M {
        &self.module
    }

    /// The group in which gradients are reduced: Ddp's own, with all ranks of the group it was made with.
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// Backward from the mean loss over this rank's batch; afterwards every rank has the mean of all ranks' gradients, which lie in the buckets'
    /// memory. All ranks call it; parameters that some or all of them did not use are no problem.
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
            // Layers in the middle of backward can only put their group's failure in words.
            let failure = self.sync_group.as_ref().and_then(SyncGroup::failure);
            return Err(refusal.or_else(|| failure.map(Into::into)).unwrap_or_else(|| error.into()));
        }
        others.reducer().finish(|| Ok(()))
    }

    /// A parameter that was frozen when this was made, and is no longer, would have another gradient on each rank.
    fn check_frozen(&self, others: &WithOthers) -> Result {
        let Some(thawed) = self.frozen.iter().find(|named| named.tensor.requires_grad()) else {
            return Ok(());
        };
        let text = format!(
            "`{}` was frozen when rank {} made its Ddp, and now wants a gradient, which would not be reduced; \
             try to freeze it after Ddp is made, or to make another Ddp",
            thawed.name,
            self.group.rank()
        );
        others.reducer().abandon(&text);
        Err(ParallelError::Unfit(text))
    }

    /// Takes part in a backward of the others with nothing: this rank's gradients count as zero, and its layers of synchronised norms
    /// have no samples.
    #[track_caller]
    pub fn backward_nothing(&self) -> Result {
        if self.sync_group.as_ref().is_some_and(|group| !group.has_stepped()) {
            return self.refuse_first_step();
        }
        let calls = self.sync_group.as_ref().map_or_else(Vec::new, SyncGroup::calls);
        self.backward_nothing_beside(&calls)
    }

    /// A rank without data in its first step knows of no calls that it could shadow.
    fn refuse_first_step(&self) -> Result {
        let Some(others) = self.others.as_ref().filter(|_| self.is_syncing.get()) else { return Ok(()) };
        let text = format!(
            "rank {} has run out of data before its first step, and cannot know which synchronised norms the others wait for; \
             try a first batch of length 0 there, or data for all ranks",
            self.group.rank()
        );
        others.reducer().abandon(&text);
        self.sync_group.iter().for_each(|group| group.abort(&text));
        Err(ParallelError::Unfit(text))
    }

    /// The same where the others' synchronised norms make `calls` meanwhile, and not those of the step before. Gradients of earlier backwards inside
    /// [`no_sync`](Self::no_sync) are reduced.
    #[track_caller]
    pub fn backward_nothing_beside(&self, calls: &[SyncCall]) -> Result {
        let site = call_site();
        self.end_step();
        let Some(others) = self.others.as_ref().filter(|_| self.is_syncing.get()) else { return Ok(()) };
        let mut reducer = others.reducer();
        reducer.begin(site)?;
        self.sync_group.iter().for_each(|group| group.called_at(site));
        // Buckets are reduced on another thread, so that the others' norms, which wait for this rank, do not wait for ever.
        reducer.finish(|| match &self.sync_group {
            Some(sync_group) => Ok(sync_group.shadow(calls)?),
            None => Ok(()),
        })
    }

    /// What is done in `body` reduces nothing: backwards add up gradients on this rank. The next backward outside reduces the sum.
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

    /// Gives all ranks the buffers of rank 0, as a forward in training does; before an evaluation, in which ranks may see different numbers
    /// of batches, call this.
    #[track_caller]
    pub fn sync_buffers(&self) -> Result {
        let buffers = self.others.as_ref().and_then(|others| others.buffers.as_ref());
        let broadcast = |buffers: &SharedBuffers| buffers.broadcast(self.buffers_of.get());
        on_behalf_of(call_site(), || buffers.map_or(Ok(()), broadcast))
    }

    /// Begins a step in which not every rank has data: all ranks call it and get the buffers of rank `buffers_of`. Then those with data make any number of
    /// forwards, and backwards of which the last reduces, and the others call [`backward_nothing`](Self::backward_nothing). That ends the step.
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

    /// Forward in training, whatever it is made of: `body` gets the model. Otherwise as [`forward`](Self::forward).
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
            // In a closure it would be the closure's place.
            let site = call_site();
            self.sync_group.iter().for_each(|group| group.called_at(site));
        }
        if self.is_new_step.replace(self.is_syncing.get() && !is_begun) {
            if !is_begun {
                self.sync_buffers()?;
            }
            self.sync_group.iter().for_each(SyncGroup::begin_step);
        }
        match &self.sync_group {
            Some(group) => Ok(group.catch(|| body(&self.module))?),
            None => Ok(body(&self.module)),
        }
    }

    /// Bytes of each bucket, in the order of their reduction; none where this is the only rank.
    pub fn bucket_bytes(&self) -> Vec<usize> {
        self.others.as_ref().map_or_else(Vec::new, |others| others.reducer().bucket_bytes())
    }

    /// Whether backward reduces over ranks: there are others, or this one does as if there were.
    pub fn is_reducing(&self) -> bool {
        self.others.is_some()
    }

    /// Whether a step with this model can be recorded as a CUDA graph; if not, why. Asked after the first two steps, which show in which
    /// order gradients come.
    pub fn is_recordable(&self) -> std::result::Result<(), String> {
        self.sync_group.as_ref().map_or(Ok(()), SyncGroup::is_recordable)?;
        self.others.as_ref().map_or(Ok(()), |others| others.reducer().is_recordable())
    }

    /// Gives up all groups that the model's steps use: this rank will not go on, and others may be in any of them.
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
    /// Forward in training. Gives all ranks the buffers of rank 0 first; of the micro-batches of a step, of which all but the last are inside
    /// [`no_sync`](Self::no_sync), only the first does so.
    #[track_caller]
    pub fn forward(&self, input: &Tensor) -> Result<Tensor> {
        self.forward_with(|module| module.forward_t(input, true))
    }

    /// Forward in evaluation: no gradients, nothing shared.
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
            reducer.hear(index)
        })
    };
    Ok(params.iter().enumerate().map(hook).collect::<std::result::Result<_, _>>()?)
}
