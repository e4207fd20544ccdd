//! `Accelerator`: a training loop for one device becomes one for any number of ranks, by four changed lines, as with Hugging Face's Accelerate.
//!
//! ```text
//!   model, optimizer, loader ─prepare─▶ the same, each with one more duty:
//!
//!   loader     this rank's share of each step; before a window's first batch all ranks meet: counts and trouble of all
//!   model      forward as before; buffers of one rank for all
//!   backward   loss × its part of the window; the window's last one reduces, the others add up
//!   optimizer  steps, and lets go of gradients, when a window is complete; the schedule with it
//! ```
//! A window is the batches of one step: so many as `gradient_accumulation_steps` says on each rank, fewer at the end of an epoch. A turn is one batch of
//! it, on all ranks at once. A rank whose data has ended keeps taking turns, with batches that count nowhere, so that all make the same calls.
//!
//! Read in this order: `window`, `shared`, `share`, `loader`, `model`, `norms`, `scaling`, `optimizer`, `collect`, `save`, `several`, `tracker`.

mod builder;
mod collect;
mod error;
mod loader;
mod model;
mod norms;
mod optimizer;
mod save;
mod scaling;
mod several;
mod share;
mod shared;
mod tracker;
mod uneven;
mod window;

use std::cell::RefCell;
use std::fmt::Display;
use std::io::Write;
use std::rc::Rc;

use drumline_comm::{ProcessGroup, call_site, on_behalf_of};
use drumline_parallel::DdpOptions;
use drumline_torch::{Named, NormType, Optimizer, clip_grad_norm, grad_norm, nccl};
use tch::nn::VarStore;
use tch::{Device, Tensor};

use crate::checkpoint::Checkpoints;
use crate::loader::{Cause, Dataset, Loader};
use crate::main_first::main_first;
use crate::schedule::Schedule;
use crate::shared_failure::SharedFailure;
use crate::trainer::Batch;
use error::Result;
use model::Replica;
use optimizer::{Kept, Scheduled};
use shared::Shared;
use tracker::Trackers;

pub use builder::AcceleratorBuilder;
pub use collect::{PadAt, Padding};
pub use error::AcceleratorError;
pub use loader::{Batches, PreparedLoader};
pub use model::PreparedModel;
pub use optimizer::{PreparedOptimizer, PreparedSchedule};
pub use save::Resumed;
pub use tracker::{JsonLines, Moment, Started, TensorBoard, Tracker, TrackerResult};
pub use uneven::JoinUnevenInputs;

/// Finds out what it runs on and prepares a training loop for it: one process or many, a processor or a GPU.
///
/// ```
/// use drumline::tch::nn::{self, VarStore};
/// use drumline::{Accelerator, Cause, DistributedSampler, Loader, LoaderOptions, MapDataset, SamplerOptions, Sgd, SgdOptions, parameters};
/// use drumline::tch::{Kind, Tensor};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let accelerator = Accelerator::new()?;
/// drumline::tch::manual_seed(1); // the first weights
/// let store = VarStore::new(accelerator.device());
/// let model = nn::linear(store.root(), 1, 1, Default::default());
/// let optimizer = Sgd::new(parameters(&store), SgdOptions { lr: 0.1, ..Default::default() })?;
/// let load = |sample: drumline::Sample| Ok(sample.index as f32 / 8.0);
/// let pair = |xs: Vec<f32>| Ok::<_, Cause>((Tensor::from_slice(&xs).view([-1, 1]), Tensor::from_slice(&xs).view([-1, 1]) * 2.0));
/// let sampler = DistributedSampler::new(SamplerOptions { num_samples: 8, ..Default::default() })?;
/// let loader = Loader::new(MapDataset::new(8, load, pair), sampler, LoaderOptions { batch_size: 4, ..Default::default() })?;
///
/// let (model, mut optimizer, loader) = accelerator.prepare(model, &store, optimizer, loader)?;
/// for epoch in 0..100 {
///     for batch in loader.epoch(epoch) {
///         let (x, y) = batch?;
///         let loss = model.forward_t(&x, true).mse_loss(&y, drumline::tch::Reduction::Mean);
///         accelerator.backward(&loss)?;
///         optimizer.step()?;
///         optimizer.zero_grad()?;
///     }
/// }
/// assert!((model.unwrap().ws.sum(Kind::Double).double_value(&[]) - 2.0).abs() < 0.2);
/// # Ok(())
/// # }
/// ```
pub struct Accelerator {
    shared: Rc<Shared>,
    /// The models that were prepared, with all their tensors.
    models: RefCell<Vec<Prepared>>,
    optimizers: RefCell<Vec<Kept>>,
    schedules: RefCell<Vec<Rc<dyn Scheduled>>>,
    trackers: RefCell<Trackers>,
    /// One of each folder that was saved to or loaded from.
    checkpoints: RefCell<Vec<Checkpoints>>,
    new_data: builder::NewData,
}

