//! How a job ended: each worker's exit and last output, and which failure came first.

use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::fmt;
use std::time::Duration;

/// How a worker ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Exit {
    /// It exited by itself with this code.
    Code(i32),
    /// A signal ended it that this launcher did not send to stop it.
    Signal(i32),
    /// The launcher stopped it, with SIGTERM or, if that was not enough, SIGKILL.
    StoppedByUs,
    /// It still existed some seconds after SIGKILL (a process stuck in the kernel) and was given up.
    Unkillable,
}

impl Exit {
    /// Whether the worker ended with exit code 0.
    pub fn is_success(self) -> bool {
        self == Exit::Code(0)
    }
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Exit::Code(code) => write!(f, "exit code {code}"),
            Exit::Signal(number) => write!(f, "signal {number} ({})", signal_name(*number)),
            Exit::StoppedByUs => f.write_str("stopped by the launcher"),
            Exit::Unkillable => f.write_str("still running after SIGKILL"),
        }
    }
}

/// The usual name of a signal number, such as `SIGKILL` for 9.
pub fn signal_name(number: i32) -> &'static str {
    const NAMES: [&str; 31] = [
        "SIGHUP",
        "SIGINT",
        "SIGQUIT",
        "SIGILL",
        "SIGTRAP",
        "SIGABRT",
        "SIGBUS",
        "SIGFPE",
        "SIGKILL",
        "SIGUSR1",
        "SIGSEGV",
        "SIGUSR2",
        "SIGPIPE",
        "SIGALRM",
        "SIGTERM",
        "SIGSTKFLT",
        "SIGCHLD",
        "SIGCONT",
        "SIGSTOP",
        "SIGTSTP",
        "SIGTTIN",
        "SIGTTOU",
        "SIGURG",
        "SIGXCPU",
        "SIGXFSZ",
        "SIGVTALRM",
        "SIGPROF",
        "SIGWINCH",
        "SIGIO",
        "SIGPWR",
        "SIGSYS",
    ];
    let index = usize::try_from(number).ok().and_then(|n| n.checked_sub(1));
    index.and_then(|i| NAMES.get(i)).copied().unwrap_or("a real-time signal")
}

/// Why the launcher stopped a job, if it did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum StopReason {
    /// This rank failed first.
    Failure {
        /// The first rank to fail.
        rank: usize,
    },
    /// The job's deadline passed.
    Deadline,
    /// The owner of the job requested it.
    Asked,
}

/// One worker's end.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RankReport {
    /// Its rank in the job.
    pub rank: usize,
    /// Its process id, which another process may have by now.
    pub pid: u32,
    /// How it ended.
    pub exit: Exit,
    /// Whether the kernel wrote its memory to a core file.
    pub core_dumped: bool,
    /// When it ended, counted from the start of the job.
    pub ended_after: Duration,
    /// The last bytes of its stdout, empty when inherited.
    pub stdout: Vec<u8>,
    /// The last bytes of its stderr, empty when inherited.
    pub stderr: Vec<u8>,
}

impl RankReport {
    /// What it printed on stdout, as text.
    pub fn stdout_text(&self) -> Cow<'_, str> {
        String::from_utf8_lossy(&self.stdout)
    }

    /// What it printed on stderr, as text.
    pub fn stderr_text(&self) -> Cow<'_, str> {
        String::from_utf8_lossy(&self.stderr)
    }
}

/// A whole job's end.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct JobReport {
    /// The report of each worker of this node, by rank.
    pub ranks: Vec<RankReport>,
    /// The rank whose failure was noticed first; `None` if none failed by itself.
    pub root_cause: Option<usize>,
    /// Why the launcher stopped the job, if it did.
    pub stopped: Option<StopReason>,
}

impl JobReport {
    /// Whether every worker ended with code 0.
    pub fn is_success(&self) -> bool {
        self.ranks.iter().all(|rank| rank.exit.is_success())
    }

    /// The report of the rank that failed first.
    pub fn failed(&self) -> Option<&RankReport> {
        self.rank(self.root_cause?)
    }

    /// The report of one rank.
    pub fn rank(&self, rank: usize) -> Option<&RankReport> {
        self.ranks.iter().find(|report| report.rank == rank)
    }
}

/// Writes a line for the job, then each unsuccessful rank with its output; the root cause first.
impl fmt::Display for JobReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut unsuccessful: Vec<_> = self.ranks.iter().filter(|rank| !rank.exit.is_success()).collect();
        unsuccessful.sort_by_key(|rank| (Some(rank.rank) != self.root_cause, rank.rank));
        let stopped = unsuccessful.iter().filter(|rank| rank.exit == Exit::StoppedByUs).count();
        let failed = unsuccessful.len() - stopped;
        let all = self.ranks.len();
        writeln!(f, "{}{failed} of {all} ranks failed, {stopped} were stopped", self.cause())?;
        unsuccessful.iter().try_for_each(|rank| write!(f, "{rank}"))
    }
}

impl JobReport {
    fn cause(&self) -> String {
        match (self.root_cause, self.stopped) {
            (Some(rank), _) => format!("rank {rank} failed first; "),
            (None, Some(StopReason::Deadline)) => "the deadline passed; ".to_string(),
            _ => String::new(),
        }
    }
}

impl fmt::Display for RankReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "---- rank {} (pid {}): {} after {:.3?}",
            self.rank, self.pid, self.exit, self.ended_after
        )?;
        for (name, text) in [("stdout", self.stdout_text()), ("stderr", self.stderr_text())] {
            if !text.trim().is_empty() {
                writeln!(f, "-- {name}:\n{}", text.trim_end())?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(rank: usize, exit: Exit, stderr: &str) -> RankReport {
        let ended_after = Duration::from_millis(5);
        RankReport {
            rank,
            pid: 77,
            exit,
            core_dumped: false,
            ended_after,
            stdout: Vec::new(),
            stderr: stderr.into(),
        }
    }

    #[test]
    fn root_cause_is_printed_first_and_success_not_at_all() {
        let ranks = vec![
            rank(0, Exit::Code(0), "fine"),
            rank(1, Exit::StoppedByUs, ""),
            rank(2, Exit::Signal(9), "last words"),
        ];
        let text = JobReport { ranks, root_cause: Some(2), stopped: None }.to_string();
        assert!(text.starts_with("rank 2 failed first; 1 of 3 ranks failed, 1 were stopped\n"), "{text}");
        assert!(
            text.find("rank 2 (pid 77): signal 9 (SIGKILL)") < text.find("rank 1 (pid 77): stopped"),
            "{text}"
        );
        assert!(text.contains("-- stderr:\nlast words\n") && !text.contains("fine"), "{text}");
    }

    #[test]
    fn signal_names_are_right_at_both_ends() {
        let names = [1, 9, 15, 31, 0, -3, 34].map(signal_name);
        assert_eq!(names[..4], ["SIGHUP", "SIGKILL", "SIGTERM", "SIGSYS"]);
        assert_eq!(names[4..], ["a real-time signal"; 3]);
    }
}
