//! `DistTrainer`: a training loop for any number of ranks, modelled on fastNLP's.
//!
//! ```text
//!   train_data ─▶ WholeShare, Loader ─▶ up to update_every batches ─▶ agree: counts, requests, failures of all ranks
//!                                                                      │
//!      ┌─ evaluation, checkpoint, stop: if any rank asks for it ◀──────┤
//!      │                                                               ▼
//!      └─▶ callbacks ◀─ optimizer ◀─ one reduction ◀─ sums of losses ÷ count of the whole step over all ranks
//! ```
//! Read in this order: `settings`, `callback`, `state`, `context`, `run`, `supply`, `learner`, `step`, `evaluate`,
//! `save`, `resume`.
//!
//! - `batch`, `model`, `loss`, `metric`: the traits of what is trained
//! - `learner`: the model on its engine (`drumline-parallel`), which coordinates the ranks
//! - `train_data`, `best`, `weights`: the position in the data, the best models, the weights for evaluation
//! - `callbacks`: the built-in callbacks
//! - `step_mode`, `graphs`, `upload`: CUDA graphs
//! - `pipelined`: steps and evaluations of a model that is cut into stages

mod batch;
mod best;
mod callback;
mod callbacks;
mod context;
mod data;
mod end;
mod error;
mod evaluate;
mod graphs;
mod hooks;
mod learner;
mod loss;
mod metric;
mod model;
mod pipeline_trace;
mod pipelined;
mod prepare;
mod resume;
mod run;
mod save;
mod settings;
mod share;
mod state;
mod step;
mod step_mode;
mod supply;
mod test_run;
mod tracer;
mod train_data;
mod upload;
mod waits;
mod weights;

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::PathBuf;
use std::sync::Arc;

use drumline_comm::{CommError, Mesh, ProcessGroup, call_site, on_behalf_of};
use drumline_parallel::{Clip, EngineOptions, ShardOptions};
use drumline_plan::Stage;
use drumline_torch::{Optimizer, ScalePolicy};
use serde_json::Value;
use tch::Device;
use tch::nn::VarStore;

use crate::checkpoint::{Checkpoints, Loaded};
use crate::comm::shared_failure::{panic_message, with_causes};
use crate::data::loader::Dataset;
use crate::data::sampler::Sampler;
use crate::launch::stop_request::StopRequest;
use crate::schedule::Schedule;
use data::AnyDataset;
use hooks::Hooks;
use metric::Scores;
use settings::Settings;
use tracer::Tracer;

pub use crate::comm::shared_failure::UserError;
pub use batch::{Batch, Supervised};
pub use callback::{Callback, CallbackResult, MasterCallback};
pub use callbacks::{
    Checkpoint, CsvFiles, EarlyStop, EvaluateEvery, EventFile, MovingAverage, Plots, RankFiles, TensorBoard,
    TimeLimit,
};
pub use drumline_observe::slow_ranks::SlowRank;
pub use end::End;
pub use error::TrainerError;
pub use loss::{CrossEntropy, Loss};
pub use metric::{BatchMetric, MetricKey};
pub use model::{Mode, Model, Staged, StagedModel};
pub use run::TrainOutcome;
pub use save::was_evaluated;
pub use settings::{Every, LoadBestModel, Precision};
pub use state::{Best, Evaluation, Times, TrainState};

