//! `spawn(n, f)`: runs `f` as `n` processes, each of them this program executed again.
//!
//! ```text
//!   main ─▶ spawn ─▶ LocalJob: the same program and arguments, n times ─▶ JobReport ─▶ Ok, or the root cause
//!                     │                                                      ▲
//!                     └▶ main again ─▶ the same spawn call ─▶ f(worker) ─▶ exit code, and a note (`notes`)
//! ```
//!
//! A *call* is identified by its place in the source and the number of earlier calls from there (`call`). What each
//! process does at a call is decided in `role`.

mod call;
mod error;
mod notes;
mod outcome;
mod role;
mod worker;

use std::ffi::{OsStr, OsString};
use std::panic::Location;
use std::time::{Duration, Instant};

use drumline_launch::{
    Evidence, FailureReport, LocalJob, OomSources, OomWatch, Output, RunningJob, Signal, StopReason,
};
use drumline_rendezvous::{Hello, Role as Speaker, worker_env};

use crate::StopRequest;
use call::Call;
use notes::{Findings, Notes};
use role::Role;

pub use error::{LaunchedError, SpawnError, WorkerEnvError};
pub use outcome::{Outcome, WorkerError};
pub use role::is_spawned;
pub use worker::Worker;

/// How often the parent looks for a stop request to forward.
const LOOK: Duration = Duration::from_millis(20);

/// Runs `f` as `nproc` processes on this machine, each of them this program executed again, and waits for their end.
///
/// In each process `main` runs again, with the same arguments, up to this call. There `f` runs, and the process ends,
/// so that nothing after the call is done twice. What comes *before* the call is done by each rank as well. Make the
/// call the first thing in `main`, or check [`is_spawned`] before printing or writing something once.
///
/// If a rank returns an error, panics or dies, the others are stopped and the first such failure is returned here. `f`
/// returns nothing, or a `Result` whose error can be displayed. The ranks print where this process prints, and read
/// nothing from stdin. If this process dies, so do they.
///
/// * Several calls in one program run one after the other. A rank skips the calls that are not its own.
/// * A call from within `f` is an error.
/// * In a program that a launcher has started (`drumline run`, torchrun: `RANK` is set) the ranks exist already: `f`
///   runs in this process as that rank, and another number of ranks than `nproc` is an error.
///
/// ```no_run
/// fn main() -> Result<(), drumline::SpawnError> {
///     let steps = std::env::args().nth(1).map_or(10, |steps| steps.parse().expect("a number of steps"));
///     drumline::spawn(2, |worker| println!("rank {} makes {steps} steps", worker.rank))
/// }
/// ```
#[track_caller]
pub fn spawn<T: Outcome>(nproc: usize, f: impl FnOnce(Worker) -> T) -> Result<(), SpawnError> {
    Spawn::new(nproc).run(f)
}

/// [`spawn`] with options.
///
/// ```no_run
/// use std::time::Duration;
///
/// # fn main() -> Result<(), drumline::SpawnError> {
/// let stop = drumline::StopRequest::listen().expect("signals can be handled");
/// drumline::launch::Spawn::new(4)
///     .env("DRUMLINE_TRANSPORT", "tcp")
///     .timeout(Duration::from_secs(3600))
///     .forward_stop(&stop)
///     .run(|worker| while !stop.is_requested() { /* a step */ })
/// # }
/// ```
#[derive(Debug, Clone)]
#[must_use]
pub struct Spawn {
    nproc: usize,
    env: Vec<(OsString, OsString)>,
    args: Option<Vec<OsString>>,
    output: Output,
    grace: Option<Duration>,
    timeout: Option<Duration>,
    stop: Option<StopRequest>,
}

impl Spawn {
    /// `nproc` ranks, otherwise as [`spawn`] does it.
    pub fn new(nproc: usize) -> Self {
        let (output, env) = (Output::Inherit, Vec::new());
        Self { nproc, env, args: None, output, grace: None, timeout: None, stop: None }
    }

    /// Sets a variable in every rank.
    pub fn env(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        self.env.push((name.as_ref().to_owned(), value.as_ref().to_owned()));
        self
    }

    /// Passes these arguments to the ranks instead of this process's own. Tests need it, to be found again in their
    /// binary.
    pub fn args<A: Into<OsString>>(mut self, args: impl IntoIterator<Item = A>) -> Self {
        self.args = Some(args.into_iter().map(Into::into).collect());
        self
    }

