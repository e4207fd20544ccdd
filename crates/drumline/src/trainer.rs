//! `DistTrainer`: a training loop for any number of ranks, as fastNLP's.
//!
//! ```text
//!   train_data ─▶ WholeShare, Loader ─▶ up to update_every batches ─▶ meet: counts, requests, trouble of all ranks
//!                                                                      │
//!      ┌─ evaluation, checkpoint, stop: what any rank asks for ◀───────┤
//!      │                                                               ▼
//!      └─▶ callbacks ◀─ optimizer ◀─ one reduction ◀─ sums of losses ÷ count of the whole step over all ranks
//! ```
//! Read in this order: `settings`, `callback`, `state`, `meeting`, `run`, `supply`, `step`, `evaluate`, `weights`, `save`, `tracer`.
//!
//! - `batch`, `model`, `loss`, `metric`: what can be trained, on what, towards what
//! - `callbacks`: those that are supplied
//! - `way`, `graphs`, `upload`: steps on a GPU

mod batch;
mod callback;
mod callbacks;
mod data;
mod error;
mod evaluate;
mod graphs;
mod hooks;
mod loss;
mod meeting;
mod metric;
mod model;
mod norms;
mod prepare;
mod run;
mod save;
mod settings;
mod share;
mod state;
mod step;
mod supply;
mod tracer;
mod upload;
mod waits;
mod way;
mod weights;

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::PathBuf;
use std::sync::Arc;

use drumline_comm::{CommError, ProcessGroup, call_site, on_behalf_of};
use drumline_parallel::DdpOptions;
use drumline_torch::{Optimizer, ScalePolicy};
use serde_json::Value;
use tch::Device;
use tch::nn::VarStore;

use crate::checkpoint::{Checkpoints, Loaded};
use crate::loader::Dataset;
use crate::sampler::Sampler;
use crate::shared_failure::{in_words, panic_words};
use crate::stop_request::StopRequest;
use data::AnyDataset;
use hooks::Hooks;
use metric::Scores;
use run::Run;
use settings::Settings;
use tracer::Tracer;

pub use crate::shared_failure::PlainWords;
pub use batch::{Batch, Supervised};
pub use callback::{Callback, CallbackResult, MasterCallback};
pub use callbacks::{
    Checkpoint, EarlyStop, EvaluateEvery, EventFile, GradientClip, LearningRate, MovingAverage, Plots,
    RankFiles, ReduceOnPlateau, TensorBoard, TimeLimit, Warmup,
};
pub use drumline_observe::slow_ranks::SlowRank;
pub use error::TrainerError;
pub use loss::{CrossEntropy, Loss};
pub use metric::{BatchMetric, MetricKey};
pub use model::{Mode, Model};
pub use run::{End, TrainOutcome};
pub use save::was_evaluated;
pub use settings::{Every, LoadBestModel, Precision};
pub use state::{Best, Evaluation, Times, TrainState};

/// Trains a model with all ranks of a group. Every rank makes the same one and calls [`train`](Self::train).
///
/// The names and defaults are those of fastNLP's `DistTrainer`. What makes no sense is told by `train`, on all ranks, with one text.
///
/// ```no_run
/// use drumline::tch::nn::VarStore;
/// use drumline::trainer::{CrossEntropy, DistTrainer, LoadBestModel, Warmup};
/// use drumline::{ProcessGroup, TopK, local_device};
/// # use drumline::{Cause, MapDataset, Sample, tch::{self, Tensor, nn}};
/// # fn data() -> impl drumline::Dataset<Batch = (Tensor, Tensor)> + 'static {
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
///     .callback(Warmup::steps(100))
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
    ddp_options: DdpOptions,
    stop: Option<StopRequest>,
    checkpoints: Option<Checkpoints>,
    loaded: Option<Loaded>,
    tracer: Tracer,
    hooks: Hooks<'a>,
    settings: Settings,
}

