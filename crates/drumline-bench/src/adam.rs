//! `drumline-bench adam`: steps of AdamW on one large tensor, ours and others, which `cargo xtask bench memory` compares.
//!
//! The bare loop reads and writes the same numbers, and computes almost nothing: no optimizer is faster than memory. Several
//! contenders take turns in one process, and a round counts only if the bare loop was as fast before as after it: then
//! ratios to it mean something on a machine that does other work as well.

use std::collections::BTreeMap;
use std::time::Instant;

use anyhow::ensure;
use clap::{Args, ValueEnum};
use drumline::comm::bf16;
use drumline_torch::{
    AdamSlices, AdamStep, Codes, Draw, FusedAdam, GradSlices, Lr, MomentSlices, StepTensors, WeightDecay,
    WeightSlices, flush_denormals, keep_freed_memory, tensor_from_vec,
};
use serde_json::json;
use tch::Tensor;

const WARM_UP: usize = 2;
const ROUNDS: usize = 8;
/// Rounds that are tried for each that counts.
const TRIES: usize = 8;
/// By how much the bare loop may differ before and after a round.
const STEADY: f64 = 0.05;
const LR: f64 = 1e-4;
const BETAS: (f64, f64) = (0.9, 0.999);
const EPS: f64 = 1e-8;
const WEIGHT_DECAY: f64 = 0.01;
/// Elements of a row, and of a block of moments in 8 bits.
const ROW: usize = 4096;
const BLOCK: usize = 256;

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
    /// Our kernel with gradients in bf16 and split weights.
    OursSplit,
    /// Our kernel with moments in bf16.
    Bf16Moments,
    /// Our kernel with moments in 8 bits.
    EightBit,
}

impl Who {
    /// The bytes that are read and written for each parameter.
    fn bytes(self) -> f64 {
        match self {
            Self::Loop | Self::Torch | Self::Ours | Self::OursBf16 => 28.0,
            Self::OursSplit => 26.0,
            Self::Bf16Moments => 20.0,
            Self::EightBit => 16.0 + 16.0 / BLOCK as f64,
        }
    }
}

/// Time steps of AdamW on one large tensor
#[derive(Debug, Args)]
pub(super) struct AdamArgs {
    /// Who steps; several take turns, each beside the bare loop
    #[arg(long, required = true, value_delimiter = ',')]
    who: Vec<Who>,
    /// Threads
    #[arg(long)]
    threads: usize,
    /// Millions of parameters
    #[arg(long)]
    millions: usize,
}

/// The numbers of a training, in all kinds.
struct Numbers {
    weights: Vec<f32>,
    grads: Vec<f32>,
    moments: [Vec<f32>; 2],
    short_weights: Vec<bf16>,
    short_grads: Vec<bf16>,
    low: Vec<i16>,
    short_moments: [Vec<bf16>; 2],
    codes: [Vec<u8>; 2],
    absmax: [Vec<f32>; 2],
}

impl Numbers {
    /// Only what the contenders need.
    fn new(who: &[Who], len: usize) -> Self {
        let waves = |factor: f32| (0..len).map(move |index| ((index % 1013) as f32 * factor).sin() * 0.01);
        let len_for = |some: &[Who]| if who.iter().any(|one| some.contains(one)) { len } else { 0 };
        let short = len_for(&[Who::OursBf16, Who::OursSplit]);
        let blocks = len_for(&[Who::EightBit]) / BLOCK;
        Self {
            weights: waves(0.7).collect(),
            grads: waves(0.3).collect(),
            moments: [(); 2].map(|()| vec![0.0; len]),
            short_weights: waves(0.7).take(short).map(bf16::from_f32).collect(),
            short_grads: waves(0.3).take(short).map(bf16::from_f32).collect(),
            low: vec![0; len_for(&[Who::OursSplit])],
            short_moments: [(); 2].map(|()| vec![bf16::ZERO; len_for(&[Who::Bf16Moments])]),
            codes: [127, 0].map(|zero| vec![zero; blocks * BLOCK]),
            absmax: [(); 2].map(|()| vec![0.0; blocks]),
        }
    }

