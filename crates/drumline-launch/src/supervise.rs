//! The thread that starts a job's workers, notices each end at once, and stops the others when necessary.
//!
//! ```text
//!   start all ─▶ epoll(every worker's pidfd, wake-up) ─▶ reap ─▶ decide (`stop`) ─▶ signal ─▶ … ─▶ none left
//! ```
//!
//! This thread also forks the workers, because the kernel kills a worker when the *thread* that forked it ends. epoll
//! returns descriptors in the order in which they became ready. So the first failure is found even when this thread
//! wakes late and finds several.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use rustix::event::{Timespec, epoll};
use rustix::process::{Rlimit, Signal};

use crate::LaunchError;
use crate::descriptors::FdLimit;
use crate::logs::{Channel, Sink};
use crate::prepare::Orphans;
use crate::pump::{Output, Pump};
use crate::report::{Exit, StopReason};
use crate::running::RunOptions;
use crate::spawn_advice::spawn_advice;
use crate::stop::{FirstFailure, Phase, Request, StopPolicy, View, decide, next_deadline, reason};
use crate::streams::{Stream, Streams};
use crate::worker::{Ended, Worker, WorkerSpec};

/// Marks the wake-up descriptor among the workers' indices in epoll's results.
const WAKE: u64 = u64::MAX;

/// Called for each worker that ends, on the supervisor's thread.
pub(crate) type OnExit = Box<dyn FnMut(&Ended, Exit) + Send>;

/// What other parts of the launcher do when workers end.
pub(crate) struct Hooks {
    pub(crate) on_exit: OnExit,
    /// Called when all workers have ended, before the wait for their last output.
    pub(crate) on_end: Box<dyn FnOnce() + Send>,
}

impl Default for Hooks {
    fn default() -> Self {
        Self { on_exit: Box::new(|_, _| ()), on_end: Box::new(|| ()) }
    }
}

/// The job that the supervisor runs.
pub(crate) struct JobSpec {
    pub(crate) workers: Vec<WorkerSpec>,
    pub(crate) options: RunOptions,
    pub(crate) started: Instant,
    pub(crate) hooks: Hooks,
}

/// What the owner of a job and its supervisor share.
#[derive(Debug)]
pub(crate) struct SharedJob {
    state: Mutex<JobState>,
    changed: Condvar,
    policy: StopPolicy,
    pub(crate) wake: OwnedFd,
    pub(crate) streams: Arc<Streams>,
}

/// The workers and their current state.
#[derive(Debug, Default)]
pub(crate) struct JobState {
    pub(crate) workers: Vec<Worker>,
    pub(crate) root_cause: Option<usize>,
    pub(crate) stopped: Option<StopReason>,
    pub(crate) request: Option<Request>,
    /// Whether all have ended or were given up.
    pub(crate) over: bool,
}

