//! Errors of spawn calls. `main` prints the `Debug` form of what it returns, so that form is the text as well.

use std::ffi::OsString;
use std::fmt::{self, Write as _};
use std::io;
use std::time::Duration;

use drumline_launch::{FailureReport, LaunchError};

use super::outcome::WorkerError;

/// Why [`spawn`](crate::spawn) failed.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum SpawnError {
    /// The ranks could not be started.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// The resources for the ranks could not be created.
    #[error("cannot prepare to spawn ranks: {0}")]
    Setup(#[source] io::Error),
    /// A rank returned an error, panicked or died, and the others were stopped.
    #[error("{}", failure_text(report, before.as_deref()))]
    Failed {
        /// The rank that failed first, why, and what became of the others.
        report: Box<FailureReport>,
        /// The spawn call, if the rank failed before it reached it.
        before: Option<String>,
    },
    /// The ranks ran longer than they were allowed to.
    #[error("the ranks were stopped as they still ran after {after:?}; try a longer timeout")]
    TimedOut {
        /// How long they were allowed to run.
        after: Duration,
    },
    /// A rank ended without an error before it reached the call.
    #[error(
        "rank {rank} ended without coming to the spawn call at {call}; the program, started again, must come to the same \
         call: try making it the first thing in main"
    )]
    NeverReached {
        /// The rank.
        rank: usize,
        /// The call's place in the source.
        call: String,
    },
    /// In a rank: an earlier call that failed in the parent process.
    #[error("{error}")]
    FailedBefore {
        /// The error in the parent process.
        error: String,
    },
    /// A rank tried to spawn ranks of its own.
    #[error("rank {rank} cannot spawn ranks of its own; try a single spawn call with more ranks, or threads")]
    Nested {
        /// The rank.
        rank: usize,
    },
    /// A launcher has started this process as a rank, and its job does not match the call.
    #[error("this process is one rank of a job that a launcher has started: {0}")]
    Launched(#[from] LaunchedError),
    /// The function failed in this process, which a launcher has started as a rank.
    #[error("rank {rank}: {error}")]
    InPlace {
        /// The rank.
        rank: usize,
        /// Its error.
        error: WorkerError,
    },
}

/// Why a rank that a launcher has started cannot run a spawn call.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchedError {
    /// The launcher has started another number of ranks.
    #[error(
        "it has {local_world_size} ranks on this node ({world_size} in all) and spawn was called for {nproc}; try \
         `--nproc-per-node {nproc}`, or start the program without the launcher"
    )]
    RankCount {
        /// Ranks on this node.
        local_world_size: usize,
        /// All ranks.
        world_size: usize,
        /// Ranks that the call asks for.
        nproc: usize,
    },
    /// The call sets a variable, which the launcher has not set for the ranks.
    #[error(
        "spawn was called with {0}={1}, which cannot be set any more; try {0}={1} before the launcher",
        name.display(),
        value.display()
    )]
    Variable {
        /// The variable.
        name: OsString,
        /// The value that the call gives it.
        value: OsString,
    },
    /// The launcher's variables cannot be read.
    #[error(transparent)]
    Environment(#[from] WorkerEnvError),
}

/// What is wrong with the variables that tell a rank who it is.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WorkerEnvError {
    /// A variable is missing.
    #[error("{name} is not set")]
    NotSet {
        /// The variable.
        name: &'static str,
    },
    /// A variable has another value than a number.
    #[error("{name} is not a number")]
    NotANumber {
        /// The variable.
        name: &'static str,
    },
}

impl fmt::Debug for SpawnError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

fn failure_text(report: &FailureReport, before: Option<&str>) -> String {
    let (root, mut text) = (&report.root, report.headline());
    let message = root.error_file.as_ref().map(|file| file.message.as_str());
    if let Some(message) = message.or(root.trace.as_ref().map(|trace| trace.summary.as_str())) {
        let _ = write!(text, ": {}", message.trim_end());
    }
    if let Some(call) = before {
        let _ = write!(text, "; it had not come to the spawn call at {call} yet");
    }
    if message.is_none() && !root.last_lines.is_empty() {
        let _ = write!(text, "\nits last lines on stderr:\n  {}", root.last_lines.join("\n  "));
    }
    text
}
