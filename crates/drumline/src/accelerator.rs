//! `Accelerator`: four changed lines turn a training loop for one device into one for any number of ranks, as with
//! Hugging Face's Accelerate.
//!
//! ```text
//!   model, optimizer, loader ─prepare─▶ the same, and besides:
//!
//!   loader     this rank's share of each step; before each window all ranks exchange counts and errors
//!   model      forward as before; all ranks have the buffers of one
//!   backward   loss × its part of the window; the last one of a window reduces, the others accumulate
//!   optimizer  steps and clears gradients when a window is complete; the schedule likewise
//! ```
//! A *window* is the batches of one step: `gradient_accumulation_steps` of each rank, fewer at the end of an epoch. A
//! *turn* is one batch of it, on all ranks at once. A rank whose data has ended still takes turns, with a *filler*: a
//! batch that does not count. So all ranks make the same calls.
//!
//! Read in this order: `window`, `shared`, `share`, `loader`, `model`, `stages`, `masks`, `scaling`, `optimizer`, `collect`,
//! `save`, `several`, `tracker`.

mod builder;
mod collect;
mod error;
mod loader;
mod masks;
mod model;
mod optimizer;
mod save;
mod scaling;
mod several;
mod share;
mod shared;
mod stages;
mod tracker;
mod uneven;
mod window;

use std::cell::RefCell;
use std::fmt::Display;
use std::io::Write;
use std::rc::Rc;

use drumline_comm::{Mesh, ProcessGroup, ReduceOp, call_site, on_behalf_of};
use drumline_parallel::EngineOptions;
use drumline_torch::{Named, Optimizer, nccl};
use tch::nn::VarStore;
use tch::{Device, Tensor};

use crate::checkpoint::Checkpoints;
use crate::comm::alike::usage_error;
use crate::comm::shared_failure::SharedFailure;
use crate::data::loader::{Cause, Dataset, Loader};
use crate::launch::main_first::main_first;
use crate::schedule::Schedule;
use crate::trainer::Batch;
use error::Result;
use model::{Replica, clip_norm, gradients_are_elsewhere};
use optimizer::{OptimizerHandle, Scheduled};
pub(crate) use shared::Entry as OpenTurn;
use shared::Shared;
use tracker::Trackers;

pub use crate::run_error::UsageError;
pub use builder::AcceleratorBuilder;
pub use collect::{PadAt, Padding};
pub use error::AcceleratorError;
pub use loader::{Batches, PreparedLoader};
pub use model::PreparedModel;
pub use optimizer::{PreparedOptimizer, PreparedSchedule};
pub use save::Resumed;
pub use tracker::{CsvFiles, JsonLines, Moment, Started, TensorBoard, Tracker, TrackerResult};
pub use uneven::JoinUnevenInputs;

/// Prepares a training loop for what it runs on: one process or many, CPUs or GPUs. Use it for a training loop of your
/// own; [`DistTrainer`](crate::DistTrainer) has the loop built in.
///
/// ```
/// use drumline::tch::nn::{self, VarStore};
/// use drumline::Accelerator;
/// use drumline::data::{Cause, DistributedSampler, Loader, LoaderOptions, MapDataset, SamplerOptions};
/// use drumline::optim::{Sgd, SgdOptions, parameters};
/// use drumline::tch::{Kind, Tensor};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let accelerator = Accelerator::new()?;
/// drumline::tch::manual_seed(1); // the initial weights
/// let store = VarStore::new(accelerator.device());
/// let model = nn::linear(store.root(), 1, 1, Default::default());
/// let optimizer = Sgd::new(parameters(&store), SgdOptions { lr: 0.1, ..Default::default() })?;
/// let load = |sample: drumline::data::Sample| Ok(sample.index as f32 / 8.0);
/// let column = |xs: &[f32]| Tensor::from_slice(xs).view([-1, 1]);
/// let pair = move |xs: Vec<f32>| Ok::<_, Cause>((column(&xs), column(&xs) * 2.0));
/// let sampler = DistributedSampler::new(SamplerOptions { num_samples: 8, ..Default::default() })?;
/// let options = LoaderOptions { batch_size: 4, ..Default::default() };
/// let loader = Loader::new(MapDataset::new(8, load, pair), sampler, options)?;
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
    optimizers: RefCell<Vec<OptimizerHandle>>,
    schedules: RefCell<Vec<Rc<dyn Scheduled>>>,
    trackers: RefCell<Trackers>,
    /// One for each folder that was saved to or loaded from.
    checkpoints: RefCell<Vec<Checkpoints>>,
    new_data: builder::NewData,
}