impl SharedJob {
    pub(crate) fn new(wake: OwnedFd, policy: StopPolicy) -> Self {
        Self { state: Mutex::default(), changed: Condvar::new(), policy, wake, streams: Arc::default() }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, JobState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `condition` holds; false if `deadline` came first.
    pub(crate) fn wait_until(&self, deadline: Instant, condition: impl Fn(&JobState) -> bool) -> bool {
        let left = deadline.saturating_duration_since(Instant::now());
        let waiting = self.changed.wait_timeout_while(self.lock(), left, |state| !condition(state));
        !waiting.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    /// Requests a stop, and wakes the supervisor.
    pub(crate) fn request_stop(&self, request: Request) {
        let mut state = self.lock();
        let earlier = state.request;
        state.request = Some(earlier.map_or(request, |earlier| earlier.merge(request, &self.policy)));
        drop(state);
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }
}

impl JobState {
    pub(crate) fn worker(&self, rank: usize) -> Result<&Worker, LaunchError> {
        let found = self.workers.iter().find(|worker| worker.rank == rank);
        found.ok_or(LaunchError::NoSuchRank { rank, local: self.workers.len() })
    }

    /// How a worker ended; `None` while it runs.
    pub(crate) fn exit(&self, worker: &Worker) -> Option<Exit> {
        match worker.ended {
            None => self.over.then_some(Exit::Unkillable),
            Some(Ended { signal: Some(signal), .. }) if worker.was_stopped_with(signal) => {
                Some(Exit::StoppedByUs)
            }
            Some(Ended { signal: Some(signal), .. }) => Some(Exit::Signal(signal)),
            Some(Ended { code, .. }) => Some(Exit::Code(code.unwrap_or(-1))),
        }
    }

    fn view(&self, deadline: Option<Instant>) -> View {
        let alive = self.workers.iter().filter(|worker| worker.ended.is_none()).count();
        let at = |rank: usize| Some(self.worker(rank).ok()?.ended?.at);
        let first_failed = self.root_cause.and_then(|rank| Some(FirstFailure { rank, at: at(rank)? }));
        View { alive, first_failed, request: self.request, deadline }
    }
}

/// Starts the workers, reports the result through `started`, and returns when no worker is left.
pub(crate) fn supervise(
    shared: &SharedJob,
    mut job: JobSpec,
    started: impl FnOnce(Result<(), LaunchError>) + Send,
) {
    let fd_limit = FdLimit::raise_for(job.workers.len());
    match start_all(shared, &job, fd_limit.before) {
        Ok((epoll, pump)) => {
            started(Ok(()));
            run(shared, &mut job, &epoll);
            (job.hooks.on_end)();
            drop(pump);
        }
        Err(error) => {
            abandon(shared);
            started(Err(error));
        }
    }
    shared.lock().over = true;
    shared.changed.notify_all();
}

/// Starts every worker, and watches it and its output. `limit` is each worker's limit of open files.
fn start_all(shared: &SharedJob, job: &JobSpec, limit: Rlimit) -> Result<(OwnedFd, Pump), LaunchError> {
    let system = LaunchError::system("watch the workers");
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(&system)?;
    watch(&epoll, &shared.wake, WAKE).map_err(&system)?;
    let mut sources = Vec::new();
    for (index, worker) in job.workers.iter().enumerate() {
        let sinks = sinks(&job.options.output, worker.rank, index)?;
        sources.extend(start_one(shared, worker, &job.options.output, limit)?.into_iter().zip(sinks));
        // Watch it before the next one is started, so that an early end keeps its place in the order.
        watch(&epoll, &shared.lock().workers[index].pidfd, index as u64).map_err(&system)?;
    }
    let pump = Pump::start(sources, Arc::clone(&shared.streams))
        .map_err(LaunchError::system("read the workers' output"))?;
    Ok((epoll, pump))
}

/// The destinations of a worker's streams. They are opened before the worker starts: a worker that cannot be logged is
/// not started.
fn sinks(output: &Output, rank: usize, local_rank: usize) -> Result<Vec<Sink>, LaunchError> {
    let sinks = Channel::BOTH.map(|channel| output.sink(rank, local_rank, channel));
    Ok(sinks.into_iter().collect::<Result<_, _>>()?)
}

/// Starts a worker and returns its pipes, if it has any.
fn start_one(
    shared: &SharedJob,
    spec: &WorkerSpec,
    output: &Output,
    limit: Rlimit,
) -> Result<Vec<OwnedFd>, LaunchError> {
    let started = Worker::start(spec, output, limit, Orphans::Die);
    let (worker, pipes) = started.map_err(|source| LaunchError::Spawn {
        rank: spec.rank,
        program: spec.program.to_string_lossy().into(),
        advice: spawn_advice(&spec.program, &source),
        source,
    })?;
    shared.lock().workers.push(worker);
    if !pipes.is_empty() {
        let kept = |channel| Stream::new(spec.rank, channel, output.kept());
        shared.streams.lock().extend(Channel::BOTH.map(kept));
    }
    Ok(pipes)
}

fn watch(epoll: &OwnedFd, fd: &OwnedFd, data: u64) -> rustix::io::Result<()> {
    epoll::add(epoll, fd, epoll::EventData::new_u64(data), epoll::EventFlags::IN)
}

/// Kills and reaps the started workers, because not all could be started.
fn abandon(shared: &SharedJob) {
    for worker in &mut shared.lock().workers {
        worker.stop(Signal::KILL);
        worker.wait_for_end(StopPolicy::default().patience);
        worker.reap();
    }
}

fn run(shared: &SharedJob, job: &mut JobSpec, epoll: &OwnedFd) {
    let deadline = job.options.deadline.and_then(|deadline| job.started.checked_add(deadline));
    let policy = &job.options.stop;
    let mut phase = Phase::Running;
    loop {
        let now = Instant::now();
        let view = shared.lock().view(deadline);
        let next = decide(now, phase, &view, policy);
        if next != phase {
            enter(shared, next, reason(now, &view, policy));
            phase = next;
        }
        if phase == Phase::Over {
            return;
        }
        for (ended, exit) in reap_ready(shared, epoll, next_deadline(phase, &view, policy)) {
            (job.hooks.on_exit)(&ended, exit);
        }
    }
}

/// Signals the workers as a new phase requires.
fn enter(shared: &SharedJob, phase: Phase, why: Option<StopReason>) {
    let mut state = shared.lock();
    let signal = match phase {
        Phase::Terminating { .. } => state.request.map_or(Signal::TERM, Request::signal),
        Phase::Killing { .. } => Signal::KILL,
        Phase::Running | Phase::Over => return,
    };
    state.stopped = state.stopped.or(why);
    tracing::debug!(?phase, ?why, "stopping the workers");
    state.workers.iter_mut().filter(|worker| worker.ended.is_none()).for_each(|worker| worker.stop(signal));
}

/// Sleeps until a worker ends, the owner requests something, or `until`. Returns the ends in the order they happened.
fn reap_ready(shared: &SharedJob, epoll: &OwnedFd, until: Option<Instant>) -> Vec<(Ended, Exit)> {
    let left = until.map(|until| until.saturating_duration_since(Instant::now()));
    let timeout = left.and_then(|left| Timespec::try_from(left).ok());
    let mut events = Vec::with_capacity(64);
    // An error (interrupted) means that nothing is ready; the caller's loop calls this again.
    let _ = epoll::wait(epoll, rustix::buffer::spare_capacity(&mut events), timeout.as_ref());
    let mut ends = Vec::new();
    let mut state = shared.lock();
    for event in &events {
        match event.data.u64() {
            WAKE => drop(rustix::io::read(&shared.wake, &mut [0; 8])),
            index => ends.extend(state.reap(index as usize, epoll)),
        }
    }
    drop(state);
    shared.changed.notify_all();
    ends
}

impl JobState {
    fn reap(&mut self, index: usize, epoll: &OwnedFd) -> Option<(Ended, Exit)> {
        let worker = &mut self.workers[index];
        let ended = worker.reap()?;
        let _ = epoll::delete(epoll, &worker.pidfd);
        let exit = self.exit(&self.workers[index])?;
        tracing::debug!(rank = ended.rank, pid = ended.pid, %exit, "worker ended");
        if self.root_cause.is_none() && self.stopped.is_none() && !exit.is_success() {
            self.root_cause = Some(ended.rank);
        }
        Some((ended, exit))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    #[test]
    fn ends_are_returned_in_order_even_when_seen_together() {
        let soon = Duration::from_secs(10);
        for order in [[2, 0, 1], [1, 2, 0], [0, 1, 2]] {
            let shared = SharedJob::new(eventfd(0, EventfdFlags::CLOEXEC).unwrap(), StopPolicy::default());
            let args = vec!["60".into()];
            let spec = |rank| WorkerSpec {
                rank,
                program: "sleep".into(),
                args: args.clone(),
                ..WorkerSpec::default()
            };
            let job = JobSpec {
                workers: (0..3).map(spec).collect(),
                options: RunOptions::default(),
                started: Instant::now(),
                hooks: Hooks::default(),
            };
            let (epoll, _pump) = start_all(&shared, &job, FdLimit::raise_for(3).before).unwrap();
            for rank in order {
                let state = shared.lock();
                state.workers[rank].signal(Signal::KILL).unwrap();
                assert!(state.workers[rank].wait_for_end(soon));
            }
            let ends = reap_ready(&shared, &epoll, Some(Instant::now() + soon));
            assert_eq!(ends.iter().map(|(ended, _)| ended.rank).collect::<Vec<_>>(), order);
            assert_eq!(shared.lock().root_cause, Some(order[0]));
        }
    }
}
