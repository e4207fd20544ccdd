//! Collects what is known about a worker besides its exit and its output. Interpreting it happens elsewhere.

use std::path::Path;

use drumline_rendezvous::error_file::ErrorFile;
use drumline_rendezvous::fault::Fault;

use super::{OomKill, OomWatch, ProcessState};
use crate::report::{Exit, RankReport};

/// SIGKILL's number.
const KILL: i32 = 9;

/// What is known about one rank.
#[derive(Debug, Clone, Default)]
pub struct Evidence {
    /// Its rank in the job.
    pub rank: usize,
    /// Its rank on its host.
    pub local_rank: usize,
    /// Its host.
    pub host: String,
    /// What it wrote about its failure.
    pub error_file: Option<ErrorFile>,
    /// Why its error file could not be read, if that failed.
    pub error_file_problem: Option<String>,
    /// The out-of-memory kill by the kernel, if that is how it ended.
    pub oom: Option<OomKill>,
    /// Its state, if it could not be killed.
    pub state: Option<ProcessState>,
    /// The timed faults of `--fault` that the launcher injects in this run, of all ranks.
    pub timed_faults: Vec<Fault>,
}

impl Evidence {
    /// Evidence with only the rank's place filled in.
    pub fn at(rank: usize, local_rank: usize, host: impl Into<String>) -> Self {
        Self { rank, local_rank, host: host.into(), ..Self::default() }
    }

    /// Evidence for a rank whose place is unknown.
    pub(super) fn unknown(rank: usize) -> Self {
        Self::at(rank, rank, "this host")
    }

    /// Reads what the worker and the kernel have left. Missing or broken files are not errors.
    pub fn gather(mut self, report: &RankReport, error_file: Option<&Path>, watch: &mut OomWatch) -> Self {
        if report.exit.is_success() {
            return self;
        }
        match error_file.map(|path| (path, ErrorFile::read(path))) {
            Some((_, Ok(read))) => self.error_file = read,
            Some((path, Err(error))) => {
                self.error_file_problem = Some(format!("{}: {error}", path.display()))
            }
            None => {}
        }
        match report.exit {
            Exit::Signal(KILL) => self.oom = watch.killed(report.pid),
            Exit::Unkillable => self.state = ProcessState::read(Path::new("/proc"), report.pid),
            _ => {}
        }
        self
    }
}