/// Trains a model with all ranks of a group. Every rank creates the same trainer and calls [`train`](Self::train).
///
/// The names and defaults are those of fastNLP's `DistTrainer`. `train` checks all settings, and returns an error with
/// the same text on all ranks if they are invalid.
///
/// ```no_run
/// use drumline::tch::nn::VarStore;
/// use drumline::trainer::{CrossEntropy, DistTrainer, LoadBestModel};
/// use drumline::{ProcessGroup, local_device};
/// use drumline::metrics::TopK;
/// use drumline::schedule::Warmup;
/// # use drumline::tch::{self, Tensor, nn};
/// # use drumline::data::{Cause, MapDataset, Sample};
/// # fn data() -> impl drumline::data::Dataset<Batch = (Tensor, Tensor)> + 'static {
/// #     MapDataset::new(1, |_: Sample| Ok(()), |_| Ok::<_, Cause>((Tensor::new(), Tensor::new())))
/// # }
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let group = ProcessGroup::from_env()?;
/// let store = VarStore::new(local_device(&group));
/// let model = nn::linear(store.root(), 20, 2, Default::default());
/// let trainer = DistTrainer::new(&group, &model, &store, data())
///     .dev_data(data())
///     .loss(CrossEntropy::default())
///     .metric("acc", TopK::new(1))
///     .metric_key("acc")
///     .schedule(Warmup::steps(100).then_linear())
///     .clip_norm(1.0)
///     .batch_size_per_gpu(32)
///     .update_every(2)
///     .n_epochs(10)
///     .save_path("save");
/// let outcome = trainer.train(LoadBestModel::Yes)?;
/// println!("best {:?} after step {:?}, {:.1} s", outcome.best_metric, outcome.best_step, outcome.seconds);
/// # Ok(())
/// # }
/// ```
pub struct DistTrainer<'a, M: Model<B> + ?Sized, B: Batch> {
    group: ProcessGroup,
    model: &'a M,
    store: &'a VarStore,
    train_data: AnyDataset<B>,
    dev_data: Option<AnyDataset<B>>,
    sampler: Option<Box<dyn Sampler>>,
    has_sampler: bool,
    dev_sampler: Option<Box<dyn Sampler>>,
    loss: Option<Box<dyn Loss<B, M::Output> + 'a>>,
    scores: Scores<'a, B, M::Output>,
    train_scores: Scores<'a, B, M::Output>,
    optimizer: Option<Box<dyn Optimizer>>,
    device: Option<Device>,
    schedule: Option<Box<dyn Schedule + 'a>>,
    engine: Box<dyn EngineOptions>,
    mesh: Option<Mesh>,
    stop: Option<StopRequest>,
    checkpoints: Option<Checkpoints>,
    loaded: Option<Loaded>,
    tracer: Tracer,
    hooks: Hooks<'a>,
    settings: Settings,
}

impl<'a, M: Model<B> + ?Sized, B: Batch> DistTrainer<'a, M, B> {
    /// A trainer of `model`, whose variables are in `store`, on `train_data`, of which every rank takes its share.
    pub fn new(
        group: &ProcessGroup,
        model: &'a M,
        store: &'a VarStore,
        train_data: impl Dataset<Batch = B> + 'static,
    ) -> Self {
        Self {
            group: group.clone(),
            model,
            store,
            train_data: AnyDataset(Arc::new(train_data)),
            dev_data: None,
            sampler: None,
            has_sampler: false,
            dev_sampler: None,
            loss: None,
            scores: Scores(Vec::new()),
            train_scores: Scores(Vec::new()),
            optimizer: None,
            device: None,
            schedule: None,
            engine: Default::default(),
            mesh: None,
            stop: None,
            checkpoints: None,
            loaded: None,
            tracer: Tracer::default(),
            hooks: Hooks::default(),
            settings: Settings::default(),
        }
    }

    /// Sets the data for evaluations. All ranks take part, and each sample is evaluated once.
    #[must_use]
    pub fn dev_data(self, data: impl Dataset<Batch = B> + 'static) -> Self {
        Self { dev_data: Some(AnyDataset(Arc::new(data))), ..self }
    }

    /// Sets the loss: [`CrossEntropy`], a function of output and batch that returns the mean, or a [`Loss`] of yours.
    #[must_use]
    pub fn loss(self, loss: impl Loss<B, M::Output> + 'a) -> Self {
        Self { loss: Some(Box::new(loss)), ..self }
    }

    /// Adds a metric of evaluations. The mean loss is always included, as `loss`.
    #[must_use]
    pub fn metric(mut self, name: impl Into<String>, metric: impl BatchMetric<B, M::Output> + 'a) -> Self {
        self.scores.0.push((name.into(), Box::new(metric)));
        self
    }

    /// Adds a metric of each step, over the batches of all ranks: [`TrainState::train_metrics`]. It needs no collective
    /// of its own.
    #[must_use]
    pub fn train_metric(
        mut self,
        name: impl Into<String>,
        metric: impl BatchMetric<B, M::Output> + 'a,
    ) -> Self {
        self.train_scores.0.push((name.into(), Box::new(metric)));
        self
    }

    /// Sets the metric that decides which model is best: `acc`, or `-loss` where smaller is better. By default the
    /// first metric, or `-loss` if there is none.
    #[must_use]
    pub fn metric_key(mut self, key: impl Into<String>) -> Self {
        self.settings.metric_key = Some(key.into());
        self
    }

    /// Sets the optimizer of the store's parameters; by default [`Adam`](crate::optim::Adam) with a learning rate of
    /// 4e-3.
    #[must_use]
    pub fn optimizer(self, optimizer: impl Optimizer + 'static) -> Self {
        Self { optimizer: Some(Box::new(optimizer)), ..self }
    }

