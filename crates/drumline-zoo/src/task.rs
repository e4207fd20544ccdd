//! The `Task` trait: everything in which one kind of training differs from another.
//!
//! ```text
//!   --cfg FILE ─▶ Kind ─▶ a Task: new ─▶ open ─▶ meet ─▶ model, data, loss, metrics, schedule, optimizer
//!                            driver: train, test, resume, parity ─▶ drumline's DistTrainer
//! ```
//! A task defines its configuration keys, data, network, loss and report format. The driver does what all tasks share:
//! it joins the process group, checks that all ranks agree, resumes, trains, evaluates and reports. To add a kind of
//! training, write one folder with one implementation of [`Task`] and add a line to `program/kind.rs`.

use std::path::{Path, PathBuf};
use std::rc::Rc;

use drumline::ProcessGroup;
use drumline::checkpoint::Loaded;
use drumline::comm::{Axis, Mesh, MeshShape};
use drumline::data::{Cause, Dataset, Prediction, Sampler};
use drumline::engine::SyncGroup;
use drumline::engine::pipeline::{LayerList, PipelineOptions, Stages};
use drumline::trainer::{Batch, DistTrainer, Model, TrainState};
use serde_json::Value as Json;
use tch::Device;
use tch::nn::VarStore;

use crate::config::{SharedKeys, TaskConfig, table};
use crate::driver::Job;
use crate::error::ZooError;
use crate::models::ModelRanks;
use crate::optimizer::OptimizerOptions;

pub(crate) type Trainer<'a, T> = DistTrainer<'a, <T as Task>::Model, <T as Task>::Batch>;

/// The output of a task's network for a batch.
pub(crate) type Output<T> = <<T as Task>::Model as Model<<T as Task>::Batch>>::Output;

/// Whether a task is created to train or to test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    Train,
    Test,
}

/// How a run begins.
#[derive(Clone, Copy)]
pub(crate) enum Start<'a> {
    New,
    Resumed(&'a Loaded),
    /// A test of a model that this run's folder holds.
    TestOfRun,
    /// A test of weights that the command line names.
    TestOfFile,
}

/// Who builds a model, and for where.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ModelPlace<'a> {
    /// All ranks.
    pub(crate) group: &'a ProcessGroup,
    /// Where the model trains. Its variables may be created elsewhere.
    pub(crate) device: Device,
    /// The ranks among which it is cut.
    pub(crate) ranks: &'a ModelRanks,
    /// How it is cut into stages, if it is.
    pub(crate) pipeline: Option<&'a PipelineCut>,
}

/// How a model is cut into stages.
#[derive(Debug)]
pub(crate) struct PipelineCut {
    /// All ranks.
    pub(crate) mesh: Mesh,
    /// The schedule, and the seed of first weights.
    pub(crate) options: PipelineOptions,
}

impl ModelPlace<'_> {
    /// Builds this rank's stages of a model in `store`, if it is cut into stages. All ranks call it.
    pub(crate) fn stages(
        &self,
        store: &VarStore,
        layers: impl FnOnce() -> Result<LayerList, ZooError>,
    ) -> anyhow::Result<Option<Rc<Stages>>> {
        let Some(PipelineCut { mesh, options }) = self.pipeline else { return Ok(None) };
        Ok(Some(Rc::new(Stages::build(&layers()?, store, mesh, options)?)))
    }
}

/// A rank's place among the ranks that split the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) rank: usize,
    pub(crate) num_replicas: usize,
}

impl Place {
    /// The place of a rank of the mesh.
    pub(crate) fn on(shape: &MeshShape, rank: usize) -> Self {
        Self { rank: shape.index(rank, Axis::SAMPLES), num_replicas: shape.size_of(Axis::SAMPLES) }
    }
}

/// The folders that a run reads and writes.
pub(crate) struct Folders {
    /// The run's own folder. Only one run may write to it at a time.
    pub(crate) own: PathBuf,
    /// The configuration key of that folder.
    pub(crate) key: &'static str,
    pub(crate) checkpoints: PathBuf,
    /// The folder of metrics, rank status, `log.txt`, TensorBoard files and traces.
    pub(crate) log: PathBuf,
    /// Further folders that must be writable, with their configuration keys.
    pub(crate) others: Vec<(&'static str, PathBuf)>,
}

impl Folders {
    /// Puts everything into `OUT_DIR`.
    pub(crate) fn in_out_dir(out_dir: &Path) -> Self {
        Self {
            own: out_dir.to_owned(),
            key: "OUT_DIR",
            checkpoints: out_dir.join("checkpoints"),
            log: out_dir.to_owned(),
            others: Vec::new(),
        }
    }
}

/// Whether a run resumes from a checkpoint in its folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ResumeMode {
    /// Resumes if there is a checkpoint.
    Auto,
    /// Starts a new run, whatever the folder contains.
    Never,
    /// Resumes only if the launcher has restarted the job. Otherwise, a folder that already has checkpoints is an
    /// error.
    AfterRestart,
}

