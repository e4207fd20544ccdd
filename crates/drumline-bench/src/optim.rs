//! `drumline-bench optim`: steps of an optimizer alone, on the parameters of a GPT with given gradients: time, bytes of
//! state, and memory in use; on a CPU, or as a CUDA graph on a GPU. `bench/optim.py` is PyTorch's side.

use std::hint::black_box;
use std::time::Instant;

use clap::{Args, ValueEnum};
use drumline::optim::{
    Adafactor, AdafactorOptions, AdamOptions, AdamW, Lamb, LambOptions, Lion, LionOptions, MasterKind,
    MasterWeights, Moments, Named, Optimizer, OptimizerState, ParameterGroups, Sgd, SgdOptions, parameters,
    weights_in,
};
use drumline_torch::cuda::{self, Graph, Pool, Priority, Stream};
use drumline_torch::{TorchError, set_grad};
use drumline_zoo::formula::fill;
use drumline_zoo::models::gpt::Gpt;
use serde_json::json;
use tch::nn::VarStore;
use tch::{Device, Kind, no_grad};

use super::shard::{Size, pss};

const WARM_UP: usize = 2;

/// What is timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Which {
    /// A loop that reads as many bytes as AdamW in f32, and writes as many.
    Copy,
    Sgd,
    Adamw,
    AdamwBf16,
    Adamw8bit,
    Lion,
    Lamb,
    Adafactor,
}

/// Weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Weights {
    /// In f32.
    F32,
    /// In bf16, with f32 copies.
    Copy,
    /// In bf16, with what they lack of f32.
    Split,
}

/// Time steps of an optimizer
#[derive(Debug, Args)]
pub(super) struct OptimArgs {
    /// The optimizer
    #[arg(long)]
    which: Which,
    /// The weights
    #[arg(long, default_value = "f32")]
    weights: Weights,
    /// How large the model is
    #[arg(long, default_value = "gpt2")]
    size: Size,
    /// Timed steps
    #[arg(long, default_value_t = 10)]
    steps: usize,
    /// Threads
    #[arg(long, default_value_t = 2)]
    threads: i32,
    /// On the first GPU, and there as a CUDA graph
    #[arg(long)]
    gpu: bool,
}

/// Where the steps are made.
#[derive(Debug, Clone, Copy)]
enum Place {
    Host,
    Gpu,
}

impl Place {
    fn of(args: &OptimArgs) -> anyhow::Result<Self> {
        if args.gpu {
            cuda::open()?;
            return Ok(Self::Gpu);
        }
        Ok(Self::Host)
    }

    fn device(self) -> Device {
        match self {
            Self::Host => Device::Cpu,
            Self::Gpu => Device::Cuda(0),
        }
    }

    /// The bytes in use.
    fn memory(self) -> anyhow::Result<f64> {
        match self {
            Self::Host => Ok(pss()?),
            Self::Gpu => Ok(cuda::memory(0)?.allocated as f64),
        }
    }

    /// Waits for steps that were started.
    fn settle(self) -> Result<(), TorchError> {
        match self {
            Self::Host => Ok(()),
            Self::Gpu => cuda::synchronize(0),
        }
    }
}

/// Makes steps, and prints one JSON line.
pub(super) fn run(args: &OptimArgs) -> anyhow::Result<()> {
    tch::set_num_threads(args.threads);
    let place = Place::of(args)?;
    let store = VarStore::new(place.device());
    let _model = Gpt::new(&store.root(), &args.size.options())?;
    fill(&store);
    if args.weights != Weights::F32 {
        weights_in(&parameters(&store), Kind::BFloat16)?;
    }
    let all = parameters(&store);
    let num: usize = all.iter().map(|named| named.tensor.numel()).sum();
    if args.which == Which::Copy {
        return time_copy(args, num);
    }
    for Named { tensor, .. } in &all {
        let grad = no_grad(|| (tensor * 1e-3).sin());
        set_grad(tensor, Some(&grad.to_kind(tensor.kind())))?;
    }
    let before = place.memory()?;
    let mut optimizer = make(args, all)?;
    let times = match place {
        Place::Host => time(args, place, || optimizer.step())?,
        Place::Gpu => time_graph(args, place, optimizer.as_mut())?,
    };
    let used = place.memory()? - before;
    let (step, num) = (times[times.len() / 2], num as f64);
    let state = optimizer.state();
    println!(
        "{}",
        json!({
            "which": format!("{:?}", args.which),
            "weights": format!("{:?}", args.weights),
            "device": format!("{:?}", place.device()),
            "parameters": num,
            "state_bytes_per_parameter": state_bytes(&state, args.weights) / num,
            "used_bytes_per_parameter": used / num,
            "step_ms": step * 1e3,
            "parameters_per_s": num / step,
        })
    );
    Ok(())
}

