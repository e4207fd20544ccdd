//! `drumline-train test`: a network's accuracy on the test set.

use std::path::Path;

use anyhow::{Context, anyhow};
use drumline::checkpoint::{Checkpoints, Loaded, named, restore};
use drumline::{Dataset, Ddp, Loader, Named};
use tch::Device;
use tch::nn::VarStore;

use super::args::TestArgs;
use super::checked::Checked;
use super::evaluate::{Evaluation, Replica};
use super::gpt;
use super::job::{Job, say};
use super::kind::{Kind, kind_of};
use super::pieces::{self, Images, Placing};
use super::predict;
use super::step::Sums;
use super::text;
use crate::config::{Config, Run};

/// Evaluates as the command line says, and prints one line on rank 0.
pub(super) fn run(args: &TestArgs) -> anyhow::Result<()> {
    match kind_of(&args.run.cfg) {
        Kind::Images => images(args),
        Kind::Translation => Err(not_by_test()),
        Kind::Text => text::test(args),
        Kind::Gpt => gpt::test(args),
    }
}

/// A translation model has its own test.
pub(super) fn not_by_test() -> anyhow::Error {
    anyhow!(
        "a translation model is tested by translating; try drumline translate --model SAVETO --source FILE --out FILE --reference FILE"
    )
}

fn images(args: &TestArgs) -> anyhow::Result<()> {
    let checked = Checked::for_test(&args.run);
    let job = Job::join()?;
    let checked = job.agree(checked)?;
    job.say_hello();
    let config = &checked.config;
    let device = job.device(config.run.device)?;
    let store = VarStore::new(device);
    let (net, options) = job.agree(pieces::model(config, &store, &job.group))?;
    let weights = weights_of(config, args).load(&job, &config.run, &store)?;
    let replica = Ddp::new(net, &store, &job.group, options)?;
    let loader = job.agree(loader(&job, &checked, device))?;
    let k = config.train.topk;
    let evaluation = Evaluation { loader, device, k, print_freq: config.test.print_freq };
    let sums = match &config.test.predictions {
        None => evaluation.run(&job, &replica)?,
        Some(file) => predict(&job, &evaluation, &replica, file)?,
    };
    let sums = sums.context("asked to stop before the end")?;
    if job.is_first() {
        let (acc1, acck, loss, samples) = (sums.acc1(), sums.acck(), sums.loss(), sums.samples());
        say(&format!(
            "   == test: Acc@1 {acc1:.3} | Acc@{k} {acck:.3} | loss: {loss:.4} | {samples} images | {weights}"
        ));
    }
    Ok(())
}

fn weights_of<'a>(config: &'a Config, args: &TestArgs) -> Weights<'a> {
    Weights {
        file: config.model.weights.as_deref(),
        is_untrained: config.model.new_classifier,
        given: Given::of(&args.run.pairs),
        of_run: OfRun::Last,
    }
}

/// An error if the configuration is wrong, files that it names are not there, or there is nothing to evaluate.
pub(super) fn check_images(args: &TestArgs) -> anyhow::Result<()> {
    let checked = Checked::for_test(&args.run)?;
    weights_of(&checked.config, args).check(&checked.config.run)
}

/// A rank's share of the test images, which are put where they are best used.
fn loader(job: &Job, checked: &Checked, device: Device) -> anyhow::Result<Loader<Images>> {
    let (config, images) = (&checked.config, pieces::test_images(checked)?);
    let placing = Placing::of(config, device, &[&images])?;
    job.tell(placing.told.as_deref());
    pieces::test_loader(placing.put(images)?, config, job.place())
}

/// Evaluates, and writes what the network says of each image.
fn predict(
    job: &Job,
    evaluation: &Evaluation,
    replica: &Replica,
    file: &Path,
) -> anyhow::Result<Option<Sums>> {
    // Opened first: hours of work are not lost for want of a folder.
    let writer = predict::create(file, evaluation.loader.dataset().len(), &job.group)?;
    let mut rows = Vec::new();
    let sums = evaluation.run_with(job, replica, |batch, output| {
        rows.extend(predict::rows(batch, output)?);
        Ok(())
    })?;
    if sums.is_some() {
        predict::write(writer, &rows)?;
    }
    Ok(sums)
}

