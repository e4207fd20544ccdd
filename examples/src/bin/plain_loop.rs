//! A plain training loop for one device. Compare with `accelerated`: four lines of `train` differ.
//!
//! ```text
//!   target/release/plain_loop --batch-size 32
//! ```
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;
use drumline::LogOptions;
use drumline::data::{Dataset, DistributedSampler, Loader, LoaderOptions, SamplerOptions};
use drumline::optim::{Optimizer, Sgd, SgdOptions, parameters};
use drumline::tch::nn::{ModuleT, VarStore};
use drumline_examples::{Args, norm_of};
use drumline_zoo::data::{Cifar, Split};
use drumline_zoo::models::{ModelOptions, build};
use drumline_zoo::transforms::Transform;

/// Train a network on CIFAR-10, by a loop for one device
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
    let device = drumline::tch::Device::cuda_if_available();

    let store = VarStore::new(device);
    let model = build(&args.arch, &store.root(), &ModelOptions { num_classes: 10, ..Default::default() })?;
    let options = SgdOptions { lr: 0.05, momentum: 0.9, ..Default::default() };
    let sgd = Sgd::new(parameters(&store), options)?;

    let dataset = Cifar::open(&args.data()?, Split::Train, Transform::cifar_train())?;
    let options = SamplerOptions { num_samples: dataset.len(), ..Default::default() };
    let sampler = DistributedSampler::new(options)?;
    let options = LoaderOptions { batch_size: args.batch_size, ..Default::default() };
    let loader = Loader::new(dataset, sampler, options)?;
    let mut optimizer = sgd;

    for epoch in 0..args.epochs {
        for batch in loader.epoch(epoch) {
            let batch = batch?.to_device(device)?;
            let output = model.forward_t(&batch.images, true);
            let loss = output.cross_entropy_for_logits(&batch.labels);
            loss.f_backward()?;
            optimizer.step()?;
            optimizer.zero_grad()?;
        }
        tracing::info!("epoch {epoch}: norm of all weights: {:.8}", norm_of(&store));
    }
    Ok(())
}
