//! `drumline-train test`: a network's accuracy on the test set.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use drumline::checkpoint::{named, restore};
use drumline::{Dataset, Ddp};
use tch::nn::VarStore;

use super::args::TestArgs;
use super::checked::{Checked, device};
use super::evaluate::{Evaluation, Replica};
use super::job::{Job, say};
use super::kind::{Kind, kind_of};
use super::pieces;
use super::predict;
use super::step::Sums;
use super::text;
use crate::config::Run;

/// Evaluates as the command line says, and prints one line on rank 0.
pub(super) fn run(args: &TestArgs) -> anyhow::Result<()> {
    match kind_of(&args.run.cfg) {
        Kind::Images => images(args),
        Kind::Translation => bail!(
            "a translation model is tested by translating; try drumline translate --model SAVETO --source FILE --out FILE --reference FILE"
        ),
        Kind::Text => text::test(args),
    }
}

fn images(args: &TestArgs) -> anyhow::Result<()> {
    let checked = Checked::for_test(&args.run);
    let job = Job::join()?;
    let checked = job.agree(checked)?;
    job.say_hello();
    let config = &checked.config;
    let device = job.agree(device(config.run.device, job.local_rank))?;
    let store = VarStore::new(device);
    let (net, options) = job.agree(pieces::model(config, &store, &job.group))?;
    let weights = Weights {
        file: config.model.weights.as_deref(),
        is_untrained: config.model.new_classifier,
        given: Given::of(&args.run.pairs),
    };
    let weights = weights.load(&job, &config.run, &store)?;
    let replica = Ddp::new(net, &store, &job.group, options)?;
    let loader = job.agree(pieces::test_loader(&checked, job.place()))?;
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
            "   == test: Acc@1 {acc1:.3} | Acc@{k} {acck:.3} | loss: {loss:.4} | {samples} images | {}",
            weights.display()
        ));
    }
    Ok(())
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

/// What a network is evaluated with.
pub(super) struct Weights<'a> {
    /// `MODEL.WEIGHTS`, which building the model has read already.
    pub(super) file: Option<&'a Path>,
    /// Its last layer was not in that file.
    pub(super) is_untrained: bool,
    pub(super) given: Given,
}

impl Weights<'_> {
    /// The last checkpoint of `OUT_DIR`. `MODEL.WEIGHTS`, where it is asked for by this command, or there is no checkpoint.
    pub(super) fn load(&self, job: &Job, run: &Run, store: &VarStore) -> anyhow::Result<PathBuf> {
        if let (Some(file), Given::OnCommandLine) = (self.file, self.given) {
            return self.of_file(job, file);
        }
        let checkpoints = pieces::checkpoints(run);
        let Some(found) = checkpoints.load_latest(&job.group)? else {
            if let Some(file) = self.file {
                return self.of_file(job, file);
            }
            let folder = checkpoints.dir().display();
            return job.agree(Err(anyhow::anyhow!(
                "no checkpoint in {folder}; try MODEL.WEIGHTS FILE.safetensors, or the run's OUT_DIR"
            )));
        };
        let path = found.path.clone();
        job.agree(restore(&named(store), &found.state.model).map_err(Into::into))?;
        Ok(path)
    }

    fn of_file(&self, job: &Job, file: &Path) -> anyhow::Result<PathBuf> {
        let untrained = anyhow::anyhow!(
            "MODEL.NEW_CLASSIFIER is True: {} would be tested with a last layer that nobody has trained; \
             try it without, or the run's OUT_DIR",
            file.display()
        );
        job.agree(if self.is_untrained { Err(untrained) } else { Ok(file.to_owned()) })
    }
}
