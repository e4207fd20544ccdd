//! A run in one line: its state, progress, best result, and when it last wrote something.

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;

use crate::page::run_folder::RunFolder;

/// The state of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum RunState {
    /// Nothing was written yet.
    Waiting,
    /// It is working.
    Running,
    /// All steps were done.
    Finished,
    /// A signal or a callback stopped it; the run can be resumed.
    Stopped,
    /// Something went wrong.
    Failed,
    /// Its ranks ended without a report.
    Lost,
    /// No ranks are known and nothing has been written for long.
    Silent,
}

impl RunState {
    /// The name in lower case, as in JSON.
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
    /// The metric by which the best model is chosen.
    pub name: String,
    /// Its value.
    pub value: f64,
    /// Epochs that were done by then.
    pub epoch: u64,
}

/// A run as a list shows it.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Summary {
    /// Its `OUT_DIR`.
    pub folder: PathBuf,
    /// Its state.
    pub state: RunState,
    /// Number of ranks, if it is known.
    pub world_size: Option<usize>,
    /// The current or last epoch, counted from 1 as in the log.
    pub epoch: u64,
    /// The number of epochs of the run, if it is known.
    pub epochs: Option<u64>,
    /// Steps done.
    pub step: u64,
    /// The number of steps of the run, if it is known.
    pub total_steps: Option<u64>,
    /// The best evaluation.
    pub best: Option<Best>,
    /// Estimated seconds of work to the end, if known.
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
