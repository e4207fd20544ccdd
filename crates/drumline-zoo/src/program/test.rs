//! `drumline-train test`: a network's accuracy on the test set.

use std::path::PathBuf;

use anyhow::Context;
use tch::nn::VarStore;

use super::args::TestArgs;
use super::checked::{Checked, device};
use super::evaluate::evaluate;
use super::job::Job;
use super::pieces::{self, Replica, TestLoader};
use crate::config::Config;

/// Evaluates as the command line says, and prints one line on rank 0.
pub(super) fn run(args: &TestArgs) -> anyhow::Result<()> {
    let checked = Checked::new(&args.run);
    let job = Job::join()?;
    let checked = job.agree(checked)?;
    job.say_hello();
    let config = &checked.config;
    let device = job.agree(device(config.run.device, job.local_rank))?;
    let store = VarStore::new(device);
    let net = job.agree(pieces::model(config, &store))?;
    let weights = job.agree(load(config, &store))?;
    let replica = Replica::new(net, &store, &job.group)?;
    let test = job.agree(TestLoader::new(&checked, &job.group, device))?;
    let k = config.train.topk;
    let sums = evaluate(&job, &replica, &test, k)?.context("asked to stop before the end")?;
    if job.is_first() {
        let (acc1, acck, loss, samples) = (sums.acc1(), sums.acck(), sums.loss(), sums.samples());
        println!(
            "   == test: Acc@1 {acc1:.3} | Acc@{k} {acck:.3} | loss: {loss:.4} | {samples} images | {}",
            weights.display()
        );
    }
    Ok(())
}

/// `MODEL.WEIGHTS`, which building the model has read already, or else the last checkpoint of `OUT_DIR`.
fn load(config: &Config, store: &VarStore) -> anyhow::Result<PathBuf> {
    if let Some(weights) = &config.model.weights {
        return Ok(weights.clone());
    }
    let out_dir = &config.run.out_dir;
    let state = pieces::load_latest(out_dir)?.with_context(|| {
        format!(
            "no checkpoint in {}; try MODEL.WEIGHTS FILE.safetensors, or the run's OUT_DIR",
            out_dir.display()
        )
    })?;
    state.restore(store, None)?;
    Ok(out_dir.clone())
}