    /// Sets the learning rate schedule: one of the library, or a function of [`At`](crate::schedule::At). By default
    /// the learning rate is constant.
    #[must_use]
    pub fn schedule(self, schedule: impl Schedule + 'a) -> Self {
        Self { schedule: Some(Box::new(schedule)), ..self }
    }

    /// Clips gradients before each step to this total norm, which is the same on all ranks. The norm before clipping is
    /// a metric of the step, `grad_norm`. A norm that is NaN or infinite ends the training before weights are changed.
    #[must_use]
    pub fn clip_norm(mut self, max_norm: f64) -> Self {
        self.settings.clips.push(Clip::Norm(max_norm));
        self
    }

    /// Clips each element of the gradients before each step, to at most this far from zero.
    #[must_use]
    pub fn clip_value(mut self, max_value: f64) -> Self {
        self.settings.clips.push(Clip::Value(max_value));
        self
    }

    /// Adds a callback that runs on all ranks and may change the state of the training.
    ///
    /// A callback that writes belongs to [`master_callback`](Self::master_callback); here it does not compile:
    ///
    /// ```compile_fail,E0277
    /// use drumline::trainer::{Batch, DistTrainer, MasterCallback, Model};
    /// struct Log;
    /// impl MasterCallback for Log {}
    /// fn with_log<M: Model<B>, B: Batch>(trainer: DistTrainer<'_, M, B>) {
    ///     let _ = trainer.callback(Log);
    /// }
    /// ```
    ///
    /// ```
    /// use drumline::trainer::{Batch, DistTrainer, MasterCallback, Model};
    /// struct Log;
    /// impl MasterCallback for Log {}
    /// fn with_log<M: Model<B>, B: Batch>(trainer: DistTrainer<'_, M, B>) {
    ///     let _ = trainer.master_callback(Log);
    /// }
    /// ```
    #[must_use]
    pub fn callback(mut self, callback: impl Callback + 'a) -> Self {
        self.hooks.all.push(Box::new(callback));
        self
    }

    /// Adds a callback that runs on rank 0 and only reads the state. Every rank may call it.
    ///
    /// ```compile_fail,E0277
    /// use drumline::trainer::{Batch, DistTrainer, MovingAverage, Model};
    /// fn with_average<M: Model<B>, B: Batch>(trainer: DistTrainer<'_, M, B>) {
    ///     let _ = trainer.master_callback(MovingAverage::sma()); // would give rank 0 another model
    /// }
    /// ```
    ///
    /// ```
    /// use drumline::trainer::{Batch, DistTrainer, MovingAverage, Model};
    /// fn with_average<M: Model<B>, B: Batch>(trainer: DistTrainer<'_, M, B>) {
    ///     let _ = trainer.callback(MovingAverage::sma());
    /// }
    /// ```
    #[must_use]
    pub fn master_callback(mut self, callback: impl MasterCallback + 'a) -> Self {
        if self.group.rank() == 0 {
            self.hooks.master.push(Box::new(callback));
        }
        self
    }

    /// Samples in a batch of each rank; default 8.
    #[must_use]
    pub fn batch_size_per_gpu(mut self, samples: usize) -> Self {
        self.settings.batch_size_per_gpu = samples;
        self
    }

    /// Samples in a batch of an evaluation; by default as many as in training.
    #[must_use]
    pub fn dev_batch_size(mut self, samples: usize) -> Self {
        self.settings.dev_batch_size = Some(samples);
        self
    }

    /// Batches in a step of each rank; default 1. Their gradients are accumulated, reduced once, and divided by the
    /// number of samples or tokens of all batches on all ranks: the step equals that of one big batch.
    #[must_use]
    pub fn update_every(mut self, batches: usize) -> Self {
        self.settings.update_every = batches;
        self
    }

    /// The number of epochs; default 1.
    #[must_use]
    pub fn n_epochs(mut self, epochs: u64) -> Self {
        self.settings.n_epochs = epochs;
        self
    }

    /// Ends after this many steps of the whole training, with an evaluation, if that is before the end of the last
    /// epoch.
    #[must_use]
    pub fn max_steps(mut self, steps: u64) -> Self {
        self.settings.max_steps = Some(steps);
        self
    }

