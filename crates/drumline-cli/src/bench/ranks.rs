//! Starts the ranks: this same command, which finds that it is inside a job. Rank 0's output is printed as it comes; a failure is
//! reported once, with the message of the rank that failed first.

use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use drumline_comm::GroupOptions;
use drumline_launch::{Exit, JobReport, LocalJob, Output, RankReport, RunningJob};

use super::{BenchArgs, DEFAULT_RANKS, progress};
use crate::errors::Mistake;

/// Set for the ranks that are started here: `watched` if rank 0 is to report on stderr what it measures.
const STARTED_BY_BENCH: &str = "DRUMLINE_BENCH_RANK";
const WATCHED: &str = "watched";

const KILL: i32 = 9;
const LOOK: Duration = Duration::from_millis(250);

/// Whether this process is a rank that was started here.
pub(super) fn is_one_of_ours() -> bool {
    std::env::var_os(STARTED_BY_BENCH).is_some()
}

/// Whether rank 0's progress is shown.
pub(super) fn is_watched() -> bool {
    std::env::var_os(STARTED_BY_BENCH).is_some_and(|value| value == WATCHED)
}

pub(super) fn run(args: &BenchArgs) -> anyhow::Result<()> {
    let (world, own_arguments) = (args.nproc_per_node.unwrap_or(DEFAULT_RANKS), std::env::args_os().skip(1));
    args.sizes_among(world)?;
    GroupOptions::from_env().map_err(Mistake::new)?;
    let watched = io::stderr().is_terminal();
    let job = LocalJob::this_program(world, own_arguments)
        .context("cannot find this program to start ranks of it")?
        .output(Output::Capture)
        .env(STARTED_BY_BENCH, if watched { WATCHED } else { "1" })
        .start()?;
    let mut screen = Screen { watched, passed_on: 0 };
    // JSON comes at the end, so without a terminal there is nothing to poll for.
    let followed = if watched || !args.json { screen.follow(&job) } else { Ok(()) };
    followed.context("cannot print the results")?;
    finish(&job.wait(), &mut screen)
}

/// Where rank 0's output is printed.
#[derive(Debug)]
struct Screen {
    /// Whether stderr is a terminal.
    watched: bool,
    /// How many bytes of rank 0's stdout have been printed.
    passed_on: usize,
}

impl Screen {
    /// Prints rows as they come, and shows rank 0's last progress message on a line that is erased at the end.
    fn follow(&mut self, job: &RunningJob) -> io::Result<()> {
        while !job.wait_all(Instant::now() + LOOK) {
            let (stdout, stderr) = job.output(0);
            self.pass_on(&stdout)?;
            let stderr = String::from_utf8_lossy(&stderr);
            if let Some(line) =
                stderr.lines().rfind(|line| self.watched && line.starts_with(progress::PREFIX))
            {
                eprint!("\r\x1b[K{line}");
            }
        }
        self.wipe();
        Ok(())
    }

    /// Prints what is new.
    fn pass_on(&mut self, stdout: &[u8]) -> io::Result<()> {
        let new = stdout.get(self.passed_on..).unwrap_or_default();
        if new.is_empty() {
            return Ok(());
        }
        self.wipe();
        self.passed_on = stdout.len();
        let mut out = io::stdout().lock();
        out.write_all(new)?;
        out.flush()
    }

    fn wipe(&self) {
        if self.watched {
            eprint!("\r\x1b[K");
        }
    }
}

fn finish(report: &JobReport, screen: &mut Screen) -> anyhow::Result<()> {
    let rank_0 = report.rank(0).context("the job has no rank 0")?;
    screen.pass_on(&rank_0.stdout).context("cannot print the results")?;
    if let Some(rank) = report.root_cause.and_then(|rank| report.rank(rank)) {
        bail!(failure(rank));
    }
    if !report.is_success() {
        bail!("{report}");
    }
    Ok(())
}

/// How a rank failed, with its own error message if there is one.
fn failure(report: &RankReport) -> String {
    let RankReport { rank, pid, exit, .. } = report;
    let how = match exit {
        Exit::Signal(_) => format!("rank {rank} (pid {pid}) was killed by {exit}"),
        _ => format!("rank {rank} (pid {pid}) failed ({exit})"),
    };
    let stderr = report.stderr_text();
    let lines: Vec<&str> = stderr.lines().filter(|line| !line.starts_with(progress::PREFIX)).collect();
    let message = lines.join("\n");
    match message.strip_prefix("error: ").unwrap_or(&message).trim_end() {
        "" if *exit == Exit::Signal(KILL) => {
            format!("{how} and left no message; if nobody did that, try dmesg for the out-of-memory killer")
        }
        "" => format!("{how} and left no message"),
        message => format!("{how}: {message}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(exit: Exit, stderr: &str) -> String {
        let (stdout, ended_after) = (Vec::new(), Duration::ZERO);
        failure(&RankReport {
            rank: 1,
            pid: 77,
            exit,
            core_dumped: false,
            ended_after,
            stdout,
            stderr: stderr.into(),
        })
    }

    #[test]
    fn a_rank_without_a_message_is_reported_as_such() {
        assert_eq!(
            message(Exit::Signal(9), "measuring all-reduce of 4 KiB (1 of 1)\n"),
            "rank 1 (pid 77) was killed by signal 9 (SIGKILL) and left no message; if nobody did that, try dmesg for the \
             out-of-memory killer"
        );
        assert_eq!(message(Exit::Code(3), ""), "rank 1 (pid 77) failed (exit code 3) and left no message");
    }

    #[test]
    fn the_message_of_the_rank_is_passed_on() {
        assert_eq!(
            message(Exit::Code(1), "measuring x\nerror: lost rank 0\n"),
            "rank 1 (pid 77) failed (exit code 1): lost rank 0"
        );
    }
}
