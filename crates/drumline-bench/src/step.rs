//! `drumline-bench step`: the steps that `cargo xtask bench ddp` times. Weights and images are formulas, so that losses
//! can be compared.

use std::time::Instant;

use anyhow::Context;
use clap::{Args, ValueEnum};
use drumline::engine::SyncGroup;
use drumline::optim::{Optimizer, Sgd, SgdOptions, parameters};
use drumline::{Ddp, DdpOptions, ProcessGroup, ReduceOp};
use drumline_observe::status::Memory;
use drumline_torch::{allow_tf32, cuda, flush_denormals, keep_freed_memory};
use serde_json::json;
use tch::nn::{ModuleT, VarStore};
use tch::{Device, Kind, Tensor};

use drumline_zoo::formula::{Samples, fill, samples};
use drumline_zoo::models::{self, Model, ModelOptions, Norm};

const WARM_UP: usize = 5;
const EDGE: i64 = 32;
const NUM_CLASSES: i64 = 10;

/// How ranks work together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Mode {
    /// Gradients are averaged.
    Ddp,
    /// Each rank trains a model of its own.
    Independent,
    /// One process, no group.
    Alone,
}

/// Time steps of ResNet-18
#[derive(Debug, Args)]
pub(super) struct StepArgs {
    /// How ranks work together
    #[arg(long)]
    mode: Mode,
    /// Images of a rank's batch
    #[arg(long)]
    batch: i64,
    /// Timed steps
    #[arg(long)]
    steps: usize,
    /// Learning rate
    #[arg(long, default_value_t = 0.01)]
    lr: f64,
    /// On the rank's GPU, in f32 without TF32
    #[arg(long)]
    gpu: bool,
    /// In f64: in f32, rounding makes the losses of so deep a network differ after a few steps
    #[arg(long)]
    double: bool,
    /// Batch norms over the batches of all ranks, so that losses are those of one rank with all of them
    #[arg(long)]
    sync_norm: bool,
}

/// Trains, and rank 0 prints one JSON line.
pub(super) fn run(args: &StepArgs) -> anyhow::Result<()> {
    keep_freed_memory();
    flush_denormals(true)?;
    tch::set_num_threads(1);
    let group = (args.mode != Mode::Alone).then(ProcessGroup::from_env).transpose()?;
    let device = device(args, group.as_ref())?;
    let mut store = VarStore::new(device);
    let sync_group = group.as_ref().filter(|_| args.sync_norm).map(SyncGroup::new).transpose()?;
    let norm = sync_group.clone().map_or(Norm::Batch, Norm::Sync);
    let options = ModelOptions { num_classes: NUM_CLASSES, norm, ..Default::default() };
    let net = models::build("resnet18", &store.root(), &options)?;
    fill(&store);
    if args.double {
        store.double();
    }
    let backward = match &group {
        Some(group) if args.mode == Mode::Ddp => {
            let options = DdpOptions { sync_group, ..DdpOptions::default() };
            Backward::Ddp(Box::new(Ddp::new(net, &store, group, options)?))
        }
        _ => Backward::Plain(net),
    };
    let sgd = SgdOptions {
        lr: args.lr,
        momentum: 0.9,
        weight_decay: 5e-5,
        nesterov: true,
        ..SgdOptions::default()
    };
    let (times, losses) = train(args, group.as_ref(), &backward, Sgd::new(parameters(&store), sgd)?)?;
    let (rank, world) = place(group.as_ref());
    let step_ms = times[times.len() / 2];
    let images_per_s = (world * args.batch) as f64 / step_ms * 1e3;
    let peak_bytes = Memory::of_this_process().context("cannot read /proc/self/status")?.peak;
    let line =
        json!({"step_ms": step_ms, "images_per_s": images_per_s, "losses": losses, "peak_bytes": peak_bytes});
    if rank == 0 {
        println!("{line}");
    }
    Ok(())
}

fn device(args: &StepArgs, group: Option<&ProcessGroup>) -> anyhow::Result<Device> {
    if !args.gpu {
        return Ok(Device::Cpu);
    }
    let device = drumline::torch::gpu(group.map_or(0, ProcessGroup::local_rank))?;
    allow_tf32(false)?;
    Ok(device)
}

/// The model, and how its loss becomes gradients.
enum Backward {
    Ddp(Box<Ddp<Model>>),
    Plain(Model),
}

impl Backward {
    fn run(&self, images: &Tensor, labels: &Tensor) -> anyhow::Result<f64> {
        let loss = match self {
            Self::Ddp(ddp) => ddp.forward(images)?.cross_entropy_for_logits(labels),
            Self::Plain(net) => net.forward_t(images, true).cross_entropy_for_logits(labels),
        };
        match self {
            Self::Ddp(ddp) => ddp.backward(&loss)?,
            Self::Plain(_) => loss.f_backward()?,
        }
        Ok(loss.double_value(&[]))
    }
}

fn place(group: Option<&ProcessGroup>) -> (i64, i64) {
    group.map_or((0, 1), |group| (group.rank() as i64, group.size() as i64))
}

/// The slowest rank's time of each timed step, sorted, and the mean loss of all steps.
fn train(
    args: &StepArgs,
    group: Option<&ProcessGroup>,
    backward: &Backward,
    mut optimizer: Sgd,
) -> anyhow::Result<(Vec<f64>, Vec<f64>)> {
    let first = optimizer.parameters().first().map(|first| (first.tensor.device(), first.tensor.kind()));
    let (device, kind) = first.unwrap_or((Device::Cpu, Kind::Float));
    let ((rank, world), mut times, mut losses) = (place(group), Vec::new(), Vec::new());
    for step in 0..WARM_UP + args.steps {
        let first = (step as i64 * world + rank) * args.batch;
        let (images, labels) = samples(Samples { first, count: args.batch, edge: EDGE });
        let (images, labels) = (images.to_device(device).to_kind(kind), labels.to_device(device));
        group.map_or(Ok(()), ProcessGroup::barrier)?;
        let began = Instant::now();
        optimizer.zero_grad()?;
        losses.push(backward.run(&images, &labels)?);
        optimizer.step()?;
        if let Device::Cuda(index) = device {
            cuda::synchronize(index)?;
        }
        times.push(began.elapsed().as_secs_f64() * 1e3);
    }
    times.drain(..WARM_UP);
    if let Some(group) = group {
        group.all_reduce(&mut losses, ReduceOp::Avg)?;
        group.all_reduce(&mut times, ReduceOp::Max)?;
    }
    times.sort_by(f64::total_cmp);
    Ok((times, losses))
}