/// A model, whatever its type is.
struct Prepared {
    replica: Rc<dyn Replica>,
    tensors: Vec<Named>,
}

impl Accelerator {
    /// Joins the job that a launcher has started; without one this is the only process.
    pub fn new() -> Result<Self> {
        Self::builder().build()
    }

    /// The same with options.
    pub fn builder() -> AcceleratorBuilder {
        AcceleratorBuilder::default()
    }

    /// Prepares a model whose variables are in `store`, its optimizer, and the loader it is trained on; called by all ranks. All get the weights of rank 0.
    ///
    /// The loader's sampler gives all samples, as in a program of one process; its batch size is that of each rank.
    #[track_caller]
    pub fn prepare<M: 'static, O: Optimizer + 'static, D: Dataset + 'static>(
        &self,
        model: M,
        store: &VarStore,
        optimizer: O,
        loader: Loader<D>,
    ) -> Result<(PreparedModel<M>, PreparedOptimizer<O>, PreparedLoader<D>)>
    where
        D::Batch: Batch,
    {
        let loader = self.prepare_loader(loader)?;
        let model = self.prepare_model(model, store, DdpOptions::default())?;
        Ok((model, self.prepare_optimizer(optimizer), loader))
    }

    /// One more model, or one with options.
    #[track_caller]
    pub fn prepare_model<M: 'static>(
        &self,
        model: M,
        store: &VarStore,
        options: DdpOptions,
    ) -> Result<PreparedModel<M>> {
        on_behalf_of(call_site(), || {
            model::check(store, &self.models.borrow(), &self.shared)?;
            let (model, prepared) = PreparedModel::new(model, store, options, &self.shared)?;
            self.models.borrow_mut().push(prepared);
            Ok(model)
        })
    }

    /// One more optimizer.
    pub fn prepare_optimizer<O: Optimizer + 'static>(&self, optimizer: O) -> PreparedOptimizer<O> {
        let optimizer = PreparedOptimizer::new(optimizer, &self.shared);
        self.optimizers.borrow_mut().push(optimizer.kept());
        optimizer
    }

    /// One more loader, such as that of an evaluation. The first that is prepared is the one by which epochs are counted, for schedules and saved states.
    pub fn prepare_loader<D: Dataset + 'static>(&self, loader: Loader<D>) -> Result<PreparedLoader<D>>
    where
        D::Batch: Batch,
    {
        let loader = PreparedLoader::new(loader, &self.shared)?;
        self.shared.place.get_or_init(|| loader.place());
        Ok(loader)
    }

    /// A schedule for an optimizer's learning rate, which it sets at once.
    pub fn prepare_schedule<O: Optimizer + 'static, S: Schedule + 'static>(
        &self,
        optimizer: &PreparedOptimizer<O>,
        schedule: S,
    ) -> PreparedSchedule<O, S> {
        let schedule = PreparedSchedule::new(optimizer, schedule);
        self.schedules.borrow_mut().push(schedule.kept());
        schedule
    }

    /// Backward from the mean loss over this turn's batch. The last one of a window reduces: every rank then has the gradient of the mean over all samples
    /// of the window, on all ranks. A batch that only fills up a turn has no gradient.
    #[track_caller]
    pub fn backward(&self, loss: &Tensor) -> Result {
        on_behalf_of(call_site(), || self.shared.backward(&self.replica()?, loss))
    }

    /// Takes part in the others' backward with nothing, in a turn without a batch; see [`join_uneven_inputs`](Self::join_uneven_inputs).
    #[track_caller]
    pub fn backward_nothing(&self) -> Result {
        on_behalf_of(call_site(), || self.shared.backward_nothing(&self.replica()?))
    }

    fn replica(&self) -> Result<Rc<dyn Replica>> {
        match &self.models.borrow()[..] {
            [model] => Ok(model.replica.clone()),
            // As many on every rank, as they prepare models together.
            models => Err(SharedFailure::alike(format!(
                "backward is that of one model, and {} are prepared; try `model.backward(&loss)`",
                models.len()
            ))
            .into()),
        }
    }

    /// The body of a turn in which gradients are added up. In the turns of a prepared loader it does as they say; in other loops it counts its own calls,
    /// and each one that completes `gradient_accumulation_steps` of them ends a window, whose batches then all weigh the same.
    ///
    /// ```
    /// # use drumline::Accelerator;
    /// let accelerator = Accelerator::builder().gradient_accumulation_steps(3).build()?;
    /// let ends: Vec<bool> = (0..6).map(|_| accelerator.accumulate(|| accelerator.sync_gradients())).collect();
    /// assert_eq!(ends, [false, false, true, false, false, true]);
    /// # Ok::<(), drumline::AcceleratorError>(())
    /// ```
    pub fn accumulate<R>(&self, body: impl FnOnce() -> R) -> R {
        let _turn = self.shared.scope();
        body()
    }

    /// Backwards in `body` add up gradients on this rank and reduce nothing; a later one outside reduces the sum.
    pub fn no_sync<R>(&self, body: impl FnOnce() -> R) -> R {
        let _before = self.shared.without_sync();
        body()
    }

    /// Whether this turn ends a window: gradients are reduced, and the optimizer steps.
    pub fn sync_gradients(&self) -> bool {
        self.shared.turn().is_last
    }

    /// Scales gradients down to this norm, and returns what it was; in turns that do not end a window it does nothing. Call it between backward and step.
    ///
    /// In fp16 the gradients are those of the loss itself by then. Where they have overflowed, what comes back is no number, and the step will be skipped.
    pub fn clip_grad_norm(&self, parameters: &[Named], max_norm: f64) -> Result<Option<f64>> {
        if !self.sync_gradients() {
            return Ok(None);
        }
        Ok(Some(match self.unscale(parameters)? {
            true => grad_norm(parameters, NormType::L2)?,
            false => clip_grad_norm(parameters, max_norm)?,
        }))
    }

    /// Unscales the gradients of all optimizers that train one of these; says whether some have overflowed.
    fn unscale(&self, parameters: &[Named]) -> Result<bool> {
        let mut has_overflowed = false;
        for kept in self.optimizers.borrow().iter() {
            let Some(scaled) = self.shared.scaled(&kept.grads) else { continue };
            let own = kept.optimizer.borrow().parameters();
            let is_asked_for =
                |own: &Named| parameters.iter().any(|asked| asked.tensor.data_ptr() == own.tensor.data_ptr());
            if own.iter().any(is_asked_for) {
                has_overflowed |= scaled.unscale(own)?;
            }
        }
        Ok(has_overflowed)
    }

    /// What losses are multiplied by in fp16, in all other precisions 1.
    pub fn loss_scale(&self) -> Result<f64> {
        self.shared.scaling.as_ref().map_or(Ok(1.0), |scaling| Ok(scaling.scaler()?.scale()?))
    }

    /// The model itself; also [`PreparedModel::unwrap`].
    pub fn unwrap_model<'a, M>(&self, model: &'a PreparedModel<M>) -> &'a M {
        model.unwrap()
    }

    /// The rest of an epoch after so many batches of each rank, which are not loaded.
    pub fn skip_first_batches<D: Dataset + 'static>(
        &self,
        loader: &PreparedLoader<D>,
        epoch: u64,
        num_batches: usize,
    ) -> Batches<D>
    where
        D::Batch: Batch,
    {
        loader.after(epoch, num_batches)
    }

    /// Where models and batches go.
    pub fn device(&self) -> Device {
        self.shared.device
    }

    /// All ranks.
    pub fn group(&self) -> &ProcessGroup {
        &self.shared.group
    }

    /// How many ranks there are.
    pub fn num_processes(&self) -> usize {
        self.group().size()
    }

    /// This rank.
    pub fn process_index(&self) -> usize {
        self.group().rank()
    }

    /// This rank among those of its machine.
    pub fn local_process_index(&self) -> usize {
        self.group().local_rank()
    }

    /// Whether this is rank 0.
    pub fn is_main_process(&self) -> bool {
        self.process_index() == 0
    }

    /// Whether this is the first rank of its machine.
    pub fn is_local_main_process(&self) -> bool {
        self.local_process_index() == 0
    }

    /// Does it on rank 0 alone. Nothing in it may wait for other ranks.
    pub fn on_main_process<R>(&self, body: impl FnOnce() -> R) -> Option<R> {
        self.is_main_process().then(body)
    }

    /// Does it on the first rank of each machine.
    pub fn on_local_main_process<R>(&self, body: impl FnOnce() -> R) -> Option<R> {
        self.is_local_main_process().then(body)
    }

    /// Rank 0 does it first, and then the others; see [`main_first`].
    #[track_caller]
    pub fn main_process_first<T>(
        &self,
        what: &str,
        work: impl FnOnce() -> std::result::Result<T, Cause>,
    ) -> Result<T> {
        main_first(self.group(), what, work)
    }

    /// A line on stdout, of rank 0.
    pub fn print(&self, line: impl Display) {
        // A stdout that is gone ends nothing.
        self.on_main_process(|| drop(writeln!(std::io::stdout(), "{line}")));
    }

    /// Waits for all ranks, each of which has waited for its GPU: an error if what was queued there failed.
    #[track_caller]
    pub fn wait_for_everyone(&self) -> Result {
        nccl::settle(self.device())?;
        Ok(self.group().barrier()?)
    }

    /// This rank's part of a list that all ranks have: in order, the first ranks one more where it does not divide.
    ///
    /// ```
    /// # use drumline::Accelerator;
    /// let accelerator = Accelerator::new()?;
    /// assert_eq!(accelerator.split_between_processes(&["a", "b", "c"]), ["a", "b", "c"]); // of the only process
    /// # Ok::<(), drumline::AcceleratorError>(())
    /// ```
    pub fn split_between_processes<'a, T>(&self, items: &'a [T]) -> &'a [T] {
        let (rank, ranks) = (self.process_index(), self.num_processes());
        let begin_of = |rank: usize| items.len() / ranks * rank + rank.min(items.len() % ranks);
        &items[begin_of(rank)..begin_of(rank + 1)]
    }

    /// The same with as many on each rank, as `apply_padding` has it: where there is one less, the last item of all is there once more.
    pub fn split_between_processes_padded<'a, T>(&self, items: &'a [T]) -> Vec<&'a T> {
        let longest = items.len().div_ceil(self.num_processes());
        let own = self.split_between_processes(items).iter();
        own.chain(items.last().into_iter().cycle()).take(longest).collect()
    }
}

impl std::fmt::Debug for Accelerator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Accelerator")
            .field("rank", &self.process_index())
            .field("num_processes", &self.num_processes())
            .field("device", &self.device())
            .finish_non_exhaustive()
    }
}
