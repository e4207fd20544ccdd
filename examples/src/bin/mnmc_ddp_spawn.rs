//! Multiple cards with `Ddp`, without a launcher: the program starts itself once for each rank. Compare with
//! `mnmc_ddp_launch`: `main` calls `spawn`, and the rest is the same in a function.
//!
//! ```text
//!   cargo run --release -p drumline-examples --bin mnmc_ddp_spawn -- --nproc 2
//! ```
//! For several nodes start the same program with `drumline run`: `spawn` then uses the launcher's ranks.
#![forbid(unsafe_code)]

use clap::Parser;
use drumline::data::{Dataset, DistributedSampler, Loader, LoaderOptions, SamplerOptions};
use drumline::metrics::{MeanLoss, Metric, TopK, reduce_metrics};
use drumline::optim::{Optimizer, Sgd, SgdOptions, parameters};
use drumline::tch::Tensor;
use drumline::tch::nn::VarStore;
use drumline::{Ddp, DdpOptions, Worker, local_device, spawn};
use drumline_examples::Args;
use drumline_zoo::data::{Cifar, Split};
use drumline_zoo::models::{ModelOptions, build};
use drumline_zoo::transforms::Transform;

/// Train a network on CIFAR-10, in several processes of this program
#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    args: Args,
    /// Ranks to start
    #[arg(long, default_value_t = 2, value_name = "N")]
    nproc: usize,
}

fn main() -> anyhow::Result<()> {
    let Cli { args, nproc } = Cli::parse();
    spawn(nproc, |worker| train(&worker, &args))?;
    // Only the parent process gets here.
    Ok(())
}

/// What each rank does.
fn train(worker: &Worker, args: &Args) -> anyhow::Result<()> {
    // 0. set up the group, and this rank's device
    let group = worker.group()?;
    let (rank, local_rank) = (worker.rank, worker.local_rank);
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
