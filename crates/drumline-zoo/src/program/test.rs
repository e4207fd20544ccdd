//! `drumline-train test`: a network's accuracy on the test set.

use std::path::{Path, PathBuf};

use anyhow::Context;
use drumline::checkpoint::{named, restore};
use drumline::{Dataset, Ddp};
use tch::nn::VarStore;

use super::args::TestArgs;
use super::checked::{Checked, device};
use super::evaluate::{Evaluation, Replica};
use super::job::{Job, say};
use super::pieces;
use super::predict;
use super::step::Sums;
use crate::config::Config;

/// Evaluates as the command line says, and prints one line on rank 0.
pub(super) fn run(args: &TestArgs) -> anyhow::Result<()> {
    let checked = Checked::for_test(&args.run);
    let job = Job::join()?;
    let checked = job.agree(checked)?;
    job.say_hello();
    let config = &checked.config;
    let device = job.agree(device(config.run.device, job.local_rank))?;
    let store = VarStore::new(device);
    let (net, options) = job.agree(pieces::model(config, &store, &job.group))?;
    let weights = load(&job, config, &store, Given::of(&args.run.pairs))?;
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
enum Given {
    OnCommandLine,
    InFile,
}

impl Given {
    fn of(pairs: &[String]) -> Self {
        match pairs.iter().step_by(2).any(|key| key == "MODEL.WEIGHTS") {
            true => Self::OnCommandLine,
            false => Self::InFile,
        }
    }
}

/// The last checkpoint of `OUT_DIR`. `MODEL.WEIGHTS`, which building the model has read already, where it is asked for
/// by this command, or there is no checkpoint.
fn load(job: &Job, config: &Config, store: &VarStore, given: Given) -> anyhow::Result<PathBuf> {
    let weights = config.model.weights.as_ref();
    let from_file = |weights: &PathBuf| {
        let untrained = anyhow::anyhow!(
            "MODEL.NEW_CLASSIFIER is True: {} would be tested with a last layer that nobody has trained; \
             try it without, or the run's OUT_DIR",
            weights.display()
        );
        job.agree(if config.model.new_classifier { Err(untrained) } else { Ok(weights.clone()) })
    };
    if let (Some(weights), Given::OnCommandLine) = (weights, given) {
        return from_file(weights);
    }
    let checkpoints = pieces::checkpoints(config);
    let Some(found) = checkpoints.load_latest(&job.group)? else {
        if let Some(weights) = weights {
            return from_file(weights);
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
