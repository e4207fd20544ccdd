//! `drumline-bench adam`: steps of AdamW on one large tensor, ours and others, which `cargo xtask bench memory` compares.
//!
//! The bare loop reads and writes the same numbers, and computes almost nothing: no optimizer is faster than memory.

use std::time::Instant;

use clap::{Args, ValueEnum};
use drumline::comm::bf16;
use drumline_torch::{
    AdamSlices, AdamStep, FusedAdam, GradSlices, Lr, MomentSlices, StepTensors, WeightDecay, WeightSlices,
    flush_denormals, keep_freed_memory, tensor_from_vec,
};
use serde_json::json;
use tch::Tensor;

const WARM_UP: usize = 2;
const STEPS: usize = 8;
const LR: f64 = 1e-4;
const BETAS: (f64, f64) = (0.9, 0.999);
const EPS: f64 = 1e-8;
const WEIGHT_DECAY: f64 = 0.01;

/// Who steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Who {
    /// A loop that reads and writes the same numbers.
    Loop,
    /// libtorch's `_fused_adamw_`, as PyTorch has it.
    Torch,
    /// Our kernel.
    Ours,
    /// Our kernel with gradients in bf16, which also writes weights in bf16.
    OursBf16,
}

/// Time steps of AdamW on one large tensor
#[derive(Debug, Args)]
pub(super) struct AdamArgs {
    /// Who steps
    #[arg(long)]
    who: Who,
    /// Threads
    #[arg(long)]
    threads: usize,
    /// Millions of parameters
    #[arg(long)]
    millions: usize,
}

/// The numbers of a training.
struct Numbers {
    weights: Vec<f32>,
    grads: Vec<f32>,
    exp_avg: Vec<f32>,
    exp_avg_sq: Vec<f32>,
    short_grads: Vec<bf16>,
    short_weights: Vec<bf16>,
}

impl Numbers {
    fn new(who: Who, len: usize) -> Self {
        let waves = |factor: f32| (0..len).map(move |index| ((index % 1013) as f32 * factor).sin() * 0.01);
        let short_len = if who == Who::OursBf16 { len } else { 0 };
        let short: Vec<bf16> = waves(0.3).take(short_len).map(bf16::from_f32).collect();
        Self {
            weights: waves(0.7).collect(),
            grads: if who == Who::OursBf16 { Vec::new() } else { waves(0.3).collect() },
            exp_avg: vec![0.0; len],
            exp_avg_sq: vec![0.0; len],
            short_weights: short.clone(),
            short_grads: short,
        }
    }
}

/// Steps, and prints one JSON line.
pub(super) fn run(args: &AdamArgs) -> anyhow::Result<()> {
    flush_denormals(true)?;
    keep_freed_memory();
    tch::set_num_threads(args.threads as i32);
    let len = args.millions * 1_000_000;
    let mut numbers = Numbers::new(args.who, len);
    let mut step: Box<dyn FnMut(u64) -> anyhow::Result<()>> = match args.who {
        Who::Torch => libtorch(numbers)?,
        who => Box::new(move |step| {
            on_threads(who, &mut numbers, args.threads, step);
            Ok(())
        }),
    };
    let mut times = Vec::new();
    for number in 1..=(WARM_UP + STEPS) as u64 {
        let begin = Instant::now();
        step(number)?;
        times.push(begin.elapsed().as_secs_f64() * 1e3);
    }
    times.drain(..WARM_UP);
    times.sort_by(f64::total_cmp);
    println!("{}", json!({"optimizer_ms": times[STEPS / 2], "parameters": len}));
    Ok(())
}