/// The training and evaluation datasets.
pub(crate) struct DataSets<D> {
    pub(crate) train: D,
    /// The evaluation dataset, if there is one.
    pub(crate) dev: Option<D>,
    /// Lines to print for the user.
    pub(crate) notes: Vec<String>,
}

/// The dataset of a test.
pub(crate) struct TestData<D> {
    pub(crate) data: D,
    /// Lines to print for the user.
    pub(crate) notes: Vec<String>,
}

/// A network, and what its engine must know of it.
pub(crate) struct Built<M: ?Sized> {
    pub(crate) model: Box<M>,
    /// The group of its synchronised norms, if it has any.
    pub(crate) sync_group: Option<SyncGroup>,
}

impl<M: ?Sized> Built<M> {
    pub(crate) fn new(model: Box<M>) -> Self {
        Self { model, sync_group: None }
    }
}

/// How reports of a task are worded and formatted.
#[derive(Clone, Copy)]
pub(crate) struct ReportStyle {
    /// The plural noun for samples, such as `images`.
    pub(crate) samples: &'static str,
    /// The unit of the throughput, such as `img/s`.
    pub(crate) rate: &'static str,
    /// Counts the units of one step for the throughput.
    pub(crate) counted: fn(&TrainState) -> u64,
    /// Whether the first metric of a step is an accuracy in percent.
    pub(crate) has_accuracy: bool,
    /// Digits after the decimal point of the learning rate.
    pub(crate) lr_digits: usize,
    /// The label of an evaluation metric in reports; `None` leaves the metric out.
    pub(crate) metric: fn(&str) -> Option<String>,
    /// Keys to try when the loss is NaN or infinite.
    pub(crate) nan_advice: &'static str,
    /// Keys to try when a run has already finished.
    pub(crate) finished_advice: &'static str,
}

/// A kind of training. The driver calls the methods in the order in which they are declared.
pub(crate) trait Task: Sized {
    type Config: TaskConfig;
    type Batch: Batch;
    type Data: Dataset<Batch = Self::Batch> + 'static;
    type Model: Model<Self::Batch> + ?Sized;

