//! `drumline bench OP`: how fast a collective is on this machine, with every result checked.
//!
//! ```text
//!   drumline bench ─┬─ no job around it ─▶ starts ranks of itself (ranks.rs) ─┐
//!                   └─ is a rank of a job ◀──────────────────────────────────-┘
//!                        └▶ worker.rs: join, bind, measure each size (turns.rs) ─▶ rank 0: table or JSON on stdout
//! ```
//! Not here: comparisons with other libraries (`cargo xtask bench`).

mod binding;
mod buffers;
mod op;
mod progress;
mod ranks;
mod row;
mod sizes;
mod table;
mod turns;
mod values;
mod worker;

use std::time::Duration;

use drumline_comm::{DType, Transport};
use drumline_launch::parse_seconds;
use drumline_rendezvous::worker_env;

use crate::errors::{Mistake, print_line};
use crate::job::{is_later_rank, rank_variable};
use buffers::Memory;
use op::Op;
use sizes::ByteSize;

const DEFAULT_RANKS: usize = 2;
const MOST_RANKS: usize = 65_535;
const LONGEST: Duration = Duration::from_secs(24 * 3600);

const EXAMPLES: &str = "\
Examples:
  drumline bench all-reduce                            2 ranks, 16 B to 64 MiB
  drumline bench all-reduce --memory heap --sizes 1M   no copies
  drumline bench broadcast --nproc-per-node 4 --sizes 4K,1M,64M
  drumline bench send-recv --transport tcp             over loopback
  drumline bench barrier --json | jq '.[0].median_us'
  srun -n 4 drumline bench all-reduce                  joins the job; rank 0 prints

How it is measured: each rank rewrites its buffer, all ranks enter a barrier, one call is timed. The time of a turn is that \
of its slowest rank. Shown are the median (p50) and the 99th percentile of the turns. The first and the last result of \
each size are checked; a wrong one ends the run. A size takes --seconds-per-size, \
at most 20,000 turns.

What the size is: the buffer (all-reduce, reduce, broadcast, all-to-all), the whole output (all-gather, gather), the \
whole input (reduce-scatter, scatter), or one message (send-recv; half the round trip counts).

Rates are 10^9 bytes a second. algbw is size / median. busbw makes operations comparable: with n ranks, algbw times \
2(n-1)/n for all-reduce, 1 for reduce, broadcast and send-recv, (n-1)/n for the others. Each cell of the bar at the end \
is twice the rate of the one before; the first begins at 1 MB/s.";

/// Measure a collective operation and check its results
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct BenchArgs {
    /// What to measure
    #[arg(value_enum)]
    op: Op,
    /// Ranks to start on this machine; inside a job its ranks are used [default: 2]
    #[arg(long, value_name = "N", value_parser = ranks_to_start, allow_negative_numbers = true)]
    nproc_per_node: Option<usize>,
    /// Sizes in bytes; K, M and G (or KiB, KB, ...) are powers of 1024 [default: 16 B to 64 MiB in 8 steps]
    #[arg(long, value_name = "LIST", value_delimiter = ',', allow_negative_numbers = true)]
    sizes: Vec<ByteSize>,
    /// Element type: f64 f32 f16 bf16 i8 i16 i32 i64 u8 u16 u32 u64 bool [default: f32]
    #[arg(long, value_name = "TYPE")]
    dtype: Option<DType>,
    /// Where the buffers are allocated
    #[arg(long, value_enum, default_value = "private")]
    memory: Memory,
    /// How data travels: auto (shared memory inside a machine, TCP between), shm or tcp
    #[arg(long, value_name = "TRANSPORT", env = worker_env::DRUMLINE_TRANSPORT, default_value = "auto")]
    transport: Transport,
    /// One buffer, in the caches if it fits (the default)
    #[arg(long, conflicts_with = "cold")]
    hot: bool,
    /// Several buffers in turn, each out of the caches by the time it is used
    #[arg(long)]
    cold: bool,
    /// How long to measure each size, at most 20,000 turns; warm-up takes another tenth of the time
    #[arg(long, value_name = "SECONDS", default_value = "0.4", value_parser = seconds, allow_negative_numbers = true)]
    seconds_per_size: Duration,
    /// Do not bind ranks to cores; by default each gets its own if there are enough, as with Open MPI
    #[arg(long)]
    no_bind: bool,
    /// Print a JSON array instead of the table
    #[arg(long)]
    json: bool,
}

