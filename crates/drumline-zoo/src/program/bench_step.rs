//! `drumline-train bench-step`: the steps that `cargo xtask bench ddp` times. Weights and images are formulas, the same as in
//! `bench/peers/resnet18.py`, so that losses can be compared.

use std::time::Instant;

use anyhow::Context;
use clap::{Args, ValueEnum};
use drumline::{Ddp, DdpOptions, Named, Optimizer, ProcessGroup, ReduceOp, Sgd, SgdOptions, parameters};
use drumline_torch::{flush_denormals, keep_freed_memory};
use serde_json::json;
use tch::nn::{ModuleT, VarStore};
use tch::{Device, Kind, Tensor};

use crate::models::{self, Model, ModelOptions};

const WARM_UP: usize = 5;
const EDGE: i64 = 32;
const NUM_CLASSES: i64 = 10;

/// How ranks work together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Mode {
    /// Gradients are averaged.
    Ddp,
    /// Each trains a model of its own.
    Independent,
    /// One process, no group.
    Alone,
}

/// Time steps of ResNet-18
#[derive(Debug, Args)]
pub(super) struct BenchStepArgs {
    /// How ranks work together
    #[arg(long)]
    mode: Mode,
    /// Images of a rank's batch
    #[arg(long)]
    batch: i64,
    /// Timed steps
    #[arg(long)]
    steps: usize,
}

/// Trains, and rank 0 prints one JSON line.
pub(super) fn run(args: &BenchStepArgs) -> anyhow::Result<()> {
    keep_freed_memory();
    flush_denormals(true)?;
    tch::set_num_threads(1);
    let group = (args.mode != Mode::Alone).then(ProcessGroup::from_env).transpose()?;
    let store = VarStore::new(Device::Cpu);
    let options = ModelOptions { num_classes: NUM_CLASSES, ..ModelOptions::default() };
    let net = models::build("resnet18", &store.root(), &options)?;
    fill(&parameters(&store));
    let backward = match &group {
        Some(group) if args.mode == Mode::Ddp => {
            Backward::Ddp(Box::new(Ddp::new(net, &store, group, DdpOptions::default())?))
        }
        _ => Backward::Plain(net),
    };
    let sgd =
        SgdOptions { lr: 0.01, momentum: 0.9, weight_decay: 5e-5, nesterov: true, ..SgdOptions::default() };
    let (times, losses) = train(args, group.as_ref(), &backward, Sgd::new(parameters(&store), sgd)?)?;
    let (rank, world) = place(group.as_ref());
    let step_ms = times[times.len() / 2];
    let images_per_s = (world * args.batch) as f64 / step_ms * 1e3;
    let peak_bytes = peak_bytes()?;
    let line =
        json!({"step_ms": step_ms, "images_per_s": images_per_s, "losses": losses, "peak_bytes": peak_bytes});
    if rank == 0 {
        println!("{line}");
    }
    Ok(())
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
    args: &BenchStepArgs,
    group: Option<&ProcessGroup>,
    backward: &Backward,
    mut optimizer: Sgd,
) -> anyhow::Result<(Vec<f64>, Vec<f64>)> {
    let ((rank, world), mut times, mut losses) = (place(group), Vec::new(), Vec::new());
    for step in 0..WARM_UP + args.steps {
        let (images, labels) = batch(step as i64, rank, world, args.batch);
        group.map_or(Ok(()), ProcessGroup::barrier)?;
        let began = Instant::now();
        optimizer.zero_grad()?;
        losses.push(backward.run(&images, &labels)?);
        optimizer.step()?;
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

/// Weights of convolutions and of the classifier by a formula of their place; norms begin as always, biases at zero.
pub(super) fn fill(parameters: &[Named]) {
    let mut sorted: Vec<&Named> = parameters.iter().collect();
    sorted.sort_by(|a, b| a.name.cmp(&b.name));
    let _no_grad = tch::no_grad_guard();
    for (place, Named { name, tensor }) in sorted.into_iter().enumerate() {
        let mut tensor = tensor.shallow_clone();
        if tensor.dim() < 2 {
            let _ = tensor.fill_(if name.ends_with("weight") { 1.0 } else { 0.0 });
            continue;
        }
        let fan_in = tensor.numel() as i64 / tensor.size()[0];
        let index = Tensor::arange(tensor.numel() as i64, (Kind::Double, Device::Cpu));
        let angle = &index * 0.7 + &index * &index * 1e-5 + place as f64;
        tensor.copy_(&(angle.sin() * (2.0 / fan_in as f64).sqrt()).to_kind(Kind::Float).view_as(&tensor));
    }
}

/// Images and labels of one rank at one step: waves whose direction, length and colour depend on the class.
pub(super) fn batch(step: i64, rank: i64, world: i64, size: i64) -> (Tensor, Tensor) {
    let double = (Kind::Double, Device::Cpu);
    let first = (step * world + rank) * size;
    let sample = Tensor::arange_start(first, first + size, double);
    let labels = (&sample * 7 + (&sample / 3).floor()).remainder(NUM_CLASSES as f64);
    let row = Tensor::arange(EDGE, double);
    let (y, x) = (row.view([1, 1, EDGE, 1]), row.view([1, 1, 1, EDGE]));
    let angle = (&labels * 0.31).view([-1, 1, 1, 1]);
    let colour = Tensor::arange(3, double).view([1, 3, 1, 1]);
    let phase = (&sample * 0.37).view([-1, 1, 1, 1]);
    let along = (x * angle.cos() + y * angle.sin()) * (&angle * 0.1 + 0.5);
    let waves = (along + phase + colour * (&angle + 1)).sin();
    (waves.to_kind(Kind::Float), labels.to_kind(Kind::Int64))
}

/// The most memory this process has had.
fn peak_bytes() -> anyhow::Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status").context("cannot read /proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).context("no VmHWM")?;
    let kibibytes: u64 = line.trim().trim_end_matches("kB").trim().parse()?;
    Ok(kibibytes * 1024)
}