    /// What a contender steps.
    fn slices(&mut self, who: Who, step: u64) -> AdamSlices<'_> {
        let weights = match who {
            Who::OursBf16 => {
                WeightSlices::Rounded { master: &mut self.weights, rounded: &mut self.short_weights }
            }
            Who::OursSplit => WeightSlices::Split { high: &mut self.short_weights, low: &mut self.low },
            _ => WeightSlices::F32(&mut self.weights),
        };
        let grads = match who {
            Who::OursBf16 | Who::OursSplit => GradSlices::Bf16(&self.short_grads),
            _ => GradSlices::F32(&self.grads),
        };
        let moments = match who {
            Who::Bf16Moments => {
                let [exp_avg, exp_avg_sq] = &mut self.short_moments;
                MomentSlices::Bf16 { exp_avg, exp_avg_sq, draw: Draw::new(0, "weight", step, 0) }
            }
            Who::EightBit => {
                let ([avg, sq], [avg_absmax, sq_absmax]) = (&mut self.codes, &mut self.absmax);
                let exp_avg = Codes { codes: avg, absmax: avg_absmax };
                let exp_avg_sq = Codes { codes: sq, absmax: sq_absmax };
                MomentSlices::EightBit { exp_avg, exp_avg_sq, row_len: ROW }
            }
            _ => {
                let [exp_avg, exp_avg_sq] = &mut self.moments;
                MomentSlices::F32 { exp_avg, exp_avg_sq }
            }
        };
        AdamSlices { weights, grads, moments }
    }
}

/// All contenders, ready for steps.
struct Contest {
    numbers: Numbers,
    threads: usize,
    torch: Option<Torch>,
}

/// Times the contenders, and prints one JSON line for each.
pub(super) fn run(args: &AdamArgs) -> anyhow::Result<()> {
    flush_denormals(true)?;
    keep_freed_memory();
    tch::set_num_threads(args.threads as i32);
    // Whole rows for each thread.
    let len = (args.millions * 1_000_000).next_multiple_of(ROW * args.threads);
    let torch = args.who.contains(&Who::Torch).then(|| Torch::new(len)).transpose()?;
    let mut contest = Contest { numbers: Numbers::new(&args.who, len), threads: args.threads, torch };
    let mut times: BTreeMap<usize, Vec<Turn>> = BTreeMap::new();
    let (mut step, mut before) = (0, contest.time(Who::Loop, 1)?);
    for _ in 0..(WARM_UP + ROUNDS) * TRIES {
        for (index, who) in args.who.iter().enumerate() {
            step += 1;
            let own = contest.time(*who, step)?;
            let after = contest.time(Who::Loop, step)?;
            let bare = (before + after) / 2.0;
            if (before - after).abs() < STEADY * bare && step as usize > WARM_UP * args.who.len() {
                times.entry(index).or_default().push(Turn { own, bare });
            }
            before = after;
        }
        if times.len() == args.who.len() && times.values().all(|turns| turns.len() >= ROUNDS) {
            break;
        }
    }
    for (index, who) in args.who.iter().enumerate() {
        let turns = times.remove(&index).unwrap_or_default();
        ensure!(!turns.is_empty(), "the bare loop never took the same time twice; try a quieter machine");
        print(*who, len, &turns);
    }
    Ok(())
}

/// A step, and the bare loop beside it, in milliseconds.
struct Turn {
    own: f64,
    bare: f64,
}

fn print(who: Who, len: usize, turns: &[Turn]) {
    let own = median(turns.iter().map(|turn| turn.own));
    let line = json!({
        "who": who.to_possible_value().map(|value| value.get_name().to_owned()),
        "optimizer_ms": own,
        "parameters": len,
        "bytes_per_s": who.bytes() * len as f64 / own * 1e3,
        "of_loop": median(turns.iter().map(|turn| turn.bare / turn.own)) * who.bytes() / Who::Loop.bytes(),
        "rounds": turns.len(),
    });
    println!("{line}");
}

