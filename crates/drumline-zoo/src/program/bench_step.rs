//! `drumline-train bench-step`: the steps that `cargo xtask bench ddp` times. Weights and images are formulas, so that losses
//! can be compared.

use std::time::Instant;

use anyhow::Context;
use clap::{Args, ValueEnum};
use drumline::{Ddp, DdpOptions, Optimizer, ProcessGroup, ReduceOp, Sgd, SgdOptions, parameters};
use drumline_observe::status::Memory;
use drumline_torch::{flush_denormals, keep_freed_memory};
use serde_json::json;
use tch::nn::{ModuleT, VarStore};
use tch::{Device, Tensor};

use crate::formula::{Samples, fill, samples};
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
    fill(&store);
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
    let peak_bytes = Memory::of_this_process().context("cannot read /proc/self/status")?.peak;
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
        let first = (step as i64 * world + rank) * args.batch;
        let (images, labels) = samples(Samples { first, count: args.batch, edge: EDGE });
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