impl BenchArgs {
    fn dtype(&self) -> DType {
        self.dtype.unwrap_or(DType::F32)
    }

    /// The sizes to measure among `world` ranks; an error that says what to change if the arguments do not fit.
    fn sizes_among(&self, world: usize) -> Result<Vec<usize>, Mistake> {
        if self.op == Op::SendRecv && world < 2 {
            return Err(Mistake::new("send-recv needs two ranks, the job has 1; try --nproc-per-node 2"));
        }
        sizes::to_measure(&self.sizes, self.op, self.dtype(), world).map_err(Mistake::new)
    }

    /// Arguments that have no effect. `variable` is the one that holds this process's rank, if it is a rank of a job.
    fn remarks(&self, variable: Option<&str>) -> Vec<String> {
        let mut remarks = Vec::new();
        if let (Some(given), Some(variable)) = (self.nproc_per_node, variable) {
            remarks.push(format!(
                "--nproc-per-node {given} is ignored: {variable} is set, so this is a rank of a job; \
                 unset {variable} to start one"
            ));
        }
        let about_data =
            [("--sizes", self.sizes.iter().any(|size| size.0 > 0)), ("--dtype", self.dtype.is_some())];
        let given: Vec<_> = about_data.iter().filter(|(_, given)| *given).map(|(name, _)| *name).collect();
        if self.op == Op::Barrier && !given.is_empty() {
            let verb = if given.len() == 1 { "does" } else { "do" };
            remarks.push(format!("a barrier moves no data: {} {verb} not apply", given.join(" and ")));
        }
        remarks
    }
}

fn ranks_to_start(text: &str) -> Result<usize, String> {
    let ranks = text.parse().ok().filter(|ranks| (1..=MOST_RANKS).contains(ranks));
    ranks.ok_or_else(|| format!("`{text}` is not a number of ranks between 1 and {MOST_RANKS}; try 2"))
}

fn seconds(text: &str) -> Result<Duration, String> {
    parse_seconds(text)
        .ok()
        .filter(|seconds| *seconds <= LONGEST)
        .ok_or_else(|| format!("`{text}` is no number of seconds from 0 to {}; try 0.4", LONGEST.as_secs()))
}

/// Joins the job that this process is a rank of, or starts one.
pub(crate) fn run(args: &BenchArgs) -> anyhow::Result<()> {
    let env = |name: &str| std::env::var(name).ok();
    let variable = rank_variable(env);
    if !ranks::is_one_of_ours() && !is_later_rank(env) {
        args.remarks(variable).iter().for_each(|remark| print_line(&format!("note: {remark}")));
    }
    match variable {
        Some(variable) => worker::run(args, variable),
        None => ranks::run(args),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: BenchArgs,
    }

    fn remarks(line: &str, variable: Option<&str>) -> Vec<String> {
        let words = std::iter::once("bench").chain(line.split(' '));
        Line::try_parse_from(words).unwrap().args.remarks(variable)
    }

    #[test]
    fn arguments_without_effect_are_remarked() {
        assert_eq!(
            remarks("all-reduce --nproc-per-node 4", Some("RANK")),
            [
                "--nproc-per-node 4 is ignored: RANK is set, so this is a rank of a job; unset RANK to start one"
            ]
        );
        assert_eq!(
            remarks("barrier --sizes 4K --dtype f16", None),
            ["a barrier moves no data: --sizes and --dtype do not apply"]
        );
        assert_eq!(remarks("barrier --dtype f16", None), ["a barrier moves no data: --dtype does not apply"]);
    }

    #[test]
    fn arguments_with_an_effect_are_not_remarked() {
        assert!(remarks("all-reduce --nproc-per-node 4 --sizes 4K --dtype f16", None).is_empty());
        assert!(
            remarks("all-reduce", Some("RANK")).is_empty() && remarks("barrier --sizes 0", None).is_empty()
        );
    }
}
