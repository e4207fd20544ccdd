//! The owner's handle of a running job. Dropping it kills and reaps every worker.

use std::io;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use rustix::process::Signal;

use crate::LaunchError;
use crate::hosted_store::HostedStore;
use crate::pump::{DRAIN, Output};
use crate::report::{Exit, JobReport, RankReport};
use crate::stop::{Request, StopPolicy};
use crate::supervise::{Hooks, JobSpec, JobState, SharedJob, supervise};
use crate::worker::{Worker, WorkerSpec};

/// How workers are run.
#[derive(Debug, Clone, Default)]
pub struct RunOptions {
    /// Where their output goes.
    pub output: Output,
    /// How they are stopped.
    pub stop: StopPolicy,
    /// All are stopped this long after the start; never if `None`.
    pub deadline: Option<Duration>,
}

/// The workers of this node, started and watched.
#[derive(Debug)]
pub struct RunningJob {
    shared: Arc<SharedJob>,
    started: Instant,
    supervisor: Option<JoinHandle<()>>,
    /// The workers' store, which lives as long as they do.
    _store: Option<HostedStore>,
}

impl RunningJob {
    /// Starts workers that need no store of this launcher.
    pub fn start(specs: Vec<WorkerSpec>, options: RunOptions) -> Result<Self, LaunchError> {
        Self::supervised(specs, options, Hooks::default(), None)
    }

    pub(crate) fn supervised(
        specs: Vec<WorkerSpec>,
        options: RunOptions,
        hooks: Hooks,
        store: Option<HostedStore>,
    ) -> Result<Self, LaunchError> {
        if specs.is_empty() {
            return Err(LaunchError::NoProcesses);
        }
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(LaunchError::system("set up the supervisor"))?;
        let shared = Arc::new(SharedJob::new(wake, options.stop.clone()));
        let started = Instant::now();
        let (answer, answered) = mpsc::channel();
        let job_of_thread = Arc::clone(&shared);
        let spec = JobSpec { workers: specs, options, started, hooks };
        let supervisor = std::thread::Builder::new()
            .name("drumline-job".to_string())
            .spawn(move || supervise(&job_of_thread, spec, |result| drop(answer.send(result))))
            .map_err(LaunchError::system("start the supervisor"))?;
        let job = Self { shared, started, supervisor: Some(supervisor), _store: store };
        let gone = |_| LaunchError::system("start the workers")(io::Error::other("the supervisor ended"));
        answered.recv().map_err(gone)??;
        Ok(job)
    }

    /// The ranks of this node, in the order they were started.
    pub fn ranks(&self) -> Vec<usize> {
        self.shared.lock().workers.iter().map(|worker| worker.rank).collect()
    }

    /// The process id of a rank.
    pub fn pid(&self, rank: usize) -> Result<u32, LaunchError> {
        Ok(self.shared.lock().worker(rank)?.pid())
    }

    /// Sends a signal to a rank's whole process group; an error if it has already ended.
    pub fn signal(&self, rank: usize, signal: Signal) -> Result<(), LaunchError> {
        let state = self.shared.lock();
        let worker = state.worker(rank)?;
        match state.exit(worker) {
            Some(exit) => Err(LaunchError::Ended { rank, exit }),
            None => worker.signal(signal).map_err(LaunchError::system("signal a worker")),
        }
    }

    /// Stops all workers: SIGTERM, then SIGKILL after the grace time. Returns at once; [`wait`](Self::wait) waits for
    /// the end.
    pub fn stop(&self) {
        self.shared.request_stop(Request::STOP);
    }

    /// A handle with which others can stop the job while its owner waits for it.
    pub(crate) fn control(&self) -> JobControl {
        JobControl(Arc::clone(&self.shared))
    }

    /// Waits until `deadline` for a rank to end. Returns how it ended, or `None` if it still runs. Its last output is
    /// complete by then, unless a process that escaped from the worker still holds the pipe.
    pub fn wait_rank(&self, rank: usize, deadline: Instant) -> Result<Option<Exit>, LaunchError> {
        let exit = |state: &JobState| state.worker(rank).map(|worker| state.exit(worker));
        self.shared.wait_until(deadline, |state| !matches!(exit(state), Ok(None)));
        let exit = exit(&self.shared.lock())?;
        if exit.is_some() {
            self.shared.streams.wait_for_end(rank, Instant::now() + DRAIN);
        }
        Ok(exit)
    }

    /// Waits until `deadline` for all workers to end. Returns whether they did.
    pub fn wait_all(&self, deadline: Instant) -> bool {
        self.shared.wait_until(deadline, |state| state.over)
    }

