//! `drumline doctor`: what this machine has, what is missing, and how fast ranks reach each other. `drumline-train` checks
//! GPUs, since it has libtorch.
//!
//! ```text
//!   drumline doctor ─┬─ no job around it ─▶ this host alone, or with --nproc-per-node ranks of itself (ranks.rs) ─┐
//!                    └─ is a rank of a job ◀──────────────────────────────────────────────────────────────────────┘
//!                         └▶ host.rs: what this host has ─▶ gathered (board.rs) ─▶ links.rs: each pair of ranks
//!                             ─▶ findings.rs ─▶ rank 0: report.rs
//! ```
//! Ranks gather through the job's store, so that a broken link is a problem in the report and does not prevent the report.
//! Problems come first, each with what to do. The exit code is 1 if there are any.

mod board;
mod findings;
mod host;
mod links;
mod ranks;
mod report;

use std::ffi::OsString;
use std::io::Write;
use std::time::Duration;

use anyhow::Context;
use drumline_comm::{GroupOptions, ProcessGroup};

use crate::errors::{ExitCodeOnly, Mistake};
use crate::job::rank_variable;
use crate::train::{become_program, trainer};
use board::Board;
use host::Host;
use links::Measured;
use report::Report;

const EXAMPLES: &str = "\
Examples:
  drumline doctor                                          this host: cores, memory, limits, /dev/shm, names, ports
  drumline doctor --nproc-per-node 4                       also 4 ranks of it: latency and bandwidth between each two
  drumline run --hostfile hosts -- drumline doctor         all hosts of a job: also their clocks and the network between them
  srun -N 4 --ntasks-per-node 1 drumline doctor            the same under Slurm
  drumline doctor --json                                   one JSON object
  drumline doctor gpu                                      this machine's GPUs, driver, libraries, bandwidths, NCCL
  drumline run --nproc-per-node 4 drumline doctor gpu      also whether all ranks have the same versions, and an all-reduce between them

The exit code is 1 if there is a problem. Hints do not count.";

/// How long a rank may take for anything between ranks.
const TIMEOUT: Duration = Duration::from_secs(60);
/// The note that the report is printed.
const PRINTED: &str = "the report";
/// The note that a rank no longer needs the store, and how long rank 0 waits for it.
const END: &str = "the end";
const END_TIMEOUT: Duration = Duration::from_secs(5);

/// Check what this machine, or each host of a job, has and lacks
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES, args_conflicts_with_subcommands = true)]
pub(crate) struct DoctorArgs {
    #[command(subcommand)]
    command: Option<DoctorCommand>,
    /// Ranks to start on this machine, to measure the links between them; inside a job its ranks are used
    #[arg(long, visible_alias = "nproc_per_node", value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    nproc_per_node: Option<u16>,
    /// Print one JSON object instead of lines
    #[arg(long)]
    json: bool,
}

#[derive(Debug, clap::Subcommand)]
enum DoctorCommand {
    /// Driver, libraries, versions, each GPU's memory and capability, peer access, bandwidths, NCCL
    Gpu {
        /// Print one JSON object instead of lines
        #[arg(long)]
        json: bool,
    },
}

/// Checks this host, or those of the job; for GPUs it becomes `drumline-train doctor gpu`.
pub(crate) fn doctor(args: &DoctorArgs) -> anyhow::Result<()> {
    if let Some(DoctorCommand::Gpu { json }) = args.command {
        let mut words: Vec<OsString> = vec![trainer()?.into(), "doctor".into(), "gpu".into()];
        words.extend(json.then(|| "--json".into()));
        return become_program(&words, &[]);
    }
    let is_rank = rank_variable(|name| std::env::var(name).ok()).is_some();
    match args.nproc_per_node {
        _ if is_rank => as_rank(args),
        Some(nproc) if nproc > 1 => ranks::run(nproc.into(), args),
        _ => print(&Report::new(vec![Host::here()], Measured::default()), args),
    }
}

/// One rank's part: rank 0 prints.
fn as_rank(args: &DoctorArgs) -> anyhow::Result<()> {
    let options = GroupOptions::from_env().map_err(Mistake::new)?;
    let member = drumline_rendezvous::from_env().context("cannot join the job")?;
    let options = GroupOptions { timeout: options.timeout.min(TIMEOUT), ..options };
    let board = Board::of(&member);
    let group = ProcessGroup::new(member, options)?;
    let mut host = Host::here();
    host.rank = group.rank();
    let mut hosts = board.gather("host", &host, TIMEOUT)?;
    host::share_cores(&mut hosts);
    let names = hosts.iter().map(|host| host.name.clone()).collect::<Vec<_>>();
    let unknown = board.gather("unknown names", &host::unknown_among(&names), TIMEOUT)?;
    hosts.iter_mut().zip(unknown).for_each(|(host, unknown)| host.unknown_hosts = unknown);
    let measured = links::measure_all(&group, &board, &mut hosts)?;
    if group.rank() > 0 {
        // Wait for rank 0's report: when a rank ends, a launcher may stop the others. Errors from here on are no finding.
        let _ = board.read::<()>(PRINTED, TIMEOUT);
        let _ = board.contribute(END, &());
        return Ok(());
    }
    let outcome = print(&Report::new(hosts, measured), args);
    let _ = board.write(PRINTED, &());
    // This rank may host the store, which the others still read.
    let _ = board.gather(END, &(), END_TIMEOUT);
    outcome
}

fn print(report: &Report, args: &DoctorArgs) -> anyhow::Result<()> {
    let text = if args.json { serde_json::to_string_pretty(report)? + "\n" } else { report.to_string() };
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).context("cannot print the report")?;
    // The report contains the problems.
    if report.problems.is_empty() { Ok(()) } else { Err(ExitCodeOnly(1).into()) }
}
