//! `drumline-train test` of a GPT: loss and perplexity of `GPT.DEV`, over all ranks, each window once.

use anyhow::{Context, anyhow};
use drumline::trainer::{Batch, BatchMetric, Mode, Model};
use drumline::{Dataset, EvalSampler, Loader, LoaderOptions, ReduceOp};
use tch::nn::VarStore;
use tch::no_grad;

use super::parts::Checked;
use crate::gpt::{GptConfig, Perplexity, TokenData};
use crate::models::gpt::Gpt;
use crate::program::args::TestArgs;
use crate::program::job::{Job, say};
use crate::program::pieces::checkpoints;
use crate::program::test::{Given, OfRun, Weights};

/// Evaluates as the command line says, and prints one line on rank 0.
pub(in crate::program) fn test(args: &TestArgs) -> anyhow::Result<()> {
    let checked = checked(args);
    let job = Job::join()?;
    let (data, checked) = job.agree(checked)?;
    job.say_hello();
    let config = &checked.config;
    let device = job.device(config.run.device)?;
    let store = VarStore::new(device);
    let net = job.agree(checked.net(&store))?;
    let weights = weights_of(config, args);
    job.agree(if job.is_first() { same_model(&checked, &weights) } else { Ok(()) })?;
    let weights = weights.load(&job, &config.run, &store)?;
    let windows = data.len();
    let [loss, ppl] = evaluate(&job, &checked, data, &net)?;
    if job.is_first() {
        say(&format!("   == test: loss: {loss:.4} | ppl {ppl:.3} | {windows} windows | {weights}"));
    }
    Ok(())
}

fn weights_of<'a>(config: &'a GptConfig, args: &TestArgs) -> Weights<'a> {
    let file = config.model.weights.as_deref();
    Weights { file, is_untrained: false, given: Given::of(&args.run.pairs), of_run: OfRun::Best }
}

/// An error if the configuration is wrong, files that it names are not there, or there is nothing to evaluate.
pub(in crate::program) fn check_test(args: &TestArgs) -> anyhow::Result<()> {
    let (_, checked) = checked(args)?;
    weights_of(&checked.config, args).check(&checked.config.run)
}

fn checked(args: &TestArgs) -> anyhow::Result<(TokenData, Checked)> {
    let checked = Checked::new(&args.run)?;
    let dev = checked.config.tokens.dev.as_ref().context("GPT.DEV is not given; try a file")?;
    Ok((checked.data("GPT.DEV", dev)?, checked))
}

/// A model of `OUT_DIR` is tested as it was trained.
fn same_model(checked: &Checked, weights: &Weights<'_>) -> anyhow::Result<()> {
    let is_of_file = weights.file.is_some() && weights.given == Given::OnCommandLine;
    let last = checkpoints(&checked.config.run).dir().join("latest");
    if is_of_file || !last.is_dir() { Ok(()) } else { checked.same_model() }
}

/// Mean loss of a token, and perplexity; the same on all ranks.
fn evaluate(job: &Job, checked: &Checked, data: TokenData, net: &Gpt) -> anyhow::Result<[f64; 2]> {
    let config = &checked.config;
    let (rank, ranks) = job.place();
    let sampler = EvalSampler::new(data.len(), ranks, rank)?;
    let (batch_size, workers) = (config.test.batch_size, config.train.workers);
    let loader =
        Loader::new(data, sampler, LoaderOptions { batch_size, workers, ..LoaderOptions::default() })?;
    let mut own = Perplexity::default();
    job.agree(no_grad(|| share(job, &loader, net, &mut own)))?;
    let is_cut = job.stop.agreed(&job.group)?;
    job.agree((!is_cut).then_some(()).context("asked to stop before the end"))?;
    let mut sums = own.sums();
    job.group.all_reduce(&mut sums, ReduceOp::Sum)?;
    Ok([sums[0] / sums[1], own.value_of(&sums)])
}

fn share(job: &Job, loader: &Loader<TokenData>, net: &Gpt, own: &mut Perplexity) -> anyhow::Result<()> {
    for batch in loader.epoch(0) {
        if job.stop.is_requested() {
            break;
        }
        let batch = batch?.to_device(net.device())?;
        let output = net.forward_batch(&batch, Mode::Eval).map_err(|cause| anyhow!(cause))?;
        own.update(&output, &batch).map_err(|cause| anyhow!(cause))?;
    }
    Ok(())
}
