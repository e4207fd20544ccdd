//! Starts the ranks: this same command, which finds itself inside a job. What rank 0 prints is passed on; a failure is told
//! once, in the words of the rank that failed first.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use drumline_launch::{JobReport, LocalJob, Output, RunningJob};

use super::BenchArgs;

/// Set for the ranks if somebody watches: rank 0 then says on stderr what it measures.
pub(super) const TALK: &str = "DRUMLINE_BENCH_TALK";
/// What such a line starts with.
pub(super) const TALK_MARK: &str = "measuring ";

const LOOK: Duration = Duration::from_millis(250);

pub(super) fn run(args: &BenchArgs) -> anyhow::Result<()> {
    let (world, own_arguments) = (usize::from(args.nproc_per_node), std::env::args_os().skip(1));
    args.sizes_among(world)?;
    let mut job = LocalJob::this_program(world, own_arguments)
        .context("cannot find this program to start ranks of it")?
        .output(Output::Capture);
    let watched = std::io::stderr().is_terminal();
    if watched {
        job = job.env(TALK, "1");
    }
    let job = job.start()?;
    if watched {
        follow(&job);
    }
    finish(&job.wait())
}

/// Shows the last thing rank 0 said, on one line that is wiped at the end.
fn follow(job: &RunningJob) {
    while !job.wait_all(Instant::now() + LOOK) {
        let (_, said) = job.output(0);
        let said = String::from_utf8_lossy(&said);
        if let Some(line) = said.lines().rfind(|line| line.starts_with(TALK_MARK)) {
            eprint!("\r\x1b[K{line}");
        }
    }
    eprint!("\r\x1b[K");
}

fn finish(report: &JobReport) -> anyhow::Result<()> {
    if let Some(rank) = report.ranks.iter().find(|rank| report.root_cause == Some(rank.rank)) {
        let said = rank.stderr_text();
        let words: Vec<&str> = said.lines().filter(|line| !line.starts_with(TALK_MARK)).collect();
        let words = words.join("\n");
        let words = words.strip_prefix("error: ").unwrap_or(&words);
        bail!("rank {} failed ({}): {words}", rank.rank, rank.exit);
    }
    if !report.is_success() {
        bail!("{report}");
    }
    let printed = &report.rank(0).context("the job has no rank 0")?.stdout;
    std::io::stdout().write_all(printed).context("cannot print the results")
}
