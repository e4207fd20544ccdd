//! A run in a line: how it is, how far, how good, and how long ago it last wrote.

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;

use crate::page::run_folder::RunFolder;

/// How a run is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum RunState {
    /// Nothing was written yet.
    Waiting,
    /// At work.
    Running,
    /// All was done.
    Finished,
    /// A signal or a callback asked for it; the run can be resumed.
    Stopped,
    /// Something went wrong.
    Failed,
    /// Its ranks ended without a word.
    Lost,
    /// No ranks are known and nothing has been written for long.
    Silent,
}

impl RunState {
    /// In lower case, as in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Running => "running",
            Self::Finished => "finished",
            Self::Stopped => "stopped",
            Self::Failed => "failed",
            Self::Lost => "lost",
            Self::Silent => "silent",
        }
    }
}

/// The best evaluation of a run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Best {
    /// The metric that says which model is best.
    pub name: String,
    /// Its value.
    pub value: f64,
    /// Epochs done by then.
    pub epoch: u64,
}

/// What a list says of a run.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Summary {
    /// Its `OUT_DIR`.
    pub folder: PathBuf,
    /// How it is.
    pub state: RunState,
    /// Number of ranks, where it says so.
    pub world_size: Option<usize>,
    /// The epoch that is under way, or was last: from 1, as in the log.
    pub epoch: u64,
    /// Epochs that it will have, where it says so.
    pub epochs: Option<u64>,
    /// Steps done.
    pub step: u64,
    /// Steps that it will have, where it says so.
    pub total_steps: Option<u64>,
    /// The best evaluation.
    pub best: Option<Best>,
    /// Seconds of work to come, where that is known.
    pub left_s: Option<f64>,
    /// Seconds since it last wrote.
    pub age_s: Option<f64>,
}

impl Summary {
    /// Reads the files of a run.
    ///
    /// ```
    /// use drumline_observe::fake::FakeRun;
    /// use drumline_observe::runs::{RunState, Summary};
    ///
    /// let folder = tempfile::tempdir()?;
    /// let mut run = FakeRun::create(folder.path(), 2)?;
    /// run.step()?;
    /// run.end("finished", None)?;
    /// let summary = Summary::read(folder.path());
    /// assert_eq!((summary.state, summary.step, summary.epoch), (RunState::Finished, 1, 1));
    /// # Ok::<(), std::io::Error>(())
    /// ```
    pub fn read(folder: &Path) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |now| now.as_secs_f64());
        let mut run = RunFolder::new(folder.to_owned());
        run.refresh_all(now);
        run.summary(now)
    }
}
