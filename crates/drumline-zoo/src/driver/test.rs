//! `drumline test`: evaluates a model on the test set over all ranks, each sample once, for every task.
//!
//! The model is the best one of the run, the last one with `--last`, or the weights that the command line names. The
//! test uses the precision of the configuration, so it gives the same figures as the evaluations during training.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, anyhow};
use drumline::checkpoint::{Checkpoints, Loaded, named, restore};
use drumline::comm::ensure_alike;
use drumline::engine::Part;
use drumline::optim::Named;
use drumline::trainer::{DistTrainer, Evaluation, Model};
use drumline_observe::bar::Progress;
use drumline_torch::{flush_denormals, keep_freed_memory};
use tch::nn::VarStore;

use super::job::Job;
use super::parallelism::Parallelism;
use super::predictions;
use super::report::Report;
use super::train::Network;
use super::{Given, load, opened};
use crate::config::SharedKeys;
use crate::models::ModelRanks;
use crate::precision::Precision;
use crate::task::{
    Built, Evaluated, ModelPlace, Place, Purpose, Start, Task, TestData, Trainer, alike_keys, shared,
};

/// Which model of a run is tested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WhichModel {
    /// The best model, or the last one if the run has evaluated none.
    Best,
    Last,
}

/// The options of a test besides the configuration.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TestOptions {
    pub(crate) model: WhichModel,
}

/// Evaluates the model and prints one line on rank 0.
pub(crate) fn test<T: Task>(given: &Given<'_>, options: TestOptions) -> anyhow::Result<()> {
    keep_freed_memory();
    flush_denormals(true)?;
    let task = opened::<T>(load(given), Purpose::Test);
    let job = Job::join()?;
    let mut task = job.agree(task)?;
    job.say_hello();
    ensure_alike(&job.group, "test", alike_keys(&task))?;
    let is_of_file = file_of_command_line(&task, given).is_some();
    task.meet(&job, if is_of_file { Start::TestOfFile } else { Start::TestOfRun })?;
    let (task, keys) = (&task, shared(&task));
    let device = job.device(keys.run.device)?;
    let store = VarStore::new(device);
    let parallelism = job.agree(Parallelism::of(&job.group, &keys))?;
    let mesh = parallelism.mesh(&job.group)?;
    let ranks = mesh.as_ref().map(ModelRanks::on).unwrap_or_default();
    let cut = parallelism.pipeline(mesh.as_ref(), 0);
    let place = ModelPlace { group: &job.group, device, ranks: &ranks, pipeline: cut.as_ref() };
    let Built { model, sync_group } = job.agree(task.model(&store, place))?;
    let precision = Precision::new(keys.run.precision, &keys.fp16);
    precision.convert_weights(&store)?;
    let parts = ranks.tp.parts();
    let staged = Model::<T::Batch>::staged(&*model);
    let elsewhere = staged.map(|staged| staged.stages().elsewhere().clone()).unwrap_or_default();
    let tested = TestedModel { job: &job, task, given, options, parts: &parts, elsewhere }.load(&store)?;
    let TestData { data, notes } = job.agree(task.test_data(device))?;
    notes.iter().for_each(|note| job.say(note));
    let network = Network { model: &*model, store: &store };
    let place = parallelism.place(job.group.rank());
    let trainer = job.agree(trainer(&job, task, network, TestShare { data, place }))?;
    let trainer = precision.set(trainer).engine(parallelism.engine(sync_group, parts)?);
    let trainer = match &mesh {
        Some(mesh) => trainer.on_mesh(mesh),
        None => trainer,
    };
    let evaluation = evaluate(&job, task, trainer)?;
    let loss = evaluation.metric("loss").unwrap_or(f64::NAN);
    let metrics = T::REPORT_STYLE.metrics(&evaluation.metrics);
    let (count, samples) = (evaluation.samples, T::REPORT_STYLE.samples);
    job.say(&format!("   == test: loss: {loss:.4}{metrics} | {count} {samples} | {tested}"));
    Ok(())
}

/// The test set, and this rank's place among those that split it.
struct TestShare<D> {
    data: D,
    place: Place,
}

/// Creates the trainer that evaluates the test set. It does not communicate.
fn trainer<'a, T: Task>(
    job: &Job,
    task: &T,
    network: Network<'a, T>,
    share: TestShare<T::Data>,
) -> anyhow::Result<Trainer<'a, T>> {
    let SharedKeys { train, test, .. } = shared(task);
    let TestShare { data, place } = share;
    let sampler = task.dev_sampler(&data, place)?;
    let progress = if job.is_rank_0() { Progress::lines(1) } else { Progress::silent() };
    let trainer = DistTrainer::for_evaluation(&job.group, network.model, network.store, data)
        .dev_batch_size(test.batch_size)
        .num_workers(train.workers)
        .pin_memory(train.pin_memory)
        .stop_request(job.stop.clone())
        .master_callback(Report::new(progress, test.print_freq as u64, T::REPORT_STYLE));
    let trainer = match sampler {
        Some(sampler) => trainer.dev_sampler(sampler),
        None => trainer,
    };
    task.with_metrics(
        task.with_loss(trainer, network.model),
        Evaluated { purpose: Purpose::Test, model: network.model, place },
    )
}