/// Where `MODEL.WEIGHTS` was given: a configuration that a run has saved names those that it began with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Given {
    OnCommandLine,
    InFile,
}

impl Given {
    pub(super) fn of(pairs: &[String]) -> Self {
        match pairs.iter().step_by(2).any(|key| key == "MODEL.WEIGHTS") {
            true => Self::OnCommandLine,
            false => Self::InFile,
        }
    }
}

/// Which of a run's models is evaluated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OfRun {
    Last,
    /// The last one where the run has evaluated none.
    Best,
}

/// What a network is evaluated with.
pub(super) struct Weights<'a> {
    /// `MODEL.WEIGHTS`, which building the model has read already.
    pub(super) file: Option<&'a Path>,
    /// Its last layer was not in that file.
    pub(super) is_untrained: bool,
    pub(super) given: Given,
    pub(super) of_run: OfRun,
}

impl Weights<'_> {
    /// Whether there is anything to evaluate, as one process can tell before the ranks of a job are started.
    pub(super) fn check(&self, run: &Run) -> anyhow::Result<()> {
        let checkpoints = pieces::checkpoints(run).read_only();
        if self.file.is_none() && checkpoints.is_empty()? { Err(no_checkpoint(&checkpoints)) } else { Ok(()) }
    }

    /// A checkpoint of `OUT_DIR`. `MODEL.WEIGHTS`, where it is asked for by this command, or there is no checkpoint. Says which it has taken.
    pub(super) fn load(&self, job: &Job, run: &Run, store: &VarStore) -> anyhow::Result<String> {
        if let (Some(file), Given::OnCommandLine) = (self.file, self.given) {
            return self.of_file(job, file);
        }
        // The run may be training.
        let checkpoints = pieces::checkpoints(run).read_only();
        let Some(last) = checkpoints.load_latest(&job.group)? else {
            if let Some(file) = self.file {
                return self.of_file(job, file);
            }
            return job.agree(Err(no_checkpoint(&checkpoints)));
        };
        let best = match self.of_run {
            OfRun::Last => None,
            OfRun::Best => best_of(&checkpoints, &last, job)?,
        };
        let which = match (self.of_run, &best) {
            (OfRun::Last, _) => "",
            (OfRun::Best, Some(_)) => "best model, ",
            (OfRun::Best, None) => "last model, ",
        };
        let found = best.unwrap_or(last);
        let weights = widened(&found.state.model);
        job.agree(weights.and_then(|weights| Ok(restore(&named(store), &weights)?)))?;
        Ok(format!("{which}{}", found.path.display()))
    }

    fn of_file(&self, job: &Job, file: &Path) -> anyhow::Result<String> {
        let untrained = anyhow::anyhow!(
            "MODEL.NEW_CLASSIFIER is True: {} would be tested with a last layer that nobody has trained; \
             try it without, or the run's OUT_DIR",
            file.display()
        );
        job.agree(if self.is_untrained { Err(untrained) } else { Ok(file.display().to_string()) })
    }
}

fn no_checkpoint(checkpoints: &Checkpoints) -> anyhow::Error {
    let folder = checkpoints.dir().display();
    anyhow!("no checkpoint in {folder}; try MODEL.WEIGHTS FILE.safetensors, or the run's OUT_DIR")
}

/// Weights that were trained in fewer bits are tested in f32.
fn widened(weights: &[Named]) -> anyhow::Result<Vec<Named>> {
    let widen = |Named { name, tensor }: &Named| {
        let tensor = match tensor.kind() {
            tch::Kind::BFloat16 | tch::Kind::Half => tensor.f_to_kind(tch::Kind::Float)?,
            _ => tensor.shallow_clone(),
        };
        Ok(Named { name: name.clone(), tensor })
    };
    weights.iter().map(widen).collect()
}

/// The best checkpoint of the run that `last` is of: one that a run before has left in the folder is none.
fn best_of(checkpoints: &Checkpoints, last: &Loaded, job: &Job) -> anyhow::Result<Option<Loaded>> {
    if last.state.best.is_none() {
        return Ok(None);
    }
    let best = checkpoints.load_best(&job.group)?;
    Ok(best.filter(|best| best.state.is_best_of(&last.state)))
}
