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
//! Read in this order: `../layout.rs`, `../progress.rs`, `../lane.rs`, `../reducer.rs`, `bucket.rs`, `places.rs`; then `../queues.rs`
//! for GPUs, and `engine.rs` for training loops. Buffers, norms and ranks without a batch: `../synced.rs`.

mod bucket;
mod engine;
mod places;
mod uneven;

use std::sync::Arc;

use drumline_comm::{ProcessGroup, call_site, on_behalf_of};
use drumline_torch::Named;
use tch::Tensor;
use tch::nn::{ModuleT, VarStore};

pub(crate) use bucket::BucketShape;
pub use bucket::{AllReduce, CommHook, GradBucket};
pub use uneven::{DivideBy, Uneven, UnevenTurn};

use crate::error::{NotRecordable, ParallelError};
use crate::observer::ReductionObserver;
use crate::reduction::Reduction;
use crate::sync_group::{SyncCall, SyncGroup};
use crate::synced::{ModelTensors, Synced, SyncedSetup, broadcast_tensors};

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
    synced: Synced,
}

impl<M> std::fmt::Debug for Ddp<M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ddp")
            .field("group", &self.group().name())
            .field("params", &self.synced.params().len())
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
        let tensors = ModelTensors::of(store, &options.ignored, group)?;
        let group = Arc::new(crate::own_group(group)?);
        let (broadcast_buffers, sync_group) = (options.broadcast_buffers, options.sync_group.clone());
        let reduction: Option<Box<dyn Reduction>> = match group.size() {
            1 if !options.reduces_alone => None,
            _ => {
                let reducer = places::reducer(group.clone(), tensors.params.clone(), options)?;
                broadcast_tensors(&group, tensors.frozen.clone())?;
                Some(Box::new(reducer))
            }
        };
        let synced = Synced::new(SyncedSetup { group, tensors, reduction, broadcast_buffers, sync_group })?;
        Ok(Self { module, synced })
    }

    /// The model.
    pub fn module(&self) -> &M {
        &self.module
    }

    /// The group in which gradients are reduced: a new group with the same ranks as the one given.
    pub fn group(&self) -> &ProcessGroup {
        self.synced.group()
    }

    /// Runs backward from the mean loss over this rank's batch. Afterwards every rank has the mean of all ranks'
    /// gradients, which are views of the buckets. All ranks call it. Ranks need not use all parameters.
    #[track_caller]
    pub fn backward(&self, loss: &Tensor) -> Result {
        self.synced.backward(loss)
    }

    /// Takes part in a backward of the other ranks without a batch: this rank's gradients are zero, and its
    /// synchronised norms have no samples.
    #[track_caller]
    pub fn backward_nothing(&self) -> Result {
        self.synced.backward_nothing()
    }

    /// The same, if the other ranks' synchronised norms make `calls`, and not those of the step before. Gradients of
    /// earlier backwards inside [`no_sync`](Self::no_sync) are reduced.
    #[track_caller]
    pub fn backward_nothing_beside(&self, calls: &[SyncCall]) -> Result {
        self.synced.join_backward(calls)
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
        self.synced.no_sync(body)
    }

    /// Broadcasts the buffers of rank 0, as a forward in training does. Call it before an evaluation, in which ranks
    /// may have different numbers of batches.
    #[track_caller]
    pub fn sync_buffers(&self) -> Result {
        self.synced.sync_buffers()
    }

    /// Begins a step in which some ranks may have no data. All ranks call it and get the buffers of rank `buffers_of`.
    /// Then ranks with data make any number of forwards and backwards, of which the last backward reduces; the others
    /// call [`backward_nothing`](Self::backward_nothing). That ends the step.
    #[track_caller]
    pub fn begin_step(&self, buffers_of: usize) -> Result {
        self.synced.begin_step(buffers_of)
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
        self.synced.forward(|| body(&self.module))
    }

    /// The size of each bucket in bytes, in the order of their reduction; empty for a single rank.
    pub fn bucket_bytes(&self) -> Vec<usize> {
        self.synced.reduced_bytes()
    }

    /// Whether backward reduces over ranks: there are several, or `reduces_alone` is set.
    pub fn is_reducing(&self) -> bool {
        self.synced.is_reducing()
    }

    /// An error that says why, if a step of this model cannot be recorded as a CUDA graph. Call it after the first two
    /// steps, which show in which order gradients become ready.
    pub fn is_recordable(&self) -> std::result::Result<(), NotRecordable> {
        self.synced.is_recordable()
    }

    /// Aborts all groups that steps use: this rank will not continue, and other ranks may be waiting in any of them.
    pub fn abort(&self, cause: &str) {
        self.synced.abort(cause);
    }

    /// The parameters whose gradients are reduced.
    pub fn parameters(&self) -> Vec<Named> {
        self.synced.params().to_vec()
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