    const REPORT_STYLE: ReportStyle;
    /// Keys that decide which samples form a batch. They cannot change when a run resumes in the middle of an epoch.
    const BATCH_KEYS: &'static [&'static str];
    /// Keys (or sections, such as `TEXT.`) that may differ between hosts, such as paths.
    const HOST_KEYS: &'static [&'static str];
    /// Keys (or sections) that define the model. A resumed run prints a note if one of them has changed.
    const MODEL_KEYS: &'static [&'static str];
    /// The key of the file with initial weights.
    const WEIGHTS_KEY: &'static str;
    /// Whether samples that do not fill a batch on all ranks are dropped.
    const DROP_LAST: bool = false;
    /// The columns of the predictions file, without the index.
    const COLUMNS: &'static [&'static str] = &[];

    /// Checks the configuration and its files, without reading large files completely. It does not communicate.
    fn new(config: Self::Config, purpose: Purpose) -> anyhow::Result<Self>;

    fn config(&self) -> &Self::Config;

    /// The model's name, if it has one.
    fn name(&self) -> Option<&str> {
        None
    }

    /// Further checks for `--check`, which runs as one process before the ranks start.
    fn check(&self) -> anyhow::Result<()> {
        Ok(())
    }

    /// Reads the files that every rank reads by itself, before any communication.
    fn open(&mut self) -> anyhow::Result<()> {
        Ok(())
    }

    fn folders(&self) -> Folders {
        Folders::in_out_dir(&self.config().shared().run.out_dir)
    }

    fn resume_mode(&self) -> ResumeMode {
        if self.config().shared().train.auto_resume { ResumeMode::Auto } else { ResumeMode::Never }
    }

    /// Names and checksums of files that must be the same on all ranks.
    fn fingerprints(&self) -> anyhow::Result<Vec<(String, String)>> {
        Ok(Vec::new())
    }

    /// The configuration entries that a checkpoint stores.
    fn entries(&self) -> anyhow::Result<Vec<(String, Json)>> {
        Ok(table::to_json(self.config()).collect())
    }

    /// Sets up what needs communication between ranks, once it is known how the run starts.
    fn meet(&mut self, job: &Job, start: Start<'_>) -> anyhow::Result<()> {
        let _ = (job, start);
        Ok(())
    }

    /// Whether training runs evaluations.
    fn evaluates(&self) -> bool;

    /// The name of the metric that selects the best model, for reports.
    fn best_by(&self) -> String;

    /// Turns dropout off and returns whether it was on. Where padding is removed, its masks depend on which rank has a
    /// sample, which a parity check must exclude.
    fn disable_dropout(&mut self) -> bool {
        false
    }

    /// The setting, such as `MODEL.SYNCBN True`, that would make batch norms synchronise over all ranks. `None` if they
    /// already do, or if the network has none.
    fn unsynced_norms(&self) -> Option<&'static str> {
        None
    }

    /// Builds the network in `store` and loads or draws its initial weights. All ranks call it.
    fn model(&self, store: &VarStore, place: ModelPlace<'_>) -> anyhow::Result<Built<Self::Model>>;

    /// The datasets for training and evaluation.
    fn train_data(&self, device: Device) -> anyhow::Result<DataSets<Self::Data>>;

    /// The dataset of a test.
    fn test_data(&self, device: Device) -> anyhow::Result<TestData<Self::Data>>;

    /// The sampler of one rank's training samples.
    fn sampler(&self, data: &Self::Data, place: Place, seed: u64) -> anyhow::Result<Box<dyn Sampler>>;

    /// The sampler of one rank's evaluation samples. By default, each rank gets an equal share in batches of
    /// `TEST.BATCH_SIZE`.
    fn dev_sampler(&self, data: &Self::Data, place: Place) -> anyhow::Result<Option<Box<dyn Sampler>>> {
        let _ = (data, place);
        Ok(None)
    }

    /// Adds the loss and the per-step metrics of a model to the trainer.
    fn with_loss<'a>(&self, trainer: Trainer<'a, Self>, model: &Self::Model) -> Trainer<'a, Self>;

    /// Adds the evaluation metrics to the trainer. The first metric selects the best model, unless `metric_key` names
    /// another.
    fn with_metrics<'a>(
        &self,
        trainer: Trainer<'a, Self>,
        evaluated: Evaluated<'a, Self>,
    ) -> anyhow::Result<Trainer<'a, Self>>;

    /// The options of the optimizer, which trains all parameters.
    fn optimizer(&self) -> OptimizerOptions;

    /// Adds the learning rate schedule to the trainer.
    fn with_schedule<'a>(&self, trainer: Trainer<'a, Self>) -> anyhow::Result<Trainer<'a, Self>>;

    /// Adjusts a loaded checkpoint to the configuration before the run resumes from it.
    fn resumed(&self, found: Loaded, store: &VarStore) -> anyhow::Result<Loaded> {
        let _ = store;
        Ok(found)
    }

    /// Writes the files that a model needs besides its checkpoints, such as its vocabulary. Rank 0 calls it when
    /// training begins, after all checks have passed.
    fn save_beside(&self, is_new: bool) -> Result<(), Cause>;

    /// How many of the last and of the best checkpoints are kept; `None` for the trainer's defaults.
    fn checkpoints_kept(&self) -> Option<Keep> {
        None
    }

    /// The file that [`model`](Self::model) loads initial weights from, if one is given.
    fn first_weights(&self) -> Option<&Path>;

    /// Returns an error if the initial weights alone are not a trained model that can be tested.
    fn check_first_weights(&self) -> anyhow::Result<()> {
        Ok(())
    }

    /// The file that a test writes predictions to, if one is given.
    fn predictions(&self) -> Option<&Path> {
        None
    }

    /// The prediction rows of a batch.
    fn rows(&self, batch: &Self::Batch, output: &Output<Self>) -> Result<Vec<Prediction>, Cause> {
        let _ = (batch, output);
        Ok(Vec::new())
    }
}

/// What an evaluation needs to know to create its metrics.
pub(crate) struct Evaluated<'a, T: Task> {
    pub(crate) purpose: Purpose,
    pub(crate) model: &'a T::Model,
    pub(crate) place: Place,
}

/// How many checkpoints are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Keep {
    pub(crate) last: usize,
    pub(crate) best: usize,
}

/// Keys that may differ between hosts in every task.
const HOST_KEYS: [&str; 4] = ["OUT_DIR", "CFG_DEST", "RNG_SEED", "DEVICE"];

/// The keys, with their values, that must be the same on all ranks.
pub(crate) fn alike_keys<T: Task>(task: &T) -> Vec<(String, String)> {
    let own = || T::HOST_KEYS.iter().chain(&HOST_KEYS).chain([&T::WEIGHTS_KEY]);
    let is_own = |key: &str| own().any(|own| is_at(key, own));
    let entries = table::entries(task.config()).into_iter().filter(|entry| !is_own(&entry.key));
    entries.map(|entry| (entry.key, entry.value.to_string())).collect()
}

/// Whether `key` is `name`, or lies in the section `name` if that ends with a dot.
pub(crate) fn is_at(key: &str, name: &str) -> bool {
    key == name || name.ends_with('.') && key.starts_with(name)
}

/// The configuration sections that all tasks share.
pub(crate) fn shared<T: Task>(task: &T) -> SharedKeys {
    task.config().shared()
}
