//! What is found out about a worker besides its end and its output. The reading happens here, the judging not.

use std::path::Path;

use drumline_rendezvous::error_file::ErrorFile;

use super::{OomKill, OomWatch, ProcessState};
use crate::report::{Exit, RankReport};

/// SIGKILL's number.
const KILL: i32 = 9;

/// What is known of one rank.
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
    /// Why its error file could not be used, if there is one that could not.
    pub error_file_problem: Option<String>,
    /// That the kernel killed it for lack of memory.
    pub oom: Option<OomKill>,
    /// Its state, if it could not be killed.
    pub state: Option<ProcessState>,
}

impl Evidence {
    /// A rank at its place, of which nothing more is known.
    pub fn at(rank: usize, local_rank: usize, host: impl Into<String>) -> Self {
        Self { rank, local_rank, host: host.into(), ..Self::default() }
    }

    /// A rank whose place nobody told.
    pub(super) fn unknown(rank: usize) -> Self {
        Self::at(rank, rank, "this host")
    }

    /// Looks at all that the worker and the kernel have left. Nothing that is missing or broken is an error.
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
