//! The loop of `plain_loop` on any number of processes: four lines of `train` differ.
//!
//! ```text
//!   target/release/accelerated --batch-size 32
//!   drumline run --nproc-per-node 2 target/release/accelerated --batch-size 16    the same result
//! ```
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;
use drumline::Accelerator;
use drumline::LogOptions;
use drumline::data::{Dataset, DistributedSampler, Loader, LoaderOptions, SamplerOptions};
use drumline::optim::{Sgd, SgdOptions, parameters};
use drumline::tch::nn::VarStore;
use drumline_examples::{Args, norm_of};
use drumline_zoo::data::{Cifar, Split};
use drumline_zoo::models::{ModelOptions, build};
use drumline_zoo::transforms::Transform;

/// Train a network on CIFAR-10, in as many processes as a launcher has started, or in one
#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    args: Args,
}

fn main() -> ExitCode {
    drumline::exit_code(train(&Cli::parse().args))
}

fn train(args: &Args) -> anyhow::Result<()> {
    drumline::init_logging(LogOptions::default())?;
    drumline::tch::manual_seed(1);
    let accelerator = Accelerator::new()?;
    let device = accelerator.device();

    let store = VarStore::new(device);
    let model = build(&args.arch, &store.root(), &ModelOptions { num_classes: 10, ..Default::default() })?;
    let options = SgdOptions { lr: 0.05, momentum: 0.9, ..Default::default() };
    let sgd = Sgd::new(parameters(&store), options)?;

    let dataset = Cifar::open(&args.data()?, Split::Train, Transform::cifar_train())?;
    let options = SamplerOptions { num_samples: dataset.len(), ..Default::default() };
    let sampler = DistributedSampler::new(options)?;
    let options = LoaderOptions { batch_size: args.batch_size, ..Default::default() };
    let loader = Loader::new(dataset, sampler, options)?;
    let (model, mut optimizer, loader) = accelerator.prepare(model, &store, sgd, loader)?;

    for epoch in 0..args.epochs {
        for batch in loader.epoch(epoch) {
            let batch = batch?.to_device(device)?;
            let output = model.forward_t(&batch.images, true);
            let loss = output.cross_entropy_for_logits(&batch.labels);
            accelerator.backward(&loss)?;
            optimizer.step()?;
            optimizer.zero_grad()?;
        }
        tracing::info!("epoch {epoch}: norm of all weights: {:.8}", norm_of(&store));
    }
    Ok(())
}
