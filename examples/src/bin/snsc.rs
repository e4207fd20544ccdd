//! Single node, single card: the loop on which the other examples build. Compare with `snmc_dp` and `mnmc_ddp_launch`.
//!
//! ```text
//!   cargo run --release -p drumline-examples --bin snsc
//! ```
#![forbid(unsafe_code)]

use clap::Parser;
use drumline::data::{Dataset, DistributedSampler, Loader, LoaderOptions, SamplerOptions};
use drumline::metrics::{MeanLoss, Metric, TopK};
use drumline::optim::{Optimizer, Sgd, SgdOptions, parameters};
use drumline::tch::nn::{ModuleT, VarStore};
use drumline::tch::{Device, Tensor};
use drumline_examples::Args;
use drumline_zoo::data::{Cifar, Split};
use drumline_zoo::models::{ModelOptions, build};
use drumline_zoo::transforms::Transform;

/// Train a network on CIFAR-10, in one process on one device
#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    args: Args,
}

fn main() -> anyhow::Result<()> {
    let Cli { args } = Cli::parse();

    // 0. set up the device
    let device = Device::cuda_if_available();

    // 1. define the network
    let store = VarStore::new(device);
    let net = build(&args.arch, &store.root(), &ModelOptions { num_classes: 10, ..Default::default() })?;

    // 2. define the data loader
    let trainset = Cifar::open(&args.data()?, Split::Train, Transform::cifar_train())?;
    let sampler =
        DistributedSampler::new(SamplerOptions { num_samples: trainset.len(), ..Default::default() })?;
    let options = LoaderOptions { batch_size: args.batch_size, pin_memory: true, ..Default::default() };
    let train_loader = Loader::new(trainset, sampler, options)?;

    // 3. define loss and optimizer
    let criterion = |outputs: &Tensor, labels: &Tensor| outputs.cross_entropy_for_logits(labels);
    let options =
        SgdOptions { lr: 0.01, momentum: 0.9, weight_decay: 1e-4, nesterov: true, ..Default::default() };
    let mut optimizer = Sgd::new(parameters(&store), options)?;

    println!("            =======  Training  =======\n");

    // 4. train
    let (epochs, steps) = (args.epochs, args.steps_of(train_loader.num_batches()));
    for epoch in 1..=epochs {
        let (mut train_loss, mut accuracy) = (MeanLoss::default(), TopK::new(1));
        for (step, batch) in (1..=steps).zip(train_loader.epoch(epoch)) {
            let batch = batch?.to_device(device)?;
            let outputs = net.forward_t(&batch.images, true);
            let loss = criterion(&outputs, &batch.labels);
            optimizer.zero_grad()?;
            loss.f_backward()?;
            optimizer.step()?;

            train_loss.add(loss.double_value(&[]), batch.len());
            accuracy.update(&outputs, &batch.labels)?;
            if step % 25 == 0 || step == steps {
                let (loss, acc) = (train_loss.value(), 100.0 * accuracy.value());
                println!(
                    "   == step: [{step:3}/{steps}] [{epoch}/{epochs}] | loss: {loss:.3} | acc: {acc:6.3}%"
                );
            }
        }
    }
    println!("\n            =======  Training Finished  =======");
    Ok(())
}
