//! `drumline-train bench-gpu`: the steps that `bench/gpu/run.py` times on a GPU, beside PyTorch's. Weights and images are formulas, so
//! that losses can be compared.

use std::time::Instant;

use clap::{Args, ValueEnum};
use drumline::{Optimizer, ParameterGroups, Sgd, SgdOptions, parameters};
use drumline_torch::cuda::{self, GraphedStep};
use drumline_torch::{Autocast, MasterWeights, TorchError, channels_last, weights_channels_last, weights_in};
use serde_json::json;
use tch::nn::{ModuleT, VarStore};
use tch::{Device, Kind, Tensor};

use crate::formula::{Samples, fill, samples};
use crate::models::{self, Model, ModelOptions};

const WARM_UP: usize = 10;
/// Steps between two looks at the clock.
const CHUNK: usize = 10;

/// How a step is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Mode {
    /// Operation by operation.
    Eager,
    /// As one CUDA graph.
    Graph,
}

/// In which numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Precision {
    Fp32,
    /// Products and convolutions in bfloat16, weights cast where they are used.
    Bf16,
    /// The weights themselves in bfloat16, with copies in f32 that the optimizer steps.
    Bf16Master,
}

/// Time training steps on a GPU
#[derive(Debug, Args)]
pub(super) struct BenchGpuArgs {
    /// resnet18 or resnet50
    #[arg(long)]
    model: String,
    /// How a step is made
    #[arg(long)]
    mode: Mode,
    /// In which numbers
    #[arg(long, default_value = "bf16")]
    precision: Precision,
    /// Images of a batch
    #[arg(long)]
    batch: i64,
    /// Side of an image
    #[arg(long)]
    edge: i64,
    /// Timed steps
    #[arg(long)]
    steps: usize,
}

/// Trains on one batch again and again, and prints one JSON line.
pub(super) fn run(args: &BenchGpuArgs) -> anyhow::Result<()> {
    let began = Instant::now();
    cuda::open()?;
    let opened = began.elapsed().as_secs_f64();
    tch::Cuda::cudnn_set_benchmark(true);
    let device = Device::Cuda(0);
    let mut store = VarStore::new(Device::Cpu);
    let classes = if args.edge > 64 { 1000 } else { 10 };
    let options = ModelOptions { num_classes: classes, ..ModelOptions::default() };
    let net = models::build(&args.model, &store.root(), &options)?;
    fill(&store);
    store.set_device(device);
    weights_channels_last(&parameters(&store))?;
    let (images, labels) = samples(Samples { first: 0, count: args.batch, edge: args.edge });
    let (images, labels) = (channels_last(&images.to_device(device))?, labels.to_device(device));
    let sgd =
        SgdOptions { lr: 0.01, momentum: 0.9, weight_decay: 5e-5, nesterov: true, ..SgdOptions::default() };
    let make = |all: ParameterGroups| Sgd::new(all, sgd);
    let mut optimizer: Box<dyn Optimizer> = match args.precision {
        Precision::Bf16Master => {
            weights_in(&parameters(&store), Kind::BFloat16)?;
            Box::new(MasterWeights::new(parameters(&store), make)?)
        }
        _ => Box::new(make(parameters(&store).into())?),
    };
    let mut graphed = GraphedStep::new(0)?;
    let (mut input, mut target) = (images.copy(), labels.copy());
    let mut first_step = 0.0;
    let mut one = |losses: Option<&mut Vec<f64>>| -> anyhow::Result<()> {
        input.copy_(&images);
        target.copy_(&labels);
        let mut step = || step(args, &net, &mut *optimizer, (&input, &target));
        let loss = match args.mode {
            Mode::Graph => graphed.run(step)?.shallow_clone(),
            Mode::Eager => step()?,
        };
        if let Some(losses) = losses {
            losses.push(loss.double_value(&[]));
            if losses.len() == 1 {
                first_step = began.elapsed().as_secs_f64();
            }
        }
        Ok(())
    };
    let (mut losses, mut times) = (Vec::new(), Vec::new());
    for _ in 0..WARM_UP {
        one(Some(&mut losses))?;
    }
    for _ in 0..args.steps.div_ceil(CHUNK) {
        cuda::synchronize(0)?;
        let began = Instant::now();
        (0..CHUNK).try_for_each(|_| one(None))?;
        cuda::synchronize(0)?;
        times.push(began.elapsed().as_secs_f64() * 1e3 / CHUNK as f64);
    }
    one(Some(&mut losses))?;
    times.sort_by(f64::total_cmp);
    let step_ms = times[times.len() / 2];
    let memory = cuda::memory(0)?;
    println!(
        "{}",
        json!({
            "step_ms": step_ms, "per_s": args.batch as f64 / step_ms * 1e3, "losses": losses, "opened_s": opened,
            "first_step_s": first_step, "peak_bytes": memory.peak_allocated, "reserved_bytes": memory.peak_reserved,
        })
    );
    Ok(())
}

fn step(
    args: &BenchGpuArgs,
    net: &Model,
    optimizer: &mut dyn Optimizer,
    (images, labels): (&Tensor, &Tensor),
) -> Result<Tensor, TorchError> {
    optimizer.zero_grad()?;
    let loss = {
        let _scope = (args.precision != Precision::Fp32)
            .then(|| Autocast::new(Device::Cuda(0), Kind::BFloat16))
            .transpose()?;
        net.forward_t(images, true).cross_entropy_for_logits(labels)
    };
    loss.f_backward()?;
    optimizer.step()?;
    Ok(loss.detach())
}
