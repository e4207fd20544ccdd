//! Why a spawn call failed. As `main` prints the `Debug` form of what it returns, that form is the text as well.

use std::fmt::{self, Write as _};
use std::io;
use std::time::Duration;

use drumline_launch::{FailureReport, LaunchError};

/// Why [`spawn`](crate::spawn) failed.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum SpawnError {
    /// The ranks could not be started.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// What the ranks need could not be made.
    #[error("cannot prepare for spawning ranks: {0}")]
    Setup(#[source] io::Error),
    /// A rank returned an error, panicked or died, and the others were stopped.
    #[error("{}", tell(report, before.as_deref()))]
    Failed {
        /// The rank that failed first and why; what became of the others.
        report: Box<FailureReport>,
        /// The spawn call, if the rank failed before it came to it.
        before: Option<String>,
    },
    /// The ranks ran longer than they were allowed to.
    #[error("the ranks were stopped as they still ran after {after:?}; try a longer timeout")]
    TimedOut {
        /// How long they were allowed to run.
        after: Duration,
    },
    /// A rank ended well without having come to the call.
    #[error(
        "rank {rank} ended without coming to the spawn call at {call}; the program, started again, must come to the same \
         call: try making it the first thing in main"
    )]
    NeverReached {
        /// The rank.
        rank: usize,
        /// The place of the call.
        call: String,
    },
    /// In a rank: an earlier call, which had failed in the process that made this one.
    #[error("{error}")]
    FailedBefore {
        /// What it said there.
        error: String,
    },
    /// A rank tried to spawn ranks of its own.
    #[error("rank {rank} cannot spawn ranks of its own; try a single spawn call with more ranks, or threads")]
    Nested {
        /// The rank.
        rank: usize,
    },
    /// A launcher has started this process as one rank of a job that does not fit the call.
    #[error("this process is one rank of a job that a launcher has started: {why}")]
    Launched {
        /// What does not fit, and what to do.
        why: String,
    },
    /// The function failed in this process, which a launcher has started as a rank.
    #[error("rank {rank}: {message}")]
    InPlace {
        /// The rank.
        rank: usize,
        /// Its error.
        message: String,
    },
}

impl fmt::Debug for SpawnError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

fn tell(report: &FailureReport, before: Option<&str>) -> String {
    let (root, mut text) = (&report.root, report.headline());
    let told = root.error_file.as_ref().map(|file| file.message.as_str());
    if let Some(message) = told.or(root.trace.as_ref().map(|trace| trace.summary.as_str())) {
        let _ = write!(text, ": {}", message.trim_end());
    }
    if let Some(call) = before {
        let _ = write!(text, "; it had not come to the spawn call at {call} yet");
    }
    if told.is_none() && !root.last_lines.is_empty() {
        let _ = write!(text, "\nits last lines on stderr:\n  {}", root.last_lines.join("\n  "));
    }
    text
}
