//! Training for every task: from a configuration to a trained model.

use std::ops::Range;

use drumline::ProcessGroup;
use drumline::comm::ensure_alike;
use drumline::data::Sampler;
use drumline::engine::pipeline::Stages;
use drumline::trainer::{
    Checkpoint, CsvFiles, DistTrainer, EarlyStop, End, EventFile, Every, LoadBestModel, Model, RankFiles,
    TensorBoard, TrainOutcome,
};
use drumline_observe::bar::Progress;
use drumline_torch::{flush_denormals, keep_freed_memory};
use tch::nn::VarStore;

use super::callbacks::{EvaluateLast, FiniteLoss, SaveBeside};
use super::job::Job;
use super::parallelism::Parallelism;
use super::report::Report;
use super::resume::{self, Begin};
use super::{TrainOptions, opened, parity};
use crate::config::{NamedSchedule, Parallel, SharedKeys};
use crate::models::ModelRanks;
use crate::optimizer::with_optimizer;
use crate::precision::Precision;
use crate::task::{
    Built, DataSets, Evaluated, Keep, ModelPlace, Place, Purpose, ResumeMode, Task, Trainer, alike_keys,
    shared,
};

/// The first steps are not traced: they allocate memory and read files for the first time.
const WARM_UP: u64 = 5;

/// Trains as configured.
pub(crate) fn train<T: Task>(
    config: anyhow::Result<T::Config>,
    options: &TrainOptions,
) -> anyhow::Result<()> {
    keep_freed_memory();
    flush_denormals(true)?;
    let task = opened::<T>(config, Purpose::Train);
    let job = Job::join()?;
    let mut task = job.agree(task)?;
    job.say_hello();
    if let Some(explanation) = &options.explanation {
        job.say(&format!("[deepspeed] == {} ==\n{}", explanation.file, explanation.to_string().trim_end()));
    }
    let fingerprints = job.agree(task.fingerprints())?;
    ensure_alike(&job.group, "training", [alike_keys(&task), fingerprints].concat())?;
    let seed = job.seed(shared(&task).run.rng_seed)?;
    if let Some(steps) = options.parity {
        return parity::verify(&job, task, seed, steps);
    }
    let Some(begin) = resume::begin(&job, &task, seed)? else { return Ok(()) };
    task.meet(&job, begin.start())?;
    job.agree(begin.found.as_ref().map_or(Ok(()), |found| resume::check_batches(&task, found)))?;
    TrainingRun { job: &job, task: &task, keys: shared(&task) }.run(begin)
}

/// A network and its variables.
pub(super) struct Network<'a, T: Task> {
    pub(super) model: &'a T::Model,
    pub(super) store: &'a VarStore,
}

impl<T: Task> Clone for Network<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T: Task> Copy for Network<'_, T> {}

/// The source of a trainer's batches.
pub(super) struct Batches<D> {
    pub(super) data: D,
    pub(super) sampler: Box<dyn Sampler>,
    pub(super) seed: u64,
}

/// Creates a trainer with everything that a step needs: data, loss, optimizer and learning rate.
pub(super) fn step_trainer<'a, T: Task>(
    task: &T,
    group: &ProcessGroup,
    network: Network<'a, T>,
    batches: Batches<T::Data>,
) -> anyhow::Result<Trainer<'a, T>> {
    let SharedKeys { train, optim, fp16, run, .. } = shared(task);
    let Network { model, store } = network;
    let trainer = DistTrainer::new(group, model, store, batches.data)
        .sampler(batches.sampler)
        .batch_size_per_gpu(train.batch_size)
        .update_every(shared(task).micro_batches())
        .num_workers(train.workers)
        .pin_memory(train.pin_memory)
        .drop_last(T::DROP_LAST)
        .n_epochs(optim.max_epoch)
        .seed(batches.seed)
        .cuda_graphs(run.cuda_graphs)
        .print_every(0);
    let trainer = task.with_loss(trainer, model);
    let precision = Precision::new(run.precision, &fp16);
    let trainer = with_optimizer(trainer, store, precision, task.optimizer())?;
    let trainer = match optim.grad_clip {
        Some(norm) => trainer.clip_norm(norm),
        None => trainer,
    };
    match optim.scheduler {
        Some(plan) => Ok(trainer.schedule(NamedSchedule::new(plan))),
        None => task.with_schedule(trainer),
    }
}

