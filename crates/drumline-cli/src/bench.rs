//! `drumline bench OP`: how fast a collective is on this machine, with every result checked.
//!
//! ```text
//!   drumline bench ─┬─ no job around it ─▶ starts ranks of itself (ranks.rs) ─┐
//!                   └─ is a rank of a job ◀──────────────────────────────────-┘
//!                        └▶ worker.rs: join, bind, measure each size (turns.rs) ─▶ rank 0: table or JSON on stdout
//! ```
//! Not here: comparisons with other libraries (`cargo xtask bench`).

mod buffers;
mod op;
mod ranks;
mod row;
mod sizes;
mod table;
mod turns;
mod values;
mod worker;

use std::time::Duration;

use anyhow::ensure;
use drumline_comm::{DType, Transport};
use drumline_rendezvous::worker_env;

use crate::job::is_rank_of_a_job;
use buffers::Memory;
use op::Op;
use sizes::ByteSize;

const EXAMPLES: &str = "\
Examples:
  drumline bench all-reduce                            2 ranks, 16 B to 64 MiB
  drumline bench all-reduce --memory heap --sizes 1M   no copies
  drumline bench broadcast --nproc-per-node 4 --sizes 4K,1M,64M
  drumline bench send-recv --transport tcp             over loopback
  drumline bench barrier --json | jq '.[0].median_us'
  srun -n 4 drumline bench all-reduce                  joins the job; rank 0 prints

How it is measured: each rank rewrites its buffer, all meet in a barrier, one call is timed. The time of a turn is that \
of its slowest rank. Shown are the median (p50) and the 99th percentile of the turns. The first and the last result of \
each size are checked; a wrong one ends the run.

What the size is: the buffer (all-reduce, reduce, broadcast, all-to-all), the whole output (all-gather, gather), the \
whole input (reduce-scatter, scatter), or one message (send-recv; half the round trip counts).

Rates are 10^9 bytes a second. algbw is size / median. busbw makes operations comparable: with n ranks, algbw times \
2(n-1)/n for all-reduce, 1 for reduce, broadcast and send-recv, (n-1)/n for the others.";

/// Measure a collective operation and check its results
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct BenchArgs {
    /// What to measure
    #[arg(value_enum)]
    op: Op,
    /// Ranks to start on this machine; inside a job its ranks are taken
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..))]
    nproc_per_node: u16,
    /// Sizes in bytes, with K, M or G for powers of 1024 [default: 16 B to 64 MiB in 8 steps]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    sizes: Vec<ByteSize>,
    /// Element type: f64 f32 f16 bf16 i8 i16 i32 i64 u8 u16 u32 u64 bool
    #[arg(long, value_name = "TYPE", default_value = "f32")]
    dtype: DType,
    /// Where the buffers lie
    #[arg(long, value_enum, default_value = "private")]
    memory: Memory,
    /// Which way the data takes: auto (shared memory inside a machine, TCP between), shm or tcp
    #[arg(long, value_name = "WAY", env = worker_env::DRUMLINE_TRANSPORT, default_value = "auto")]
    transport: Transport,
    /// One buffer, in the caches as far as it fits (the default)
    #[arg(long, conflicts_with = "cold")]
    hot: bool,
    /// Buffers in rotation that have left the caches before their use
    #[arg(long)]
    cold: bool,
    /// How long to measure each size; a tenth more is warm-up
    #[arg(long, value_name = "SECONDS", default_value = "0.4", value_parser = seconds)]
    seconds_per_size: Duration,
    /// Leave the ranks to the scheduler; else each gets a core of its own if there are enough, as with Open MPI
    #[arg(long)]
    no_bind: bool,
    /// Print a JSON array instead of the table
    #[arg(long)]
    json: bool,
}

impl BenchArgs {
    /// The sizes to measure among `world` ranks; an error that says what to change if the arguments do not fit that world.
    fn sizes_among(&self, world: usize) -> anyhow::Result<Vec<usize>> {
        ensure!(
            self.op != Op::SendRecv || world > 1,
            "send-recv needs two ranks, the job has 1; try --nproc-per-node 2"
        );
        sizes::to_measure(&self.sizes, self.op, self.dtype, world)
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    seconds.ok_or_else(|| format!("`{text}` is no number of seconds; try 0.4"))
}

/// Joins the job this process is a rank of, or starts one.
pub(crate) fn run(args: &BenchArgs) -> anyhow::Result<()> {
    if is_rank_of_a_job(|name| std::env::var(name).ok()) { worker::run(args) } else { ranks::run(args) }
}