impl Accelerator {
    /// Joins the job that a launcher has started. Without a launcher this is the only process.
    pub fn new() -> Result<Self> {
        Self::builder().build()
    }

    /// An accelerator with options.
    pub fn builder() -> AcceleratorBuilder {
        AcceleratorBuilder::default()
    }

    /// Prepares a model whose variables are in `store`, its optimizer and the loader of its training data. All ranks
    /// call it. All ranks get the weights of rank 0.
    ///
    /// The loader's sampler gives all samples, as in a program of one process. Its batch size is that of each rank.
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
        let model = self.prepare_model(model, store, self.shared.engine_options())?;
        Ok((model, self.adopt(optimizer)?, loader))
    }

    /// Prepares one more model, or one with options that say how ranks train it together. They arrange the ranks as
    /// those of the accelerator ([`AcceleratorBuilder::engine`]) do.
    #[track_caller]
    pub fn prepare_model<M: 'static>(
        &self,
        model: M,
        store: &VarStore,
        options: impl Into<Box<dyn EngineOptions>>,
    ) -> Result<PreparedModel<M>> {
        on_behalf_of(call_site(), || {
            let model = PreparedModel::new(model, store, options.into(), &self.shared)?;
            // Of an optimizer that was prepared first it is decided now where its state lies, before training.
            let optimizers = self.optimizers.borrow();
            let mut known = optimizers.iter().filter(|handle| handle.is_of_prepared_models(&self.shared));
            known.try_for_each(|handle| handle.adopt(&self.shared))?;
            Ok(model)
        })
    }

    /// How the ranks are arranged, by the options of [`AcceleratorBuilder::engine`]. Layers that are cut among ranks, and
    /// [`Stages`](crate::engine::pipeline::Stages), are built on it.
    pub fn mesh(&self) -> &Mesh {
        &self.shared.mesh
    }

    /// The options of the engine of a model, those of [`AcceleratorBuilder::engine`].
    pub(crate) fn engine_options(&self) -> Box<dyn EngineOptions> {
        self.shared.engine_options()
    }

    /// Prepares one more optimizer, after its model, and returns what cannot be done.
    pub(crate) fn adopt<O: Optimizer + 'static>(&self, optimizer: O) -> Result<PreparedOptimizer<O>> {
        let prepared = PreparedOptimizer::new(optimizer, &self.shared);
        prepared.handle().adopt(&self.shared)?;
        self.optimizers.borrow_mut().push(prepared.handle());
        Ok(prepared)
    }

    /// Prepares one more optimizer, after its model. It cannot return an error; the next backward returns it instead.
    pub fn prepare_optimizer<O: Optimizer + 'static>(&self, optimizer: O) -> PreparedOptimizer<O> {
        let optimizer = PreparedOptimizer::new(optimizer, &self.shared);
        if let Err(error) = optimizer.handle().adopt(&self.shared) {
            self.shared.note(error);
        }
        self.optimizers.borrow_mut().push(optimizer.handle());
        optimizer
    }

    /// Prepares one more loader, such as that of an evaluation. The first prepared loader is the one by which epochs
    /// are counted, for schedules and saved states.
    pub fn prepare_loader<D: Dataset + 'static>(&self, loader: Loader<D>) -> Result<PreparedLoader<D>>
    where
        D::Batch: Batch,
    {
        let loader = PreparedLoader::new(loader, &self.shared)?;
        self.shared.first_loader.get_or_init(|| loader.position());
        Ok(loader)
    }

    /// Prepares a schedule for an optimizer's learning rate, and sets the learning rate at once.
    pub fn prepare_schedule<O: Optimizer + 'static, S: Schedule + 'static>(
        &self,
        optimizer: &PreparedOptimizer<O>,
        schedule: S,
    ) -> PreparedSchedule<O, S> {
        let schedule = PreparedSchedule::new(optimizer, schedule);
        self.schedules.borrow_mut().push(schedule.handle());
        schedule
    }

    /// Runs backward from the mean loss over this turn's batch. The last backward of a window reduces: every rank then
    /// has the gradient of the mean over all samples of the window, on all ranks. A filler batch has no gradient.
    #[track_caller]
    pub fn backward(&self, loss: &Tensor) -> Result {
        on_behalf_of(call_site(), || self.shared.backward(&self.replica()?, loss))
    }

    /// Takes part in the other ranks' backward without a batch; see [`join_uneven_inputs`](Self::join_uneven_inputs).
    #[track_caller]
    pub fn backward_nothing(&self) -> Result {
        on_behalf_of(call_site(), || self.shared.backward_nothing(&self.replica()?))
    }

    fn replica(&self) -> Result<Rc<Replica>> {
        match &self.shared.models.borrow()[..] {
            [model] => Ok(model.replica.clone()),
            // The number is the same on every rank, because ranks prepare models together.
            models => Err(SharedFailure::on_all_ranks(format!(
                "backward of which model is not clear, because {} are prepared; try `model.backward(&loss)`",
                models.len()
            ))
            .into()),
        }
    }

    /// Runs the body of a turn in which gradients are accumulated. In the turns of a prepared loader the window is that
    /// of the loader. In other loops this counts its own calls: every `gradient_accumulation_steps` of them make a
    /// window, whose batches all have the same weight.
    ///
    /// ```
    /// # use drumline::Accelerator;
    /// let accelerator = Accelerator::builder().gradient_accumulation_steps(3).build()?;
    /// let ends: Vec<bool> = (0..6).map(|_| accelerator.accumulate(|| accelerator.sync_gradients())).collect();
    /// assert_eq!(ends, [false, false, true, false, false, true]);
    /// # Ok::<(), drumline::accelerator::AcceleratorError>(())
    /// ```
    pub fn accumulate<R>(&self, body: impl FnOnce() -> R) -> R {
        let _turn = self.shared.scope();
        body()
    }

    /// Begins a turn as [`accumulate`](Self::accumulate) does, which lasts until the result is dropped. Returns `None` in
    /// the turns of a prepared loader.
    pub(crate) fn begin_turn(&self) -> Option<OpenTurn> {
        self.shared.scope()
    }

    /// Whether a turn has begun, of a prepared loader or by itself.
    pub(crate) fn is_in_turn(&self) -> bool {
        self.shared.is_in_turn()
    }

    /// Whether the next [`begin_turn`](Self::begin_turn) ends a window.
    pub(crate) fn is_next_turn_last(&self) -> bool {
        self.shared.is_next_last()
    }

    /// Whether gradients of a window are accumulated that is not complete.
    pub(crate) fn is_within_window(&self) -> bool {
        self.shared.is_within_window()
    }

    /// Runs `body`, in which a backward accumulates gradients on this rank and reduces nothing. A later backward
    /// outside reduces the sum.
    pub fn no_sync<R>(&self, body: impl FnOnce() -> R) -> R {
        let _before = self.shared.without_sync();
        body()
    }

    /// Whether this turn ends a window, so that gradients are reduced and the optimizer steps.
    pub fn sync_gradients(&self) -> bool {
        self.shared.turn().is_last
    }

    /// Scales gradients down to this norm and returns the norm before. In turns that do not end a window it does
    /// nothing. Call it between backward and step.
    ///
    /// In fp16 the gradients are unscaled first. If they have overflowed, the norm is not a finite number, and the step
    /// will be skipped.
    ///
    /// Where ranks divide gradients, `parameters` are the rows that this rank holds: those of
    /// [`PreparedModel::parameters`] or [`PreparedOptimizer::parameters`]. All ranks call it.
    pub fn clip_grad_norm(&self, parameters: &[Named], max_norm: f64) -> Result<Option<f64>> {
        if !self.sync_gradients() {
            return Ok(None);
        }
        let models = self.shared.by_model(parameters);
        if self.shared.is_divided() && gradients_are_elsewhere(&models)? {
            return Err(usage_error(self.group(), UsageError::ClippedWhole));
        }
        let has_overflowed = self.unscale(parameters)?;
        // Gradients that have overflowed are not clipped: the step will be skipped.
        let max_norm = if has_overflowed { f64::INFINITY } else { max_norm };
        Ok(Some(clip_norm(&models, max_norm)?))
    }

    /// Unscales the gradients of all optimizers that train one of these parameters. Returns whether some have
    /// overflowed.
    fn unscale(&self, parameters: &[Named]) -> Result<bool> {
        if self.shared.scaling.is_none() {
            return Ok(false);
        }
        let optimizers = self.optimizers.borrow();
        let mut asked: Vec<u8> =
            optimizers.iter().map(|handle| u8::from(handle.trains(parameters))).collect();
        if self.shared.is_divided() {
            // A rank may hold nothing of what an optimizer trains, and unscales it with the others all the same.
            self.group().all_reduce(&mut asked, ReduceOp::Max)?;
        }
        let mut has_overflowed = false;
        for (handle, _) in optimizers.iter().zip(asked).filter(|(_, is_asked)| *is_asked == 1) {
            let Some(scaled) = self.shared.scaled(&handle.grads) else { continue };
            let own = handle.optimizer.borrow().parameters();
            has_overflowed |= scaled.unscale(&own, handle.model.get())?;
        }
        Ok(has_overflowed)
    }

    /// The factor by which losses are multiplied in fp16; 1 in all other precisions.
    pub fn loss_scale(&self) -> Result<f64> {
        self.shared.scaling.as_ref().map_or(Ok(1.0), |scaling| Ok(scaling.scaler()?.scale()?))
    }

    /// The model itself, as [`PreparedModel::unwrap`].
    pub fn unwrap_model<'a, M>(&self, model: &'a PreparedModel<M>) -> &'a M {
        model.unwrap()
    }

    /// The batches of an epoch after the first `num_batches` of each rank. The skipped ones are not loaded.
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

    /// The device of models and batches.
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

    /// Runs `body` on rank 0 only. Nothing in it may wait for other ranks.
    pub fn on_main_process<R>(&self, body: impl FnOnce() -> R) -> Option<R> {
        self.is_main_process().then(body)
    }

    /// Runs `body` on the first rank of each machine.
    pub fn on_local_main_process<R>(&self, body: impl FnOnce() -> R) -> Option<R> {
        self.is_local_main_process().then(body)
    }

    /// Runs `work` on rank 0 first, and then on the other ranks; see [`main_first`].
    #[track_caller]
    pub fn main_process_first<T>(
        &self,
        what: &str,
        work: impl FnOnce() -> std::result::Result<T, Cause>,
    ) -> Result<T> {
        main_first(self.group(), what, work)
    }

    /// Prints a line to stdout, on rank 0.
    pub fn print(&self, line: impl Display) {
        // A closed stdout is no reason to stop.
        self.on_main_process(|| drop(writeln!(std::io::stdout(), "{line}")));
    }

    /// Waits for the GPU of this rank, and then for all ranks. An error of the work that was queued on the GPU is
    /// returned here.
    #[track_caller]
    pub fn wait_for_everyone(&self) -> Result {
        nccl::settle(self.device())?;
        Ok(self.group().barrier()?)
    }

    /// This rank's part of a list that all ranks have. Parts are in order; where the list does not divide, the first
    /// ranks have one item more.
    ///
    /// ```
    /// # use drumline::Accelerator;
    /// let accelerator = Accelerator::new()?;
    /// assert_eq!(accelerator.split_between_processes(&["a", "b", "c"]), ["a", "b", "c"]); // there is one process
    /// # Ok::<(), drumline::accelerator::AcceleratorError>(())
    /// ```
    pub fn split_between_processes<'a, T>(&self, items: &'a [T]) -> &'a [T] {
        let (rank, ranks) = (self.process_index(), self.num_processes());
        let begin_of = |rank: usize| items.len() / ranks * rank + rank.min(items.len() % ranks);
        &items[begin_of(rank)..begin_of(rank + 1)]
    }

    /// As [`split_between_processes`](Self::split_between_processes), with equal numbers of items on all ranks, like
    /// Accelerate's `apply_padding`: the last item of the list is repeated where a part is one item short.
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