/// The seconds of each step, sorted, without the first ones.
fn time(
    args: &OptimArgs,
    place: Place,
    mut step: impl FnMut() -> Result<(), TorchError>,
) -> Result<Vec<f64>, TorchError> {
    let mut times = Vec::new();
    for _ in 0..WARM_UP + args.steps {
        let began = Instant::now();
        step()?;
        place.settle()?;
        times.push(began.elapsed().as_secs_f64());
    }
    times.drain(..WARM_UP);
    times.sort_by(f64::total_cmp);
    Ok(times)
}

/// The same for a step as a CUDA graph, after an eager one that makes the state.
fn time_graph(args: &OptimArgs, place: Place, optimizer: &mut dyn Optimizer) -> Result<Vec<f64>, TorchError> {
    let stream = Stream::new(0, Priority::Normal)?;
    let _scope = stream.enter()?;
    optimizer.keep_lr_on_device()?;
    optimizer.step()?;
    optimizer.refresh_master_weights()?;
    let (graph, ()) = Graph::record(Pool::new()?, || optimizer.step())?;
    time(args, place, || graph.launch())
}

/// Bytes of the state that the optimizer holds. A split master weight is saved in f32, and takes 2 bytes in memory.
fn state_bytes(state: &OptimizerState, weights: Weights) -> f64 {
    let bytes = |Named { name, tensor }: &Named| {
        let each = tensor.kind().elt_size_in_bytes();
        let is_half = weights == Weights::Split && name.ends_with(".master");
        tensor.numel() * if is_half { each / 2 } else { each }
    };
    state.tensors.iter().map(bytes).sum::<usize>() as f64
}

fn make(args: &OptimArgs, all: Vec<Named>) -> Result<Box<dyn Optimizer>, TorchError> {
    let adamw = |moments| {
        let options = AdamOptions { lr: 1e-4, moments, ..AdamOptions::default() };
        with_masters(args.weights, all.clone(), move |all| AdamW::new(all, options))
    };
    match args.which {
        Which::Sgd => {
            let options = SgdOptions { momentum: 0.9, ..SgdOptions::default() };
            with_masters(args.weights, all, |all| Sgd::new(all, options))
        }
        Which::Copy | Which::Adamw => adamw(Moments::F32),
        Which::AdamwBf16 => adamw(Moments::Bf16 { seed: 0 }),
        Which::Adamw8bit => adamw(Moments::EightBit),
        Which::Lion => with_masters(args.weights, all, |all| Lion::new(all, LionOptions::default())),
        Which::Lamb => with_masters(args.weights, all, |all| Lamb::new(all, LambOptions::default())),
        Which::Adafactor => {
            with_masters(args.weights, all, |all| Adafactor::new(all, AdafactorOptions::default()))
        }
    }
}

fn with_masters<O: Optimizer + 'static>(
    weights: Weights,
    all: Vec<Named>,
    make: impl FnOnce(ParameterGroups) -> Result<O, TorchError>,
) -> Result<Box<dyn Optimizer>, TorchError> {
    Ok(match weights {
        Weights::F32 => Box::new(make(all.into())?),
        Weights::Copy => Box::new(MasterWeights::new(all, make)?),
        Weights::Split => Box::new(MasterWeights::with_kind(MasterKind::Split, all, make)?),
    })
}

/// Four arrays of which three are also written, as AdamW's weights, moments and gradients in f32.
fn time_copy(args: &OptimArgs, num: usize) -> anyhow::Result<()> {
    let (threads, mut times) = (args.threads.max(1) as usize, Vec::new());
    let [mut a, mut b, mut c, d] = [(); 4].map(|()| vec![1f32; num]);
    let each = num.div_ceil(threads);
    for _ in 0..WARM_UP + args.steps {
        let began = Instant::now();
        std::thread::scope(|scope| {
            let parts =
                a.chunks_mut(each).zip(b.chunks_mut(each)).zip(c.chunks_mut(each)).zip(d.chunks(each));
            for (((a, b), c), d) in parts {
                scope.spawn(move || {
                    for (((a, b), c), d) in a.iter_mut().zip(b).zip(c).zip(d) {
                        (*a, *b, *c) = (*a + d, *b + d, *c + d);
                    }
                });
            }
        });
        times.push(began.elapsed().as_secs_f64());
    }
    black_box((&a, &b, &c, &d));
    times.drain(..WARM_UP);
    times.sort_by(f64::total_cmp);
    let step = times[times.len() / 2];
    let line = json!({
        "which": "Copy",
        "step_ms": step * 1e3,
        "parameters_per_s": num as f64 / step,
        "bytes_per_s": 28.0 * num as f64 / step,
    });
    println!("{line}");
    Ok(())
}
