//! The demo on one device: train, evaluate, save. `train_dist` does the same on many devices, with the same result.
//!
//! ```text
//!   cargo run --release -p drumline-examples --bin train
//! ```
#![forbid(unsafe_code)]

use std::path::PathBuf;

use clap::Parser;
use drumline::data::{Dataset, DistributedSampler, EvalSampler, Loader, LoaderOptions, SamplerOptions};
use drumline::metrics::{MeanLoss, Metric, TopK};
use drumline::optim::{Optimizer, Sgd, SgdOptions, parameters};
use drumline::tch::nn::{ModuleT, VarStore};
use drumline::tch::{self, Device};
use drumline_examples::Args;
use drumline_zoo::data::{Cifar, Split};
use drumline_zoo::models::{ModelOptions, build};
use drumline_zoo::transforms::Transform;
use drumline_zoo::weights;

/// Train and evaluate a network on CIFAR-10, in one process
#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    args: Args,
    /// File for the weights, .safetensors
    #[arg(long, value_name = "FILE")]
    save: Option<PathBuf>,
}

fn main() -> anyhow::Result<()> {
    let Cli { args, save } = Cli::parse();

    // data
    let data = args.data()?;
    let trainset = Cifar::open(&data, Split::Train, Transform::cifar_train())?;
    let testset = Cifar::open(&data, Split::Test, Transform::cifar_test())?;
    let sampler =
        DistributedSampler::new(SamplerOptions { num_samples: trainset.len(), ..Default::default() })?;
    let test_sampler = EvalSampler::new(testset.len(), 1, 0)?;
    let options = LoaderOptions { batch_size: args.batch_size, ..Default::default() };
    let train_loader = Loader::new(trainset, sampler, options)?;
    let test_loader = Loader::new(testset, test_sampler, options)?;

    // model
    let device = Device::cuda_if_available();
    tch::manual_seed(1);
    let store = VarStore::new(device);
    let net = build(&args.arch, &store.root(), &ModelOptions { num_classes: 10, ..Default::default() })?;
    let mut optimizer =
        Sgd::new(parameters(&store), SgdOptions { lr: 0.02, momentum: 0.9, ..Default::default() })?;

    // train
    for epoch in 1..=args.epochs {
        let mut train_loss = MeanLoss::default();
        for batch in train_loader.epoch(epoch).take(args.steps) {
            let batch = batch?.to_device(device)?;
            let outputs = net.forward_t(&batch.images, true);
            let loss = outputs.cross_entropy_for_logits(&batch.labels);
            optimizer.zero_grad()?;
            loss.f_backward()?;
            optimizer.step()?;
            train_loss.add(loss.double_value(&[]), batch.len());
        }
        println!("epoch {epoch}: loss {:.7}", train_loss.value());
    }

    // infer
    let (mut test_loss, mut accuracy) = (MeanLoss::default(), TopK::new(1));
    for batch in test_loader.epoch(0) {
        let batch = batch?.to_device(device)?;
        let outputs = tch::no_grad(|| net.forward_t(&batch.images, false));
        test_loss.update(&outputs, &batch.labels)?;
        accuracy.update(&outputs, &batch.labels)?;
    }
    println!("test: loss {:.7}, accuracy {:.5}", test_loss.value(), accuracy.value());

    // save
    if let Some(file) = save {
        weights::save(&store, &file)?;
    }
    Ok(())
}
