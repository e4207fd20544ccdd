//! Multiple nodes, multiple cards, with `Ddp` and a launcher: a process for each card. Compare with `snsc`: there is a
//! group, the network is wrapped, the sampler divides the data, and rank 0 prints.
//!
//! ```text
//!  drumline run --nproc-per-node 2 target/release/mnmc_ddp_launch
//!
//!  drumline run --nproc-per-node 8 --nnodes 2 --node-rank 0 --master-addr 10.198.189.10 target/release/mnmc_ddp_launch
//!  drumline run --nproc-per-node 8 --nnodes 2 --node-rank 1 --master-addr 10.198.189.10 target/release/mnmc_ddp_launch
//! ```
#![forbid(unsafe_code)]

use clap::Parser;
use drumline::data::{Dataset, DistributedSampler, Loader, LoaderOptions, SamplerOptions};
use drumline::metrics::{MeanLoss, Metric, TopK, reduce_metrics};
use drumline::optim::{Optimizer, Sgd, SgdOptions, parameters};
use drumline::tch::Tensor;
use drumline::tch::nn::VarStore;
use drumline::{Ddp, DdpOptions, ProcessGroup, local_device};
use drumline_examples::Args;
use drumline_zoo::data::{Cifar, Split};
use drumline_zoo::models::{ModelOptions, build};
use drumline_zoo::transforms::Transform;

/// Train a network on CIFAR-10, in the processes that a launcher has started
#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    args: Args,
}

fn main() -> anyhow::Result<()> {
    let Cli { args } = Cli::parse();

    // 0. set up the group, and this rank's device
    let group = ProcessGroup::from_env()?;
    let (rank, local_rank) = (group.rank(), group.local_rank());
    let device = local_device(&group);
    println!("[init] == local rank: {local_rank}, global rank: {rank} ==");

    // 1. define the network; all ranks get the weights of rank 0
    let store = VarStore::new(device);
    let net = build(&args.arch, &store.root(), &ModelOptions { num_classes: 10, ..Default::default() })?;
    let net = Ddp::new(net, &store, &group, DdpOptions::default())?;

    // 2. define the data loader; a step sees batch_size images on each rank
    let trainset = Cifar::open(&args.data()?, Split::Train, Transform::cifar_train())?;
    let sampler = DistributedSampler::new(SamplerOptions::in_group(trainset.len(), &group))?;
    let options = LoaderOptions { batch_size: args.batch_size, pin_memory: true, ..Default::default() };
    let train_loader = Loader::new(trainset, sampler, options)?;

    // 3. define loss and optimizer; the learning rate grows with the total batch size
    let criterion = |outputs: &Tensor, labels: &Tensor| outputs.cross_entropy_for_logits(labels);
    let lr = 0.01 * group.size() as f64;
    let options = SgdOptions { lr, momentum: 0.9, weight_decay: 1e-4, nesterov: true, ..Default::default() };
    let mut optimizer = Sgd::new(parameters(&store), options)?;

    if rank == 0 {
        println!("            =======  Training  =======\n");
    }

    // 4. train; the loader sets the sampler's epoch
    let (epochs, steps) = (args.epochs, args.steps_of(train_loader.num_batches()));
    for epoch in 1..=epochs {
        let (mut train_loss, mut accuracy) = (MeanLoss::default(), TopK::new(1));
        for (step, batch) in (1..=steps).zip(train_loader.epoch(epoch)) {
            let batch = batch?.to_device(device)?;
            let outputs = net.forward(&batch.images)?;
            let loss = criterion(&outputs, &batch.labels);
            optimizer.zero_grad()?;
            net.backward(&loss)?;
            optimizer.step()?;

            train_loss.add(loss.double_value(&[]), batch.len());
            accuracy.update(&outputs, &batch.labels)?;
            if step % 25 == 0 || step == steps {
                let [loss, acc] = reduce_metrics([&train_loss, &accuracy], &group)?; // over all ranks, so all call it
                if rank == 0 {
                    let acc = 100.0 * acc;
                    println!(
                        "   == step: [{step:3}/{steps}] [{epoch}/{epochs}] | loss: {loss:.3} | acc: {acc:6.3}%"
                    );
                }
            }
        }
    }
    if rank == 0 {
        println!("\n            =======  Training Finished  =======");
    }
    Ok(())
}
