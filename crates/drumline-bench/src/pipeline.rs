//! `drumline-bench pipeline`: what `cargo xtask bench pipeline` times on our side; `bench/peers/pipeline.py` is the other.
//!
//! ```text
//!   --how pipeline   each rank its stages of a GPT ─▶ steps, beside what the simulator makes of times measured alone
//!   --how alone      one rank that has all stages
//!   --sleep 5ms      stages that sleep instead, with messages of real size
//! ```
//! Weights and tokens are formulas, so that losses can be compared.

mod alone;
mod hop;
mod model;
mod sleep;
mod train;

use std::time::Duration;

use anyhow::Context;
use clap::{Args, ValueEnum};
use drumline::ProcessGroup;
use drumline::engine::pipeline::{Order, Plan, Schedule};
use drumline_plan::pipeline::{Times, verify};
use drumline_rendezvous::worker_env::parse_duration;
use drumline_torch::{flush_denormals, keep_freed_memory};

/// Where the stages are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum How {
    /// On the ranks of the job.
    Pipeline,
    /// All on one rank.
    Alone,
}

/// Time steps of a GPT that is cut by its layers, or of stages that sleep
#[derive(Debug, Args)]
pub(super) struct PipelineArgs {
    /// Where the stages are
    #[arg(long, default_value = "pipeline")]
    how: How,
    /// The order in which ranks do what
    #[arg(long, default_value = "1f1b")]
    schedule: Schedule,
    /// The ranks for which the order is made, for `--how alone`
    #[arg(long, default_value_t = 2)]
    ranks: usize,
    /// Stages of a rank; by default as the schedule has them
    #[arg(long)]
    chunks: Option<usize>,
    /// Micro-batches of a step
    #[arg(long)]
    micro_batches: usize,
    /// Texts of a micro-batch
    #[arg(long, default_value_t = 1)]
    batch: i64,
    /// Tokens of a text
    #[arg(long, default_value_t = 128)]
    places: i64,
    /// Timed steps
    #[arg(long)]
    steps: usize,
    /// Sleep so long for a forward of all stages of a rank, for an input gradient, and for weight gradients
    #[arg(long, value_parser = duration, value_name = "TIME")]
    sleep: Option<Duration>,
}

fn duration(text: &str) -> Result<Duration, &'static str> {
    parse_duration(text).ok_or("not a time; try 5ms")
}

impl PipelineArgs {
    fn order(&self) -> Order {
        let chunks = self.chunks.unwrap_or_else(|| self.schedule.default_chunks());
        Order::Schedule { schedule: self.schedule, chunks }
    }

    /// Bytes of what travels between stages for a micro-batch.
    fn message_bytes(&self) -> usize {
        (self.batch * self.places * model::options().n_embd) as usize * size_of::<f32>()
    }
}

/// Rank 0 prints one JSON line.
pub(super) fn run(args: &PipelineArgs) -> anyhow::Result<()> {
    keep_freed_memory();
    flush_denormals(true)?;
    tch::set_num_threads(1);
    let group = ProcessGroup::from_env()?;
    let line = match args.sleep {
        Some(time) => sleep::run(args, &group, time)?,
        None => train::run(args, &group)?,
    };
    if group.rank() == 0 {
        println!("{line}");
    }
    Ok(())
}

/// How long a step takes on the virtual clock.
fn simulated(plan: &Plan, times: &Times) -> anyhow::Result<f64> {
    let verified = verify(plan.program()).context("a plan is verified")?;
    Ok(verified.simulate(times).makespan)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Cli {
        #[command(flatten)]
        args: PipelineArgs,
    }

    #[test]
    fn what_xtask_passes_is_understood() {
        let words = "x --schedule zbv --micro-batches 32 --steps 3 --sleep 5ms";
        let args = Cli::try_parse_from(words.split(' ')).unwrap().args;
        assert_eq!((args.schedule, args.sleep), (Schedule::ZeroBubbleV, Some(Duration::from_millis(5))));
        assert_eq!(args.message_bytes(), 128 * 384 * 4);
        let words = "x --how alone --schedule 1f1b --micro-batches 8 --batch 2 --places 64 --steps 6";
        let args = Cli::try_parse_from(words.split(' ')).unwrap().args;
        assert_eq!((args.how, args.batch, args.sleep), (How::Alone, 2, None));
        assert!(
            Cli::try_parse_from(["x", "--micro-batches", "1", "--steps", "1", "--sleep", "long"]).is_err()
        );
    }
}
