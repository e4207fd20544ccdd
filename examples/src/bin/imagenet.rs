//! Training on ImageNet: images from folders, random crops, a learning rate with warm-up and decay, and an evaluation
//! after each epoch. Any launcher works, and so does Slurm without one: `from_env` detects it.
//!
//! ```text
//!   drumline run --nproc-per-node 8 target/release/imagenet \
//!       --data /data/imagenet --arch resnet50 --im-size 224 --batch-size 256
//!   srun --ntasks 32 --ntasks-per-node 8 target/release/imagenet --data /data/imagenet …
//! ```
//! The images are `DIR/train/<class>/*.jpg` and `DIR/val/<class>/*.jpg`; if DIR has CIFAR's files, those are used. The
//! ready program with checkpoints and a configuration file is `drumline train`.
#![forbid(unsafe_code)]

use clap::Parser;
use drumline::data::{Dataset, DistributedSampler, EvalSampler, Loader, LoaderOptions, SamplerOptions};
use drumline::metrics::{MeanLoss, Metric, TopK, reduce_metrics};
use drumline::optim::{Optimizer, Sgd, SgdOptions, parameters};
use drumline::schedule::{At, Distribuuuu, LrPolicy, LrSchedule, Schedule};
use drumline::tch::nn::VarStore;
use drumline::tch::{Device, Tensor};
use drumline::{Ddp, DdpOptions, ProcessGroup, local_device};
use drumline_examples::Args;
use drumline_zoo::data::Images;
use drumline_zoo::models::{Model, ModelOptions, build};
use drumline_zoo::transforms::Transform;

/// Train and evaluate a network on folders of images
#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    args: Args,
    /// Width and height of the network's input
    #[arg(long, default_value_t = 32, value_name = "PIXELS")]
    im_size: usize,
}

fn main() -> anyhow::Result<()> {
    let Cli { args, im_size } = Cli::parse();

    // 0. set up the group, and this rank's device
    let group = ProcessGroup::from_env()?;
    let (rank, local_rank) = (group.rank(), group.local_rank());
    let device = local_device(&group);
    println!("[init] == local rank: {local_rank}, global rank: {rank} ==");

    // 1. define the data loaders; each image is evaluated once, on any number of ranks
    let data = args.data()?;
    let trainset = Images::open(&data, "train", Transform::imagenet_train(im_size))?;
    let valset = Images::open(&data, "val", Transform::imagenet_test(im_size * 8 / 7, im_size))?;
    let num_classes = trainset.num_classes();
    let sampler = DistributedSampler::new(SamplerOptions::in_group(trainset.len(), &group))?;
    let val_sampler = EvalSampler::new(valset.len(), group.size(), rank)?;
    let options = LoaderOptions { batch_size: args.batch_size, pin_memory: true, ..Default::default() };
    let train_loader = Loader::new(trainset, sampler, options)?;
    let val_loader = Loader::new(valset, val_sampler, options)?;

    // 2. define the network, with as many classes as there are folders
    let store = VarStore::new(device);
    let net = build(&args.arch, &store.root(), &ModelOptions { num_classes, ..Default::default() })?;
    let net = Ddp::new(net, &store, &group, DdpOptions::default())?;

    // 3. define loss, optimizer and learning rate: 0.1 for 256 images
    let criterion = |outputs: &Tensor, labels: &Tensor| outputs.cross_entropy_for_logits(labels);
    let lr = 0.1 * (args.batch_size * group.size()) as f64 / 256.0;
    let options = SgdOptions { lr, momentum: 0.9, weight_decay: 1e-4, nesterov: true, ..Default::default() };
    let mut optimizer = Sgd::new(parameters(&store), options)?;
    let cosine =
        Distribuuuu { max_epoch: args.epochs, warmup_epochs: args.epochs / 20, ..Default::default() };
    let schedule = LrSchedule::new(lr, LrPolicy::Distribuuuu(cosine))?;

    if rank == 0 {
        println!("            =======  Training  =======\n");
    }

    // 4. train
    let (epochs, steps) = (args.epochs, args.steps_of(train_loader.num_batches()));
    for epoch in 1..=epochs {
        optimizer.set_lr(schedule.lr(At { epoch: (epoch - 1) as f64, ..At::default() }));
        let (mut train_loss, mut acc1) = (MeanLoss::default(), TopK::new(1));
        for (step, batch) in (1..=steps).zip(train_loader.epoch(epoch)) {
            let batch = batch?.to_device(device)?;
            let outputs = net.forward(&batch.images)?;
            let loss = criterion(&outputs, &batch.labels);
            optimizer.zero_grad()?;
            net.backward(&loss)?;
            optimizer.step()?;

            train_loss.add(loss.double_value(&[]), batch.len());
            acc1.update(&outputs, &batch.labels)?;
            if step % 40 == 0 || step == steps {
                let [loss, acc] = reduce_metrics([&train_loss, &acc1], &group)?;
                if rank == 0 {
                    let acc = 100.0 * acc;
                    println!(
                        "   == step: [{step:3}/{steps}] [{epoch}/{epochs}] | loss: {loss:.3} | acc: {acc:6.3}%"
                    );
                }
            }
        }
        let [acc1, acc5] = evaluate(&net, &val_loader, device, &group)?.map(|acc| 100.0 * acc);
        if rank == 0 {
            println!("   == val: [{epoch}/{epochs}] | acc@1: {acc1:6.3}% | acc@5: {acc5:6.3}%");
        }
    }
    Ok(())
}

/// The top-1 and top-5 accuracy, over the images of all ranks.
fn evaluate(
    net: &Ddp<Model>,
    loader: &Loader<Images>,
    device: Device,
    group: &ProcessGroup,
) -> anyhow::Result<[f64; 2]> {
    net.sync_buffers()?;
    let (mut acc1, mut acc5) = (TopK::new(1), TopK::new(5));
    for batch in loader.epoch(0) {
        let batch = batch?.to_device(device)?;
        let outputs = net.evaluate(&batch.images);
        acc1.update(&outputs, &batch.labels)?;
        acc5.update(&outputs, &batch.labels)?;
    }
    Ok(reduce_metrics([&acc1, &acc5], group)?)
}
