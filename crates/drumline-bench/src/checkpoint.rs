//! `drumline-bench checkpoint`: forward and backward of a GPT with activation checkpointing, which
//! `bench/checkpointing/run.py` compares with PyTorch's. Weights and tokens are formulas, so that losses can be compared.

use std::time::Instant;

use clap::{Args, ValueEnum};
use drumline::optim::parameters;
use drumline::trainer::Mode;
use drumline_torch::{SavedSize, flush_denormals, keep_freed_memory, saved_size, set_grad};
use serde_json::json;
use tch::Device;
use tch::nn::VarStore;

use crate::shard::Size;
use drumline_zoo::formula::{fill, tokens};
use drumline_zoo::models::Checkpointing;
use drumline_zoo::models::gpt::{Gpt, GptOptions};

const WARM_UP: usize = 2;

/// What is kept of blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum How {
    None,
    Full,
    Selective,
    /// Every second block is computed again.
    Second,
}

impl How {
    pub(super) fn checkpointing(self) -> Checkpointing {
        match self {
            Self::None => Checkpointing::None,
            Self::Full => Checkpointing::Full,
            Self::Selective => Checkpointing::Selective,
            Self::Second => Checkpointing::Every(2),
        }
    }
}

/// Time forward and backward of a GPT with activation checkpointing
#[derive(Debug, Args)]
pub(super) struct CheckpointArgs {
    /// What is kept of blocks for backward
    #[arg(long)]
    how: How,
    /// How large the model is
    #[arg(long)]
    size: Size,
    /// Texts of a batch
    #[arg(long)]
    batch: i64,
    /// Tokens of a text
    #[arg(long)]
    places: i64,
    /// Timed steps
    #[arg(long)]
    steps: usize,
    /// Threads
    #[arg(long, default_value_t = 1)]
    threads: i32,
}

/// Prints one JSON line.
pub(super) fn run(args: &CheckpointArgs) -> anyhow::Result<()> {
    flush_denormals(true)?;
    keep_freed_memory();
    tch::set_num_threads(args.threads);
    let store = VarStore::new(Device::Cpu);
    let options = GptOptions { checkpoint: args.how.checkpointing(), ..args.size.options() };
    let model = Gpt::new(&store.root(), &options)?;
    fill(&store);
    let (inputs, targets) = tokens(args.batch, args.places, options.vocab_size);
    let (mut times, mut losses) = (Vec::new(), Vec::new());
    let mut size = SavedSize::default();
    for step in 0..WARM_UP + args.steps {
        let began = Instant::now();
        let forward = || model.loss(&inputs, &targets, Mode::Train).map_err(anyhow::Error::from_boxed);
        // The first step counts what it saves, and is not timed.
        let sum = if step == 0 {
            let (sum, counted) = saved_size(forward)?;
            size = counted;
            sum?
        } else {
            forward()?
        };
        let loss = sum / (args.batch * args.places) as f64;
        loss.f_backward()?;
        times.push(began.elapsed().as_secs_f64() * 1e3);
        losses.push(loss.double_value(&[]));
        parameters(&store).iter().try_for_each(|named| set_grad(&named.tensor, None))?;
    }
    times.drain(..WARM_UP);
    times.sort_by(f64::total_cmp);
    println!("{}", json!({ "step_ms": times[times.len() / 2], "saved_bytes": size.bytes, "losses": losses }));
    Ok(())
}
