//! Single node, multiple cards, with `DataParallel`: one process, and a replica of the network on each device. Compare
//! with `snsc`: the network is wrapped, and backward is a method of the wrapper.
//!
//! ```text
//!   cargo run --release -p drumline-examples --bin snmc_dp -- --devices 2
//! ```
//! Without a GPU, the devices are replicas that share the CPU.
#![forbid(unsafe_code)]

use clap::Parser;
use drumline::data::{Dataset, DistributedSampler, Loader, LoaderOptions, SamplerOptions};
use drumline::engine::DataParallel;
use drumline::metrics::{MeanLoss, Metric, TopK};
use drumline::optim::{Optimizer, Sgd, SgdOptions, parameters};
use drumline::tch::{Device, Tensor};
use drumline::torch::gpu_or_cpu;
use drumline_examples::Args;
use drumline_zoo::data::{Cifar, Split};
use drumline_zoo::models::{ModelOptions, build};
use drumline_zoo::transforms::Transform;

/// Train a network on CIFAR-10, in one process on several devices
#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    args: Args,
    /// Devices that share each step's images
    #[arg(long, default_value_t = 2, value_name = "N")]
    devices: usize,
}

fn main() -> anyhow::Result<()> {
    let Cli { args, devices } = Cli::parse();

    // 0. set up the devices; inputs, outputs and the loss are on the first
    let devices: Vec<Device> = (0..devices).map(gpu_or_cpu).collect();
    println!("[init] == {} devices ==", devices.len());

    // 1. define the network, once on each device
    let options = ModelOptions { num_classes: 10, ..Default::default() };
    let mut net = DataParallel::try_new(&devices, |path| anyhow::Ok(build(&args.arch, &path, &options)?))?;

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
    let mut optimizer = Sgd::new(parameters(net.store()), options)?;

    println!("            =======  Training  =======\n");

    // 4. train
    let (epochs, steps) = (args.epochs, args.steps_of(train_loader.num_batches()));
    for epoch in 1..=epochs {
        let (mut train_loss, mut accuracy) = (MeanLoss::default(), TopK::new(1));
        for (step, batch) in (1..=steps).zip(train_loader.epoch(epoch)) {
            let batch = batch?.to_device(devices[0])?;
            let outputs = net.forward_t(&batch.images, true)?;
            let loss = criterion(&outputs, &batch.labels);
            optimizer.zero_grad()?;
            net.backward(&loss)?;
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