/// Evaluates, and writes predictions if a file is configured.
fn evaluate<T: Task>(job: &Job, task: &T, trainer: Trainer<'_, T>) -> anyhow::Result<Evaluation> {
    let whole =
        |evaluation: Option<Evaluation>| job.agree(evaluation.context("asked to stop before the end"));
    let Some(file) = task.predictions() else { return whole(trainer.evaluate()?) };
    // The file is opened before the evaluation, so that a missing folder is reported early.
    let writer = predictions::create(file, T::COLUMNS, trainer.dev_len(), &job.group)?;
    let rows = RefCell::new(Vec::new());
    let evaluation = trainer.evaluate_with(|batch, output| {
        rows.borrow_mut().extend(task.rows(batch, output)?);
        Ok(())
    })?;
    let evaluation = whole(evaluation)?;
    predictions::write(writer, &rows.into_inner())?;
    Ok(evaluation)
}

/// The weights file, if the command line names it. A saved configuration also names a weights file, but those are the
/// run's initial weights.
fn file_of_command_line<'t, T: Task>(task: &'t T, given: &Given<'_>) -> Option<&'t Path> {
    let is_given = given.pairs.iter().step_by(2).any(|key| key == T::WEIGHTS_KEY);
    task.first_weights().filter(|_| is_given)
}

/// Returns an error if there is no model to test, as far as one process can see before ranks are started.
pub(super) fn check_model<T: Task>(task: &T, given: &Given<'_>) -> anyhow::Result<()> {
    let checkpoints = Checkpoints::new(task.folders().checkpoints).read_only();
    if task.first_weights().is_none() && checkpoints.is_empty()? {
        return Err(no_checkpoint::<T>(&checkpoints));
    }
    file_of_command_line(task, given).map_or(Ok(()), |_| task.check_first_weights())
}

fn no_checkpoint<T: Task>(checkpoints: &Checkpoints) -> anyhow::Error {
    let folder = checkpoints.dir().display();
    anyhow!("no checkpoint in {folder}; try {} FILE.safetensors, or the run's own folder", T::WEIGHTS_KEY)
}

/// The model to test.
struct TestedModel<'a, T> {
    job: &'a Job,
    task: &'a T,
    given: &'a Given<'a>,
    options: TestOptions,
    /// What this rank has of the model, if it is cut.
    parts: &'a [Part],
    /// The names of tensors that only ranks with other stages have.
    elsewhere: BTreeSet<String>,
}

impl<T: Task> TestedModel<'_, T> {
    /// Loads a checkpoint of the run and returns a description of the model. Weights from a file were already loaded
    /// when the model was built.
    fn load(&self, store: &VarStore) -> anyhow::Result<String> {
        if let Some(file) = file_of_command_line(self.task, self.given) {
            return self.of_file(file);
        }
        // The run may still be training, so its checkpoints are opened read-only.
        let checkpoints = Checkpoints::new(self.task.folders().checkpoints).read_only();
        let Some(last) = checkpoints.load_latest(&self.job.group)? else {
            return match self.task.first_weights() {
                Some(file) => self.of_file(file),
                None => self.job.agree(Err(no_checkpoint::<T>(&checkpoints))),
            };
        };
        let best = match self.options.model {
            WhichModel::Last => None,
            WhichModel::Best => self.best(&checkpoints, &last)?,
        };
        let which = if best.is_some() { "best" } else { "last" };
        let found = best.unwrap_or(last);
        let weights = converted(&found.state.model, store).and_then(|weights| self.own(weights, store));
        self.job.agree(weights.and_then(|weights| Ok(restore(&named(store), &weights)?)))?;
        Ok(format!("{which} model, {}", found.path.display()))
    }

    /// What this rank has of whole weights.
    fn own(&self, weights: Vec<Named>, store: &VarStore) -> anyhow::Result<Vec<Named>> {
        let variables = store.variables();
        let own = |Named { name, tensor }: Named| {
            let part = self.parts.iter().find(|part| part.whole.name == name);
            let tensor = match (part, variables.get(&name)) {
                (Some(part), Some(own)) if tensor.size() == part.whole.size => {
                    part.of(&tensor, &own.size())?
                }
                _ => tensor,
            };
            Ok(Named { name, tensor })
        };
        let is_here = |named: &Named| !self.elsewhere.contains(&named.name);
        weights.into_iter().filter(is_here).map(own).collect()
    }

    fn of_file(&self, file: &Path) -> anyhow::Result<String> {
        self.job.agree(self.task.check_first_weights())?;
        Ok(file.display().to_string())
    }

    /// The best checkpoint of the same run as `last`. A best checkpoint that an earlier run has left in the folder is
    /// ignored.
    fn best(&self, checkpoints: &Checkpoints, last: &Loaded) -> anyhow::Result<Option<Loaded>> {
        if last.state.best.is_none() {
            return Ok(None);
        }
        let best = checkpoints.load_best(&self.job.group)?;
        Ok(best.filter(|best| best.state.is_best_of(&last.state)))
    }
}

/// The weights in the data types of `store`: a model may be tested in another precision than it was trained in.
fn converted(weights: &[Named], store: &VarStore) -> anyhow::Result<Vec<Named>> {
    let kinds: std::collections::BTreeMap<_, _> =
        named(store).into_iter().map(|own| (own.name, own.tensor.kind())).collect();
    let convert = |Named { name, tensor }: &Named| {
        let kind = kinds.get(name).filter(|kind| is_float(**kind) && is_float(tensor.kind()));
        let tensor = match kind {
            Some(kind) => tensor.f_to_kind(*kind)?,
            None => tensor.shallow_clone(),
        };
        Ok(Named { name: name.clone(), tensor })
    };
    weights.iter().map(convert).collect()
}

fn is_float(kind: tch::Kind) -> bool {
    matches!(kind, tch::Kind::Float | tch::Kind::BFloat16 | tch::Kind::Half)
}