/// The bytes that the bare loop reads and writes in a second.
pub(super) fn bandwidth(threads: usize, millions: usize) -> anyhow::Result<f64> {
    let len = millions * 1_000_000;
    let mut numbers = Numbers::new(Who::Loop, len);
    let mut fastest = f64::INFINITY;
    for number in 1..=(WARM_UP + STEPS) as u64 {
        let begin = Instant::now();
        on_threads(Who::Loop, &mut numbers, threads, number);
        fastest = fastest.min(begin.elapsed().as_secs_f64());
    }
    // Four numbers are read, and three of them written.
    Ok((len * 7 * size_of::<f32>()) as f64 / fastest)
}

/// A step of libtorch's kernel, as PyTorch's `AdamW(fused=True)` makes it.
fn libtorch(numbers: Numbers) -> anyhow::Result<Box<dyn FnMut(u64) -> anyhow::Result<()>>> {
    let Numbers { weights, grads, exp_avg, exp_avg_sq, .. } = numbers;
    let len = weights.len() as i64;
    let [params, grads, exp_avg, exp_avg_sq] =
        [weights, grads, exp_avg, exp_avg_sq].map(|numbers| tensor_from_vec(numbers, &[len]));
    let (params, grads, exp_avg, exp_avg_sq) = (params?, grads?, exp_avg?, exp_avg_sq?);
    let steps = Tensor::from(0f32);
    Ok(Box::new(move |_| {
        let fused = FusedAdam {
            params: &[&params],
            grads: &[&grads],
            exp_avgs: &[&exp_avg],
            exp_avg_sqs: &[&exp_avg_sq],
            max_exp_avg_sqs: None,
            steps: &[&steps],
            lr: Lr::Value(LR),
            betas: BETAS,
            eps: EPS,
            weight_decay: WEIGHT_DECAY,
            decay: WeightDecay::Decoupled,
            maximize: false,
            tensors: StepTensors::default(),
        };
        Ok(fused.run()?)
    }))
}

/// A step on several threads, each with a part of the numbers.
fn on_threads(who: Who, numbers: &mut Numbers, threads: usize, step: u64) {
    let each = numbers.weights.len().div_ceil(threads);
    let with = AdamStep {
        lr: LR,
        betas: BETAS,
        eps: EPS,
        weight_decay: WEIGHT_DECAY,
        decay: WeightDecay::Decoupled,
        step,
        grad_factor: 1.0,
    };
    let Numbers { weights, grads, exp_avg, exp_avg_sq, short_grads, short_weights } = numbers;
    let (grads, short_grads) = (&*grads, &*short_grads);
    std::thread::scope(|scope| {
        let mut short = short_weights.chunks_mut(each);
        let parts = weights.chunks_mut(each).zip(exp_avg.chunks_mut(each)).zip(exp_avg_sq.chunks_mut(each));
        for (part, ((weights, exp_avg), exp_avg_sq)) in parts.enumerate() {
            let range = part * each..part * each + weights.len();
            let rounded = short.next();
            scope.spawn(move || match who {
                Who::Ours | Who::OursBf16 => {
                    let (weights, grads) = match rounded {
                        Some(rounded) => (
                            WeightSlices::Rounded { master: weights, rounded },
                            GradSlices::Bf16(&short_grads[range]),
                        ),
                        None => (WeightSlices::F32(weights), GradSlices::F32(&grads[range])),
                    };
                    let moments = MomentSlices::F32 { exp_avg, exp_avg_sq };
                    AdamSlices { weights, grads, moments }.step(&with).expect("slices of one length");
                }
                _ => stream(weights, &grads[range], exp_avg, exp_avg_sq),
            });
        }
    });
}

/// Reads four numbers and writes three of them for each parameter, as Adam does.
fn stream(weights: &mut [f32], grads: &[f32], exp_avg: &mut [f32], exp_avg_sq: &mut [f32]) {
    let numbers = weights.iter_mut().zip(grads).zip(exp_avg.iter_mut().zip(exp_avg_sq));
    for ((weight, grad), (avg, sq)) in numbers {
        *avg += grad;
        *sq += grad;
        *weight -= grad;
    }
}
