//! The demo on many processes, with the result of `train`: a step has the same images, and the losses are the same.
//!
//! ```text
//!   drumline run --nproc-per-node 2 target/release/train_dist
//! ```
//! `--batch-size` is that of all ranks together here. Each rank has the mean loss of its images, and `Ddp` averages the
//! ranks' gradients, so the program divides by nothing. Metrics are sums and counts until the end.
#![forbid(unsafe_code)]

use std::path::PathBuf;

use anyhow::ensure;
use clap::Parser;
use drumline::data::{Dataset, DistributedSampler, EvalSampler, Loader, LoaderOptions, SamplerOptions};
use drumline::engine::SyncGroup;
use drumline::metrics::{MeanLoss, Metric, TopK, reduce_metrics};
use drumline::optim::{Optimizer, Sgd, SgdOptions, parameters};
use drumline::tch;
use drumline::tch::nn::VarStore;
use drumline::{Ddp, DdpOptions, ProcessGroup, local_device};
use drumline_examples::Args;
use drumline_zoo::data::{Cifar, Split};
use drumline_zoo::models::{ModelOptions, Norm, build};
use drumline_zoo::transforms::Transform;
use drumline_zoo::weights;

/// Train and evaluate a network on CIFAR-10, in the processes that a launcher has started
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

    // init
    let group = ProcessGroup::from_env()?;
    let (rank, size) = (group.rank(), group.size());
    println!("[init] == local rank: {}, global rank: {rank} ==", group.local_rank());

    // data: the sampler shuffles, and the loader passes it the epoch
    ensure!(
        args.batch_size.is_multiple_of(size),
        "--batch-size: {} images do not divide by {size} ranks",
        args.batch_size
    );
    let data = args.data()?;
    let trainset = Cifar::open(&data, Split::Train, Transform::cifar_train())?;
    let testset = Cifar::open(&data, Split::Test, Transform::cifar_test())?;
    let sampler = DistributedSampler::new(SamplerOptions::in_group(trainset.len(), &group))?;
    let test_sampler = EvalSampler::new(testset.len(), size, rank)?;
    let options = LoaderOptions { batch_size: args.batch_size / size, ..Default::default() };
    let train_loader = Loader::new(trainset, sampler, options)?;
    let test_loader = Loader::new(testset, test_sampler, options)?;

    // model: norms over the batch of all ranks, as one process has them
    let device = local_device(&group);
    tch::manual_seed(1);
    let store = VarStore::new(device);
    let norm = Norm::Sync(SyncGroup::new(&group)?);
    let options = ModelOptions { num_classes: 10, norm, ..Default::default() };
    let net = build(&args.arch, &store.root(), &options)?;
    let net = Ddp::new(net, &store, &group, DdpOptions::default())?;
    let mut optimizer =
        Sgd::new(parameters(&store), SgdOptions { lr: 0.02, momentum: 0.9, ..Default::default() })?;

    // train
    for epoch in 1..=args.epochs {
        let mut train_loss = MeanLoss::default();
        for batch in train_loader.epoch(epoch).take(args.steps) {
            let batch = batch?.to_device(device)?;
            let outputs = net.forward(&batch.images)?;
            let loss = outputs.cross_entropy_for_logits(&batch.labels);
            optimizer.zero_grad()?;
            net.backward(&loss)?;
            optimizer.step()?;
            train_loss.add(loss.double_value(&[]), batch.len());
        }
        let train_loss = train_loss.reduce(&group)?;
        if rank == 0 {
            println!("epoch {epoch}: loss {train_loss:.7}");
        }
    }

    // infer: each image once, and the mean is over images
    let (mut test_loss, mut accuracy) = (MeanLoss::default(), TopK::new(1));
    for batch in test_loader.epoch(0) {
        let batch = batch?.to_device(device)?;
        let outputs = net.evaluate(&batch.images);
        test_loss.update(&outputs, &batch.labels)?;
        accuracy.update(&outputs, &batch.labels)?;
    }
    let [test_loss, accuracy] = reduce_metrics([&test_loss, &accuracy], &group)?;
    if rank == 0 {
        println!("test: loss {test_loss:.7}, accuracy {accuracy:.5}");
    }

    // save: all ranks have the same weights, and one writes them
    if let Some(file) = save.filter(|_| rank == 0) {
        weights::save(&store, &file)?;
    }
    Ok(())
}