impl<'a, M: Model<B> + ?Sized, B: Batch> DistTrainer<'a, M, B> {
    /// Trains `model`, whose variables are in `store`, on `train_data`, of which every rank takes its share.
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
            ddp_options: DdpOptions::default(),
            stop: None,
            checkpoints: None,
            loaded: None,
            tracer: Tracer::default(),
            hooks: Hooks::default(),
            settings: Settings::default(),
        }
    }

    /// Evaluates on these, on all ranks: each sample once.
    #[must_use]
    pub fn dev_data(self, data: impl Dataset<Batch = B> + 'static) -> Self {
        Self { dev_data: Some(AnyDataset(Arc::new(data))), ..self }
    }

    /// What is minimised: [`CrossEntropy`], a function of output and batch that gives the mean, or a [`Loss`] of yours.
    #[must_use]
    pub fn loss(self, loss: impl Loss<B, M::Output> + 'a) -> Self {
        Self { loss: Some(Box::new(loss)), ..self }
    }

    /// One more metric of evaluations. The mean loss is always there, as `loss`.
    #[must_use]
    pub fn metric(mut self, name: impl Into<String>, metric: impl BatchMetric<B, M::Output> + 'a) -> Self {
        self.scores.0.push((name.into(), Box::new(metric)));
        self
    }

    /// One more figure of each step, over the batches of all ranks: [`TrainState::train_metrics`]. It costs no call of its own.
    #[must_use]
    pub fn train_metric(
        mut self,
        name: impl Into<String>,
        metric: impl BatchMetric<B, M::Output> + 'a,
    ) -> Self {
        self.train_scores.0.push((name.into(), Box::new(metric)));
        self
    }

    /// The metric that says which model is best: `acc`, or `-loss` where smaller is better. The first metric, if it is not said; without one `-loss`.
    #[must_use]
    pub fn metric_key(mut self, key: impl Into<String>) -> Self {
        self.settings.metric_key = Some(key.into());
        self
    }

    /// The optimizer of the store's parameters; [`Adam`](crate::Adam) with a learning rate of 4e-3, if it is not said.
    #[must_use]
    pub fn optimizer(self, optimizer: impl Optimizer + 'static) -> Self {
        Self { optimizer: Some(Box::new(optimizer)), ..self }
    }

    /// One more callback that runs on all ranks and may change the state of the training.
    ///
    /// One that writes belongs to [`master_callback`](Self::master_callback); here it does not compile:
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

    /// One more callback that runs on rank 0 and only looks. Every rank may add it.
    ///
    /// ```compile_fail,E0277
    /// use drumline::trainer::{Batch, DistTrainer, GradientClip, Model};
    /// fn with_clip<M: Model<B>, B: Batch>(trainer: DistTrainer<'_, M, B>) {
    ///     let _ = trainer.master_callback(GradientClip::norm(1.0)); // would make rank 0 another model
    /// }
    /// ```
    ///
    /// ```
    /// use drumline::trainer::{Batch, DistTrainer, GradientClip, Model};
    /// fn with_clip<M: Model<B>, B: Batch>(trainer: DistTrainer<'_, M, B>) {
    ///     let _ = trainer.callback(GradientClip::norm(1.0));
    /// }
    /// ```
    #[must_use]
    pub fn master_callback(mut self, callback: impl MasterCallback + 'a) -> Self {
        if self.group.rank() == 0 {
            self.hooks.master.push(Box::new(callback));
        }
        self
    }

    /// Samples in a batch of each rank; 8, if it is not said.
    #[must_use]
    pub fn batch_size_per_gpu(mut self, samples: usize) -> Self {
        self.settings.batch_size_per_gpu = samples;
        self
    }

    /// Samples in a batch of an evaluation; as many as in training, if it is not said.
    #[must_use]
    pub fn dev_batch_size(mut self, samples: usize) -> Self {
        self.settings.dev_batch_size = Some(samples);
        self
    }

    /// Batches of a step on each rank; 1, if it is not said. Their gradients are added up and reduced once, and divided by the number of samples, or
    /// tokens, of all of them on all ranks: the step is that of one big batch.
    #[must_use]
    pub fn update_every(mut self, batches: usize) -> Self {
        self.settings.update_every = batches;
        self
    }

    /// How often all samples are seen; once, if it is not said.
    #[must_use]
    pub fn n_epochs(mut self, epochs: u64) -> Self {
        self.settings.n_epochs = epochs;
        self
    }

    /// Ends after this many steps of the whole training, with an evaluation, if that is before the last epoch's end.
    #[must_use]
    pub fn max_steps(mut self, steps: u64) -> Self {
        self.settings.max_steps = Some(steps);
        self
    }

    /// Threads that make batches; 1, if it is not said. 0: batches are made when they are needed, and are not copied to a GPU beside the step before.
    #[must_use]
    pub fn num_workers(mut self, threads: usize) -> Self {
        self.settings.num_workers = threads;
        self
    }

    /// Whether batches for a GPU are made in page-locked memory; they are, if it is not said.
    #[must_use]
    pub fn pin_memory(mut self, pin: bool) -> Self {
        self.settings.pin_memory = pin;
        self
    }

    /// Whether samples that do not fill a batch on all ranks are left out of an epoch; they are not, if it is not said.
    #[must_use]
    pub fn drop_last(mut self, drop: bool) -> Self {
        self.settings.drop_last = drop;
        self
    }

    /// Whether samples come in another order each epoch; they do, if it is not said.
    #[must_use]
    pub fn shuffle(mut self, shuffle: bool) -> Self {
        self.settings.shuffle = shuffle;
        self
    }

    /// Seeds the order of samples; 0, if it is not said. The same on all ranks.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.settings.seed = seed;
        self
    }

    /// The samples that this rank takes, in place of an equal share of a shuffled order. Ranks may take different numbers. One of whole batches,
    /// [`PlannedBatches`](crate::PlannedBatches), decides on their sizes, too.
    #[must_use]
    pub fn sampler(self, sampler: impl Sampler + 'static) -> Self {
        Self { sampler: Some(Box::new(sampler)), ..self }
    }

    /// The samples of `dev_data` that this rank evaluates, in its first epoch: each must come once over all ranks. Worth it where a plan's batches fit together
    /// better than those of `dev_batch_size`.
    #[must_use]
    pub fn dev_sampler(self, sampler: impl Sampler + 'static) -> Self {
        Self { dev_sampler: Some(Box::new(sampler)), ..self }
    }

    /// Steps between two lines about the training; 10, if it is not said. 0: no lines.
    #[must_use]
    pub fn print_every(mut self, steps: u64) -> Self {
        self.settings.print_every = steps;
        self
    }

    /// How often to evaluate; after each epoch, if it is not said.
    #[must_use]
    pub fn validate_every(mut self, every: Every) -> Self {
        self.settings.validate_every = every;
        self
    }

    /// Folder of checkpoints: the best model, and the last state, from which [`resume_from`](Self::resume_from) resumes. A program that has
    /// loaded from the folder itself gives its [`Checkpoints`], so that one object owns them.
    #[must_use]
    pub fn save_path(mut self, folder: impl Into<Checkpoints>) -> Self {
        let checkpoints = folder.into();
        self.settings.save_path = Some(checkpoints.dir().to_owned());
        Self { checkpoints: Some(checkpoints), ..self }
    }

    /// Folder in which the lines about the training are added to `log.txt`, too; `drumline watch` shows its end.
    #[must_use]
    pub fn log_path(mut self, folder: impl Into<PathBuf>) -> Self {
        self.settings.log_path = Some(folder.into());
        self
    }

    /// Resumes from the latest checkpoint in this folder, if there is one. Any number of ranks may. Another folder than `save_path` is only read.
    #[must_use]
    pub fn resume_from(mut self, folder: impl Into<PathBuf>) -> Self {
        self.settings.resume_from = Some(folder.into());
        self
    }

    /// Goes on from a checkpoint that all ranks have loaded.
    #[must_use]
    pub fn resume_with(self, loaded: Loaded) -> Self {
        Self { loaded: Some(loaded), ..self }
    }

    /// Where the training is done. It must be where the model is, and is there, if it is not said.
    #[must_use]
    pub fn device(self, device: Device) -> Self {
        Self { device: Some(device), ..self }
    }

    /// In which numbers forward is computed; f32, if it is not said.
    #[must_use]
    pub fn precision(mut self, precision: Precision) -> Self {
        self.settings.precision = precision;
        self
    }

    /// How the loss of [`Precision::Fp16`] is scaled; as by PyTorch's `GradScaler`, if it is not said. A step whose gradients overflow is counted and left out: see
    /// [`TrainState::skipped_steps`].
    #[must_use]
    pub fn loss_scale(mut self, policy: ScalePolicy) -> Self {
        self.settings.loss_scale = policy;
        self
    }

    /// Whether a loss that is NaN or infinite ends the training with an error, before the weights are touched; by default it does. Without it the
    /// training continues; the last checkpoint with finite loss and weights is kept all the same.
    #[must_use]
    pub fn stop_on_nan(mut self, stop: bool) -> Self {
        self.settings.stop_on_nan = stop;
        self
    }

    /// Whether a checkpoint is resumed from that was saved on a data set of another length or [`fingerprint`](Dataset::fingerprint); by default
    /// that is an error. The epoch then continues at the same position in the order of the new data.
    #[must_use]
    pub fn accept_new_data(mut self, accept: bool) -> Self {
        self.settings.accept_new_data = accept;
        self
    }

    /// Whether steps on a GPU are recorded as CUDA graphs where that is possible; they are, if it is not said. The losses are the same either way, unless the
    /// model or the loss decides anew in each step without a tensor, by a counter or random numbers of Rust's: what it decides in the recording stays.
    #[must_use]
    pub fn cuda_graphs(mut self, wanted: bool) -> Self {
        self.settings.cuda_graphs = wanted;
        self
    }

    /// Whether a progress bar is wanted where there is a terminal; it is, if it is not said.
    #[must_use]
    pub fn use_tqdm(mut self, wanted: bool) -> Self {
        self.settings.use_tqdm = wanted;
        self
    }

    /// Adds what the program wants to be known of it to the settings: for logs, TensorBoard and checkpoints. The same on all ranks.
    #[must_use]
    pub fn config(mut self, entries: impl IntoIterator<Item = (String, Value)>) -> Self {
        self.settings.config.extend(entries);
        self
    }

    /// Writes a trace of these steps, counted from 0, for Perfetto: `trace/rank-00000.json` in a folder, one for each rank. It shows which reductions
    /// were hidden behind backward. An observer in [`ddp_options`](Self::ddp_options) hears nothing then.
    #[must_use]
    pub fn trace_steps(mut self, steps: Range<u64>, folder: impl Into<PathBuf>) -> Self {
        self.tracer = Tracer::new(steps, folder.into(), self.group.rank());
        self
    }

    /// How gradients are reduced.
    #[must_use]
    pub fn ddp_options(self, ddp_options: DdpOptions) -> Self {
        Self { ddp_options, ..self }
    }

    /// What asks for an early end; SIGTERM, SIGUSR1 and Ctrl-C, if it is not said.
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

    /// Trains. All ranks call it, and all get the same outcome: a rank that fails, or panics, ends the training of all of them.
    #[track_caller]
    pub fn train(self, load_best_model: LoadBestModel) -> Result<TrainOutcome, TrainerError> {
        let (group, site) = (self.group.clone(), call_site());
        let prepare = || on_behalf_of(site, || Run::prepare(self, load_best_model));
        match catch_unwind(AssertUnwindSafe(|| prepare()?.train())) {
            Ok(Err(error)) if !error.is_agreed() => {
                // Whoever waits for this rank learns why it does so in vain.
                group.abort(&in_words(&error));
                Err(error)
            }
            Ok(outcome) => outcome,
            Err(panic) => {
                group.abort(&panic_words(&*panic));
                resume_unwind(panic)
            }
        }
    }
}

impl<M: Model<B> + ?Sized, B: Batch> std::fmt::Debug for DistTrainer<'_, M, B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DistTrainer").field("settings", &self.settings).finish_non_exhaustive()
    }
}