    /// Where the ranks' output goes; by default to that of this process, unchanged. With [`Output::Capture`] the error
    /// contains the last lines of the rank that failed.
    pub fn output(mut self, output: Output) -> Self {
        self.output = output;
        self
    }

    /// The time between SIGTERM and SIGKILL for the other ranks when one has failed; default 5 s.
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = Some(grace);
        self
    }

    /// Stops all ranks when they have run this long; by default never.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Forwards a stop request of this process to every rank, as the signal it came by (for Ctrl-C, SIGTERM). Without
    /// it a signal ends this process, and the ranks are killed with it.
    pub fn forward_stop(mut self, stop: &StopRequest) -> Self {
        self.stop = Some(stop.clone());
        self
    }

    /// Runs `f` in each rank; see [`spawn`].
    #[track_caller]
    pub fn run<T: Outcome>(self, f: impl FnOnce(Worker) -> T) -> Result<(), SpawnError> {
        let call = call::next(Location::caller());
        match Role::here(&call, self.nproc, &self.env)? {
            Role::Worker { worker, notes } => worker::run(worker, &notes, f),
            Role::PassesBy => Ok(()),
            Role::InPlace(worker) => worker::run_in_place(worker, f),
            Role::Parent => {
                let outcome = self.start_and_wait(&call);
                outcome.inspect_err(|error| call::remember_failure(&call, error))
            }
        }
    }

    fn start_and_wait(self, call: &Call) -> Result<(), SpawnError> {
        let (notes, timeout, nproc) = (Notes::new()?, self.timeout, self.nproc);
        let mut watch = OomWatch::start(&OomSources::default());
        let stop = self.stop.clone();
        let job = self.job(call, &notes)?.start()?;
        let report = match stop {
            Some(stop) => wait_handing_on(job, &stop),
            None => job.wait(),
        };
        if report.stopped == Some(StopReason::Deadline) {
            return Err(SpawnError::TimedOut { after: timeout.unwrap_or_default() });
        }
        let findings = notes.read()?;
        let host = Hello::new(Speaker::Store).host;
        let evidence: Vec<_> = (report.ranks.iter())
            .map(|rank| {
                findings.add_to(Evidence::at(rank.rank, rank.rank, &host).gather(rank, None, &mut watch))
            })
            .collect();
        if let Some(report) = FailureReport::new(&report, &evidence) {
            return Err(failed(call, report, &findings));
        }
        match (0..nproc).find(|rank| !findings.has_reached(*rank)) {
            Some(rank) => Err(SpawnError::NeverReached { rank, call: call.place().to_owned() }),
            None => Ok(()),
        }
    }

    fn job(self, call: &Call, notes: &Notes) -> Result<LocalJob, SpawnError> {
        let args = self.args.unwrap_or_else(|| std::env::args_os().skip(1).collect());
        let job = LocalJob::this_program(self.nproc, args).map_err(SpawnError::Setup)?;
        let ticket = role::ticket(call, notes);
        // The ranks must not write the error file of this process's own launcher.
        let job =
            job.env(worker_env::TORCHELASTIC_ERROR_FILE, "").output(self.output).keep(notes.descriptor());
        let job = self.env.into_iter().fold(job, |job, (name, value)| job.env(name, value));
        let job = self.grace.into_iter().fold(job, LocalJob::grace);
        let job = self.timeout.into_iter().fold(job, LocalJob::deadline);
        Ok(job.env(worker_env::DRUMLINE_SPAWN, ticket))
    }
}

fn failed(call: &Call, report: FailureReport, findings: &Findings) -> SpawnError {
    let before = (!findings.has_reached(report.root.rank)).then(|| call.place().to_owned());
    SpawnError::Failed { report: Box::new(report), before }
}

/// Waits for the end, and forwards the first stop request to every rank that still runs.
fn wait_handing_on(job: RunningJob, stop: &StopRequest) -> drumline_launch::JobReport {
    while !job.wait_all(Instant::now() + LOOK) {
        if let Some(signal) = stop.signal() {
            // A second SIGINT would end a rank at once, and the terminal may have sent it the first already.
            let signal = if signal == Signal::INT { Signal::TERM } else { signal };
            // A rank that has ended needs no signal.
            job.ranks().into_iter().for_each(|rank| drop(job.signal(rank, signal)));
            break;
        }
    }
    job.wait()
}
