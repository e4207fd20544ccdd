//! A test's ranks before they run: their number, their environment, and their time limit.

use std::ffi::{OsStr, OsString};
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use drumline_launch::{
    JobReport, LocalJob, OnFailure, Output, RunOptions, RunningJob, StopPolicy, StopReason,
};

use drumline_rendezvous::fault::parse_faults;
use drumline_rendezvous::worker_env;

use crate::in_rank;
use crate::leftovers::Watch;
use crate::netns::Hosts;
use crate::placement::Placement;
use crate::running::RunningRanks;

/// The default time limit of a test.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(60);

/// Time between SIGTERM and SIGKILL for ranks of a test.
const GRACE: Duration = Duration::from_secs(1);

/// The ranks of one test, not started yet. A test may start them several times, for example with and without a fault.
#[derive(Debug, Clone)]
pub struct Ranks {
    name: String,
    nproc: usize,
    env: Vec<(OsString, OsString)>,
    timeout: Duration,
    placement: Option<Placement>,
}

impl Ranks {
    /// `nproc` ranks of the test `name` in the module `path` (the value of `module_path!()`).
    pub fn of_test(path: &str, name: &str, nproc: usize) -> Self {
        let name = in_rank::libtest_name(path, name);
        Self { name, nproc, env: Vec::new(), timeout: DEFAULT_TIMEOUT, placement: None }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Sets variables in every rank.
    pub fn env<N: AsRef<OsStr>, V: AsRef<OsStr>>(mut self, pairs: impl IntoIterator<Item = (N, V)>) -> Self {
        let owned = |(name, value): (N, V)| (name.as_ref().to_owned(), value.as_ref().to_owned());
        self.env.extend(pairs.into_iter().map(owned));
        self
    }

    /// Stops all ranks when they have run this long; [`DEFAULT_TIMEOUT`] by default.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Sets faults that ranks inject into themselves, such as `rank=2,step=5,kill` (see [`fault`](crate::fault)).
    /// Panics on an invalid text.
    pub fn fault(self, spec: &str) -> Self {
        parse_faults(spec).unwrap_or_else(|error| panic!("{error}"));
        self.env([(worker_env::DRUMLINE_FAULTS, spec)])
    }

    /// Runs the ranks on several hosts: the n-th list has those of the n-th host. Rank 0 hosts the store.
    pub fn on_hosts(mut self, hosts: &Hosts, ranks: &[&[usize]]) -> Self {
        let placement = Placement::new(hosts, ranks);
        self.nproc = placement.world_size();
        self.placement = Some(placement);
        self
    }

    /// Changes the number of ranks.
    pub fn nproc(mut self, nproc: usize) -> Self {
        self.nproc = nproc;
        self
    }

    /// Starts the ranks. A failing rank does not stop the others: the test decides what that means.
    pub fn start(&self) -> Result<RunningRanks> {
        self.start_with(OnFailure::LetOthersRun)
    }

    /// Runs the ranks to their end; an error with the output of those that failed, unless all succeed.
    pub fn pass(&self) -> Result<JobReport> {
        let report = self.start_with(OnFailure::StopOthers)?.wait()?;
        if report.is_success() { Ok(report) } else { Err(anyhow!("{}", self.failure(&report))) }
    }

    fn start_with(&self, on_failure: OnFailure) -> Result<RunningRanks> {
        let mut watch = Watch::new();
        let job = match &self.placement {
            None => self.start_here(on_failure, &watch),
            Some(placement) => self.start_on(placement, on_failure, &watch),
        };
        let job = job.with_context(|| format!("the ranks of `{}`", self.name))?;
        job.ranks().iter().filter_map(|rank| job.pid(*rank).ok()).for_each(|pid| watch.add_session(pid));
        Ok(RunningRanks::new(job, self.name.clone(), watch))
    }

    fn start_here(&self, on_failure: OnFailure, watch: &Watch) -> Result<RunningJob> {
        let job = LocalJob::this_program(self.nproc, in_rank::arguments(&self.name))?;
        let job = job.output(Output::Capture).on_failure(on_failure).grace(GRACE).deadline(self.timeout);
        Ok(self.all_env(watch).into_iter().fold(job, |job, (name, value)| job.env(name, value)).start()?)
    }

    fn start_on(&self, placement: &Placement, on_failure: OnFailure, watch: &Watch) -> Result<RunningJob> {
        let program = std::env::current_exe()?.into_os_string();
        let mut specs = placement.specs(&program, &in_rank::arguments(&self.name))?;
        for spec in &mut specs {
            spec.env.extend(self.all_env(watch).into_iter().map(|(name, value)| (name, Some(value))));
        }
        let stop = StopPolicy { on_failure, grace: GRACE, ..StopPolicy::default() };
        let options = RunOptions { output: Output::Capture, stop, deadline: Some(self.timeout) };
        Ok(RunningJob::start(specs, options)?)
    }

    fn all_env(&self, watch: &Watch) -> Vec<(OsString, OsString)> {
        let (mark, value) = watch.mark();
        let ours = [(in_rank::NAME.into(), self.name.clone().into()), (mark.into(), value.into())];
        self.env.iter().cloned().chain(ours).collect()
    }

    fn failure(&self, report: &JobReport) -> String {
        let late = match report.stopped {
            Some(StopReason::Deadline) => format!(" in {:?}", self.timeout),
            _ => String::new(),
        };
        format!("`{}` did not pass{late}: {report}{}", self.name, self.reproduction())
    }

    /// How to run this test alone.
    fn reproduction(&self) -> String {
        let package = std::env::var("CARGO_PKG_NAME").map(|name| format!(" -p {name}")).unwrap_or_default();
        format!("to run it alone: cargo test{package} -- --exact {}", self.name)
    }
}
