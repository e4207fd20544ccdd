//! A test's ranks while they run: what the test can do to them, and what it can query.

use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, bail};
use drumline_launch::{Exit, JobReport, RunningJob, Signal};

use crate::in_rank;
use crate::leftovers::{Watch, is_stopped};

/// The ranks of a test while they run. Dropping it kills them all.
#[derive(Debug)]
pub struct RunningRanks {
    job: RunningJob,
    name: String,
    watch: Watch,
}

/// Everything a test leaves must be gone this long after its end.
const CLEAN_WITHIN: Duration = Duration::from_secs(1);

impl RunningRanks {
    pub(crate) fn new(job: RunningJob, name: String, watch: Watch) -> Self {
        Self { job, name, watch }
    }

    /// The process id of a rank.
    pub fn pid(&self, rank: usize) -> Result<u32> {
        Ok(self.job.pid(rank)?)
    }

    /// Waits until a rank prints a line that contains `marker`, and returns the line.
    pub fn wait_for_line(&self, rank: usize, marker: &str, within: Duration) -> Result<String> {
        Ok(self.job.wait_for_line(rank, marker, Instant::now() + within)?)
    }

    /// Sends a signal to a rank and the processes it started.
    pub fn signal(&self, rank: usize, signal: Signal) -> Result<()> {
        Ok(self.job.signal(rank, signal)?)
    }

    /// Kills a rank with SIGKILL.
    pub fn kill(&self, rank: usize) -> Result<()> {
        self.signal(rank, Signal::KILL)
    }

    /// Stops a rank with SIGSTOP: it is frozen, not dead.
    pub fn stop(&self, rank: usize) -> Result<()> {
        self.signal(rank, Signal::STOP)
    }

    /// Waits until a rank is stopped, after [`stop`](Self::stop) or a fault of its own. A SIGCONT before that would
    /// have no effect, and the rank would stay stopped forever.
    pub fn wait_until_stopped(&self, rank: usize, within: Duration) -> Result<()> {
        let pid = self.pid(rank)?;
        let deadline = Instant::now() + within;
        while !is_stopped(pid) {
            if Instant::now() >= deadline {
                bail!("rank {rank} is not stopped after {within:?}; it printed:\n{}", self.printed(rank));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Resumes a stopped rank with SIGCONT.
    pub fn resume(&self, rank: usize) -> Result<()> {
        self.signal(rank, Signal::CONT)
    }

    /// How a rank ended; an error with its output if it still runs after `within`.
    pub fn wait_rank(&self, rank: usize, within: Duration) -> Result<Exit> {
        match self.job.wait_rank(rank, Instant::now() + within)? {
            Some(exit) => Ok(exit),
            None => bail!("rank {rank} still runs after {within:?}; it printed:\n{}", self.printed(rank)),
        }
    }

    /// What a rank has printed so far, stdout first.
    pub fn printed(&self, rank: usize) -> String {
        let (stdout, stderr) = self.job.output(rank);
        let stdout = in_rank::own_output(&stdout).unwrap_or(stdout);
        String::from_utf8_lossy(&[stdout, stderr].concat()).into_owned()
    }

    /// The watch that finds what the ranks leave behind; [`wait_all`](Self::wait_all) and [`wait`](Self::wait) check it
    /// themselves.
    pub fn watch(&self) -> Watch {
        self.watch.clone()
    }

    /// Every rank's exit and output, whether it succeeded or not; an error if one still runs after `within` (all are
    /// killed then).
    pub fn wait_all(self, within: Duration) -> Result<JobReport> {
        if self.job.wait_all(Instant::now() + within) {
            return self.wait();
        }
        let now = Instant::now();
        let runs = |rank: &usize| matches!(self.job.wait_rank(*rank, now), Ok(None));
        let late: Vec<_> = self.job.ranks().into_iter().filter(runs).collect();
        let printed: String =
            late.iter().map(|rank| format!("---- rank {rank}\n{}\n", self.printed(*rank))).collect();
        bail!("ranks {late:?} of `{}` still run after {within:?}; they printed:\n{printed}", self.name)
    }

    /// Like [`wait_all`](Self::wait_all), with the time limit of the whole test, which stops them all.
    /// Both fail if anything of the ranks is left a second after the end.
    pub fn wait(self) -> Result<JobReport> {
        let mut report = self.job.wait();
        for rank in &mut report.ranks {
            match in_rank::own_output(&rank.stdout) {
                Some(own) => rank.stdout = own,
                None if in_rank::found_no_test(&rank.stdout) => {
                    bail!("libtest knows no test `{}`", self.name)
                }
                None => {}
            }
        }
        self.watch.none_within(CLEAN_WITHIN).map_err(|left| anyhow!("{left}\n{report}"))?;
        Ok(report)
    }
}