/// How ranks split the training data.
#[derive(Clone, Copy)]
struct Split {
    place: Place,
    seed: u64,
}

/// One training run, from start to end.
struct TrainingRun<'t, T: Task> {
    job: &'t Job,
    task: &'t T,
    keys: SharedKeys,
}

impl<T: Task> TrainingRun<'_, T> {
    fn run(&self, begin: Begin) -> anyhow::Result<()> {
        let Begin { found, checkpoints, progress, seed } = begin;
        let (job, task) = (self.job, self.task);
        let device = job.device(self.keys.run.device)?;
        let parallelism = job.agree(Parallelism::of(&job.group, &self.keys))?;
        tch::manual_seed(seed as i64);
        let store = VarStore::new(parallelism.first_device(device));
        let precision = Precision::new(self.keys.run.precision, &self.keys.fp16);
        let mesh = parallelism.mesh(&job.group)?;
        let ranks = mesh.as_ref().map(ModelRanks::on).unwrap_or_default();
        let cut = parallelism.pipeline(mesh.as_ref(), seed);
        let place = ModelPlace { group: &job.group, device, ranks: &ranks, pipeline: cut.as_ref() };
        let built = parallelism.first_weights(job.group.rank()).build(|| {
            let built = task.model(&store, place)?;
            precision.convert_weights(&store)?;
            Ok(built)
        });
        let Built { model, sync_group } = job.agree(built)?;
        let network = Network { model: &*model, store: &store };
        let sets = job.agree(task.train_data(device))?;
        sets.notes.iter().for_each(|note| progress.say(note));
        if let Some(staged) = Model::<T::Batch>::staged(network.model) {
            progress.say(&pipeline_line(staged.stages(), &self.keys.parallel));
        }
        let place = parallelism.place(job.group.rank());
        let trainer = job.agree(self.trainer(network, sets, Split { place, seed }))?;
        let engine = parallelism.engine(sync_group, ranks.tp.parts())?;
        let trainer = trainer.engine(engine).device(device).save_path(checkpoints);
        let trainer = match &mesh {
            Some(mesh) => trainer.on_mesh(mesh),
            None => trainer,
        };
        let is_new = found.is_none();
        let found = job.agree(found.map(|found| task.resumed(found, &store)).transpose())?;
        let trainer = match found {
            Some(found) => trainer.resume_with(found),
            None => trainer,
        };
        let trainer = self.with_csv(trainer, place.num_replicas);
        let trainer = self.observed(self.set_up(trainer)?, &progress, is_new);
        let outcome = trainer.train(LoadBestModel::No)?;
        self.report(&outcome, &progress);
        match outcome.end {
            End::Stopped { .. } => Ok(job.check_signal()?),
            End::Finished | End::EarlyStopped { .. } => Ok(()),
        }
    }

    /// Creates the trainer with its data, samplers and metrics. It does not communicate.
    fn trainer<'a>(
        &self,
        network: Network<'a, T>,
        sets: DataSets<T::Data>,
        split: Split,
    ) -> anyhow::Result<Trainer<'a, T>> {
        let (task, Split { place, seed }) = (self.task, split);
        let sampler = task.sampler(&sets.train, place, seed)?;
        let batches = Batches { data: sets.train, sampler, seed };
        let trainer = step_trainer(task, &self.job.group, network, batches)?;
        let Some(dev) = sets.dev else { return Ok(trainer) };
        let every = self.keys.train.eval_freq.map_or(Every::Epochs(1), Every::Steps);
        let trainer = trainer.validate_every(every).dev_batch_size(self.keys.test.batch_size);
        let trainer = match task.dev_sampler(&dev, place)? {
            Some(sampler) => trainer.dev_sampler(sampler),
            None => trainer,
        };
        let evaluated = Evaluated { purpose: Purpose::Train, model: network.model, place };
        let trainer = task.with_metrics(trainer.dev_data(dev), evaluated)?;
        Ok(match self.keys.train.early_stop {
            Some(patience) => trainer.callback(EarlyStop::patience(patience)),
            None => trainer,
        })
    }

    /// Adds the callbacks and settings of all tasks. They run after the task's own callbacks.
    fn set_up<'a>(&self, trainer: Trainer<'a, T>) -> anyhow::Result<Trainer<'a, T>> {
        let (task, train) = (self.task, &self.keys.train);
        let checkpoint = Checkpoint::every(train.save_freq.map_or(Every::Epochs(1), Every::Steps));
        let checkpoint = match task.checkpoints_kept() {
            Some(Keep { last, best }) => checkpoint.keep_last(last).keep_best(best),
            None => checkpoint,
        };
        let trainer = trainer
            .stop_request(self.job.stop.clone())
            .callback(FiniteLoss { folder: task.folders().own, nan_advice: T::REPORT_STYLE.nan_advice })
            .callback(checkpoint)
            .accept_new_data(train.accept_new_data)
            .config(self.job.agree(task.entries())?);
        let trainer = if task.evaluates() { trainer.callback(EvaluateLast) } else { trainer };
        Ok(match train.max_steps {
            Some(most) => trainer.max_steps(most),
            None => trainer,
        })
    }

    /// Adds the callbacks that print, log and trace.
    fn observed<'a>(&'a self, trainer: Trainer<'a, T>, progress: &Progress, is_new: bool) -> Trainer<'a, T> {
        let folder = self.task.folders().log;
        let report = Report::new(progress.clone(), self.keys.test.print_freq as u64, T::REPORT_STYLE);
        let trainer = trainer
            .callback(RankFiles::in_folder(&folder))
            .master_callback(SaveBeside { task: self.task, is_new })
            .master_callback(report)
            .master_callback(EventFile::in_folder(&folder));
        let trainer = if self.keys.train.tensorboard {
            trainer.master_callback(TensorBoard::in_folder(folder.join("tensorboard")))
        } else {
            trainer
        };
        trainer.trace_steps(WARM_UP..WARM_UP + self.keys.train.trace_steps, folder)
    }

    /// Adds the CSV files, which count the samples of all ranks.
    fn with_csv<'a>(&self, trainer: Trainer<'a, T>, num_replicas: usize) -> Trainer<'a, T> {
        let train = &self.keys.train;
        let Some(folder) = &train.csv else { return trainer };
        let samples = (train.batch_size * self.keys.micro_batches() * num_replicas) as u64;
        trainer.callback(CsvFiles::in_folder(folder).samples_per_step(samples))
    }

    /// Prints how the run ended.
    fn report(&self, outcome: &TrainOutcome, progress: &Progress) {
        outcome.slow_ranks.iter().for_each(|slow| progress.say(&format!("[ranks] == {slow} ==")));
        let (step, folder) = (outcome.steps, self.task.folders().own);
        let finished = |how: &str| {
            let name = self.task.name().map(|name| format!("{name}: ")).unwrap_or_default();
            let best = outcome.best_metric.map(|best| format!(" | best {} {best:.3}", self.task.best_by()));
            let best = best.unwrap_or_default();
            let line = "            =======  Training Finished  =======";
            format!("{line}{how}\n   {name}{step} steps{best} | {}", folder.display())
        };
        progress.say(&match &outcome.end {
            End::Finished => finished(""),
            End::EarlyStopped { reason } => finished(&format!("\n   {reason}, after step {step}")),
            End::Stopped { reason } => format!(
                "[stop] == asked to stop after step {step}: {reason}; the checkpoint is in {}; the same command{} resumes there ==",
                outcome.checkpoint.as_deref().unwrap_or(&folder).display(),
                if self.task.resume_mode() == ResumeMode::AfterRestart { " with --reload" } else { "" }
            ),
        });
    }
}

/// The line about a pipeline: its schedule, its idle share if all stages take the same time, and who has which layers.
fn pipeline_line(stages: &Stages, keys: &Parallel) -> String {
    let micro_batches = stages.micro_batches();
    let plan = stages.plan(micro_batches).map(|plan| plan.idle_share());
    let idle = plan.map(|idle| format!(", {:.1} % idle", 100.0 * idle)).unwrap_or_default();
    let of_stage = |(stage, layers): (usize, &Range<usize>)| {
        format!("{} on rank {}", layers.len(), stages.map().rank_of(stage))
    };
    let layers: Vec<_> = stages.layers().iter().enumerate().map(of_stage).collect();
    let advice = if micro_batches == 1 { "; try PARALLEL.MICRO_BATCHES, as ranks take turns" } else { "" };
    format!(
        "[init] == pipeline {} along {} ranks: {micro_batches} micro-batches{idle}; layers: {}{advice} ==",
        keys.schedule,
        keys.pp,
        layers.join(", ")
    )
}