    /// Threads that make batches; default 1. With 0, batches are made when they are needed, and are not copied to the
    /// GPU during the step before.
    #[must_use]
    pub fn num_workers(mut self, threads: usize) -> Self {
        self.settings.num_workers = threads;
        self
    }

    /// Whether batches for a GPU are made in pinned memory; default true.
    #[must_use]
    pub fn pin_memory(mut self, pin: bool) -> Self {
        self.settings.pin_memory = pin;
        self
    }

    /// Whether to leave out samples that do not fill a batch on all ranks; default false.
    #[must_use]
    pub fn drop_last(mut self, drop: bool) -> Self {
        self.settings.drop_last = drop;
        self
    }

    /// Whether samples come in a new order in each epoch; default true.
    #[must_use]
    pub fn shuffle(mut self, shuffle: bool) -> Self {
        self.settings.shuffle = shuffle;
        self
    }

    /// The seed of the order of samples; default 0. It must be the same on all ranks.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.settings.seed = seed;
        self
    }

    /// Sets the samples of this rank, instead of an equal share of a shuffled order. Ranks may take different numbers.
    /// A sampler of whole batches, [`PlannedBatches`](crate::data::PlannedBatches), also decides on their sizes.
    #[must_use]
    pub fn sampler(self, sampler: impl Sampler + 'static) -> Self {
        Self { sampler: Some(Box::new(sampler)), ..self }
    }

    /// Sets the samples of `dev_data` that this rank evaluates: those of the sampler's first epoch. Each sample must
    /// come once over all ranks. Use it if planned batches are better than batches of `dev_batch_size`.
    #[must_use]
    pub fn dev_sampler(self, sampler: impl Sampler + 'static) -> Self {
        Self { dev_sampler: Some(Box::new(sampler)), ..self }
    }

    /// Steps between two log lines about the training; default 10. 0 for none.
    #[must_use]
    pub fn print_every(mut self, steps: u64) -> Self {
        self.settings.print_every = steps;
        self
    }

    /// How often to evaluate; by default after each epoch.
    #[must_use]
    pub fn validate_every(mut self, every: Every) -> Self {
        self.settings.validate_every = every;
        self
    }

    /// The folder of checkpoints: the best model, and the last state, from which [`resume_from`](Self::resume_from)
    /// resumes. A program that has loaded from the folder itself passes its [`Checkpoints`], so that one object owns
    /// them.
    #[must_use]
    pub fn save_path(mut self, folder: impl Into<Checkpoints>) -> Self {
        let checkpoints = folder.into();
        self.settings.save_path = Some(checkpoints.dir().to_owned());
        Self { checkpoints: Some(checkpoints), ..self }
    }

    /// Also appends the log lines about the training to `log.txt` in this folder; `drumline watch` shows its end.
    #[must_use]
    pub fn log_path(mut self, folder: impl Into<PathBuf>) -> Self {
        self.settings.log_path = Some(folder.into());
        self
    }

    /// Resumes from the latest checkpoint in this folder, if there is one, on any number of ranks. A folder other than
    /// `save_path` is only read.
    #[must_use]
    pub fn resume_from(mut self, folder: impl Into<PathBuf>) -> Self {
        self.settings.resume_from = Some(folder.into());
        self
    }

    /// Resumes from a checkpoint that all ranks have loaded.
    #[must_use]
    pub fn resume_with(self, loaded: Loaded) -> Self {
        Self { loaded: Some(loaded), ..self }
    }

    /// The device of the training; by default that of the `VarStore`. If they differ, the model is moved: with ZeRO-3, each
    /// rank moves its own rows, so that a model may be larger than a GPU.
    #[must_use]
    pub fn device(self, device: Device) -> Self {
        Self { device: Some(device), ..self }
    }

    /// The precision of forward; default f32.
    #[must_use]
    pub fn precision(mut self, precision: Precision) -> Self {
        self.settings.precision = precision;
        self
    }

    /// How the loss of [`Precision::Fp16`] is scaled; by default as PyTorch's `GradScaler` does. A step whose gradients
    /// overflow is skipped and counted: see [`TrainState::skipped_steps`].
    #[must_use]
    pub fn loss_scale(mut self, policy: ScalePolicy) -> Self {
        self.settings.loss_scale = policy;
        self
    }

    /// Whether a loss that is NaN or infinite ends the training with an error, before the weights are changed; default
    /// true. Otherwise the training continues; the last checkpoint with finite loss and weights is kept in any case.
    #[must_use]
    pub fn stop_on_nan(mut self, stop: bool) -> Self {
        self.settings.stop_on_nan = stop;
        self
    }

    /// Whether to resume from a checkpoint that was saved on a data set of another length or
    /// [`fingerprint`](Dataset::fingerprint). By default that is an error. If it is accepted, the epoch continues at
    /// the same position in the order of the new data.
    #[must_use]
    pub fn accept_new_data(mut self, accept: bool) -> Self {
        self.settings.accept_new_data = accept;
        self
    }

    /// Whether steps on a GPU are recorded as CUDA graphs where that is possible; default true. The losses are the same
    /// either way, unless the model or the loss makes decisions in each step without a tensor, such as by a counter or
    /// Rust's random numbers: a recorded step repeats the decisions of the recording.
    #[must_use]
    pub fn cuda_graphs(mut self, wanted: bool) -> Self {
        self.settings.cuda_graphs = wanted;
        self
    }

    /// Whether to show a progress bar on a terminal; default true.
    #[must_use]
    pub fn use_tqdm(mut self, wanted: bool) -> Self {
        self.settings.use_tqdm = wanted;
        self
    }

    /// Adds entries to the settings in logs, TensorBoard and checkpoints. They must be the same on all ranks.
    #[must_use]
    pub fn config(mut self, entries: impl IntoIterator<Item = (String, Value)>) -> Self {
        self.settings.config.extend(entries);
        self
    }

    /// Writes a trace of these steps, counted from 0, for Perfetto: `trace/rank-00000.json` in a folder, one for each
    /// rank. It shows which reductions were hidden behind backward.
    #[must_use]
    pub fn trace_steps(mut self, steps: Range<u64>, folder: impl Into<PathBuf>) -> Self {
        self.tracer = Tracer::new(steps, folder.into(), self.group.rank());
        self
    }

    /// Sets how ranks train the model together; by default each rank has a replica.
    #[must_use]
    pub fn engine(self, options: impl Into<Box<dyn EngineOptions>>) -> Self {
        Self { engine: options.into(), ..self }
    }

    /// The mesh whose groups the model's layers use, for an engine of a model that is cut
    /// ([`ModelParallel`](crate::engine::ModelParallel)). Without it, a failure of a rank would not reach ranks that wait
    /// in these groups.
    #[must_use]
    pub fn on_mesh(self, mesh: &Mesh) -> Self {
        Self { mesh: Some(mesh.clone()), ..self }
    }

    /// Divides the training's state among all ranks, as ZeRO of this stage: the optimizer's state, then the gradients,
    /// then the parameters. Results are those of replicas. Other settings are
    /// [`ShardOptions`], for [`engine`](Self::engine).
    #[must_use]
    pub fn shard(self, stage: Stage) -> Self {
        self.engine(ShardOptions::new(stage))
    }

    /// Sets what requests an early end; by default SIGTERM, SIGUSR1 and Ctrl-C.
    #[must_use]
    pub fn stop_request(self, stop: StopRequest) -> Self {
        Self { stop: Some(stop), ..self }
    }

    /// Whether this is rank 0, which writes.
    pub fn is_master(&self) -> bool {
        self.group.rank() == 0
    }

    /// This rank among those of its machine.
    pub fn local_rank(&self) -> usize {
        self.group.local_rank()
    }

    /// Waits for all ranks.
    #[track_caller]
    pub fn barrier(&self) -> Result<(), CommError> {
        self.group.barrier()
    }

    /// Trains the model. All ranks call it, and get the same outcome: if a rank fails or panics, the training ends on
    /// all of them.
    #[track_caller]
    pub fn train(self, load_best_model: LoadBestModel) -> Result<TrainOutcome, TrainerError> {
        let group = self.group.clone();
        let site = call_site();
        aborting(&group, || on_behalf_of(site, || self.prepare(load_best_model))?.train())
    }
}

/// Runs work of all ranks. If it fails or panics on this rank alone, the other ranks get the reason.
fn aborting<T>(
    group: &ProcessGroup,
    work: impl FnOnce() -> Result<T, TrainerError>,
) -> Result<T, TrainerError> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Err(error)) if !error.is_agreed() => {
            group.abort(&with_causes(&error));
            Err(error)
        }
        Ok(outcome) => outcome,
        Err(panic) => {
            group.abort(&panic_message(&*panic));
            resume_unwind(panic)
        }
    }
}

impl<M: Model<B> + ?Sized, B: Batch> std::fmt::Debug for DistTrainer<'_, M, B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DistTrainer").field("settings", &self.settings).finish_non_exhaustive()
    }
}