    /// Waits until a rank prints a line that contains `needle` on either stream, and returns that line.
    /// Returns an error if the rank ends or `deadline` passes first, and at once if its output is inherited.
    pub fn wait_for_line(&self, rank: usize, needle: &str, deadline: Instant) -> Result<String, LaunchError> {
        self.shared.lock().worker(rank)?;
        let mut streams = self.shared.streams.lock();
        loop {
            let mut of_rank = streams.iter().filter(|stream| stream.rank == rank);
            let line = of_rank.clone().find_map(|stream| whole_line(&stream.tail.held(), needle));
            if let Some(line) = line {
                return Ok(line);
            }
            let why = if !of_rank.any(|stream| stream.open) {
                "before it ended"
            } else if Instant::now() >= deadline {
                "in time"
            } else {
                streams = self.shared.streams.wait(streams, deadline);
                continue;
            };
            drop(streams);
            let (stdout, stderr) = self.shared.streams.of_rank(rank);
            let output = String::from_utf8_lossy(&[stdout, stderr].concat()).into_owned();
            return Err(LaunchError::NoSuchLine { rank, needle: needle.to_string(), why, output });
        }
    }

    /// The last bytes of a rank's stdout and stderr so far.
    pub fn output(&self, rank: usize) -> (Vec<u8>, Vec<u8>) {
        self.shared.streams.of_rank(rank)
    }

    /// Waits for the end of all workers. The first failure stops the others (see [`StopPolicy`](crate::StopPolicy)).
    pub fn wait(mut self) -> JobReport {
        self.join();
        let state = self.shared.lock();
        let mut ranks: Vec<_> = state.workers.iter().map(|worker| self.report(&state, worker)).collect();
        ranks.sort_by_key(|report| report.rank);
        JobReport { ranks, root_cause: state.root_cause, stopped: state.stopped }
    }

    fn report(&self, state: &JobState, worker: &Worker) -> RankReport {
        let exit = state.exit(worker).unwrap_or(Exit::Unkillable);
        let ended_after = worker.ended.map_or(Duration::MAX, |ended| ended.at - self.started);
        let (stdout, stderr) = self.shared.streams.of_rank(worker.rank);
        let core_dumped = worker.ended.is_some_and(|ended| ended.core_dumped);
        RankReport { rank: worker.rank, pid: worker.pid(), exit, core_dumped, ended_after, stdout, stderr }
    }

    fn join(&mut self) {
        if let Some(supervisor) = self.supervisor.take() {
            // The supervisor does not panic. If it did, the kernel has killed the workers with its thread.
            let _ = supervisor.join();
        }
    }
}

/// Controls a job for others than its owner.
#[derive(Debug, Clone)]
pub(crate) struct JobControl(Arc<SharedJob>);

impl JobControl {
    /// Stops all workers: sends `signal` after `settle`, and SIGKILL after `grace`.
    pub(crate) fn stop(&self, signal: Signal, settle: Duration, grace: Duration) {
        let not_before =
            Some(settle).filter(|settle| !settle.is_zero()).map(|settle| Instant::now() + settle);
        self.0.request_stop(Request::Stop { signal, grace: Some(grace), not_before });
    }

    pub(crate) fn kill(&self) {
        self.0.request_stop(Request::Kill);
    }

    /// The process ids of the workers, ended or not.
    pub(crate) fn pids(&self) -> Vec<u32> {
        self.0.lock().workers.iter().map(Worker::pid).collect()
    }

    /// Signals one worker, if it belongs to this node and still runs.
    pub(crate) fn signal_rank(&self, rank: usize, signal: Signal) {
        if let Ok(worker) = self.0.lock().worker(rank) {
            // An error means that it has already ended.
            let _ = worker.signal(signal);
        }
    }

    /// Forwards a signal to every running worker.
    pub(crate) fn signal_all(&self, signal: Signal) {
        for worker in &self.0.lock().workers {
            // An error means that it has already ended.
            let _ = worker.signal(signal);
        }
    }
}

impl Drop for RunningJob {
    fn drop(&mut self) {
        if self.supervisor.is_some() {
            self.shared.request_stop(Request::Kill);
            self.join();
        }
    }
}

/// The first complete line that contains `needle`.
fn whole_line(bytes: &[u8], needle: &str) -> Option<String> {
    let finished = &bytes[..=bytes.iter().rposition(|byte| *byte == b'\n')?];
    let text = String::from_utf8_lossy(finished);
    text.lines().find(|line| line.contains(needle)).map(str::to_string)
}