fn median(numbers: impl Iterator<Item = f64>) -> f64 {
    let mut numbers: Vec<_> = numbers.collect();
    numbers.sort_by(f64::total_cmp);
    numbers[numbers.len() / 2]
}

impl Contest {
    /// The milliseconds of a step.
    fn time(&mut self, who: Who, step: u64) -> anyhow::Result<f64> {
        let begin = Instant::now();
        match (who, &self.torch) {
            (Who::Torch, Some(torch)) => torch.step()?,
            _ => on_threads(self.numbers.slices(who, step), who, self.threads, step),
        }
        Ok(begin.elapsed().as_secs_f64() * 1e3)
    }
}

/// The tensors of libtorch's kernel.
struct Torch {
    params: Tensor,
    grads: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    steps: Tensor,
}

impl Torch {
    fn new(len: usize) -> anyhow::Result<Self> {
        let Numbers { weights, grads, moments: [exp_avg, exp_avg_sq], .. } = Numbers::new(&[], len);
        let [params, grads, exp_avg, exp_avg_sq] =
            [weights, grads, exp_avg, exp_avg_sq].map(|numbers| tensor_from_vec(numbers, &[len as i64]));
        let (params, grads, exp_avg, exp_avg_sq) = (params?, grads?, exp_avg?, exp_avg_sq?);
        Ok(Self { params, grads, exp_avg, exp_avg_sq, steps: Tensor::from(0f32) })
    }

    /// A step of libtorch's kernel, as PyTorch's `AdamW(fused=True)` makes it.
    fn step(&self) -> anyhow::Result<()> {
        let fused = FusedAdam {
            params: &[&self.params],
            grads: &[&self.grads],
            exp_avgs: &[&self.exp_avg],
            exp_avg_sqs: &[&self.exp_avg_sq],
            max_exp_avg_sqs: None,
            steps: &[&self.steps],
            lr: Lr::Value(LR),
            betas: BETAS,
            eps: EPS,
            weight_decay: WEIGHT_DECAY,
            decay: WeightDecay::Decoupled,
            maximize: false,
            tensors: StepTensors::default(),
        };
        Ok(fused.run()?)
    }
}

/// A step on several threads, each with a part of the numbers.
fn on_threads(mut rest: AdamSlices<'_>, who: Who, threads: usize, step: u64) {
    let each = rest.len() / threads;
    let with = AdamStep {
        lr: LR,
        betas: BETAS,
        eps: EPS,
        weight_decay: WEIGHT_DECAY,
        decay: WeightDecay::Decoupled,
        step,
        grad_factor: 1.0,
    };
    std::thread::scope(|scope| {
        while !rest.is_empty() {
            let (mut own, others) = rest.split_at(each);
            rest = others;
            scope.spawn(move || match own {
                AdamSlices {
                    weights: WeightSlices::F32(weights),
                    grads: GradSlices::F32(grads),
                    moments: MomentSlices::F32 { exp_avg, exp_avg_sq },
                } if who == Who::Loop => stream(weights, grads, exp_avg, exp_avg_sq),
                _ => own.step(&with).expect("slices of one length"),
            });
        }
    });
}

/// Reads four numbers and writes three of them for each parameter, as Adam does.
fn stream(weights: &mut [f32], grads: &[f32], exp_avg: &mut [f32], exp_avg_sq: &mut [f32]) {
    let numbers = weights.iter_mut().zip(grads).zip(exp_avg.iter_mut().zip(exp_avg_sq));
    for ((weight, grad), (avg, sq)) in numbers {
        *avg += grad * 1e-30;
        *sq += grad * 1e-30;
        *weight -= grad * 1e-30;
    }
}
