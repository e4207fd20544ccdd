//! The thread that starts a job's workers, sees each end at once, and stops the others when it must.
//!
//! ```text
//!   start all ─▶ epoll(every worker's pidfd, wake-up) ─▶ reap ─▶ decide (`stop`) ─▶ signal ─▶ … ─▶ nobody left
//! ```
//!
//! It is also the thread that forks, as the kernel kills a worker when the *thread* that forked it ends.
//! epoll hands out descriptors in the order in which they became ready, so the first failure is the first
//! one even when this thread wakes late and finds several.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use rustix::event::{Timespec, epoll};
use rustix::process::{Rlimit, Signal};

use crate::LaunchError;
use crate::descriptors::Room;
use crate::logs::{Channel, Sink};
use crate::prepare::Orphans;
use crate::pump::{Output, Pump};
use crate::report::{Exit, StopReason};
use crate::running::RunOptions;
use crate::spawn_advice::spawn_advice;
use crate::stop::{FirstFailure, Phase, Request, StopPolicy, View, decide, next_look, reason};
use crate::streams::{Stream, Streams};
use crate::worker::{Ended, Worker, WorkerSpec};

/// Marks the wake-up descriptor among the workers' indices in epoll's answers.
const WAKE: u64 = u64::MAX;

/// Called with each worker's end, on the supervisor's thread.
pub(crate) type OnExit = Box<dyn FnMut(&Ended, Exit) + Send>;

/// What others have to do with a job.
pub(crate) struct Hooks {
    pub(crate) on_exit: OnExit,
    /// Called when all workers have ended, before the last of their output is waited for.
    pub(crate) on_end: Box<dyn FnOnce() + Send>,
}

impl Default for Hooks {
    fn default() -> Self {
        Self { on_exit: Box::new(|_, _| ()), on_end: Box::new(|| ()) }
    }
}

/// What the supervisor is to do.
pub(crate) struct Orders {
    pub(crate) specs: Vec<WorkerSpec>,
    pub(crate) options: RunOptions,
    pub(crate) started: Instant,
    pub(crate) hooks: Hooks,
}

/// What the owner of a job and its supervisor share.
#[derive(Debug)]
pub(crate) struct Crew {
    roster: Mutex<Roster>,
    changed: Condvar,
    policy: StopPolicy,
    pub(crate) wake: OwnedFd,
    pub(crate) streams: Arc<Streams>,
}

/// The workers and what has become of them.
#[derive(Debug, Default)]
pub(crate) struct Roster {
    pub(crate) workers: Vec<Worker>,
    pub(crate) root_cause: Option<usize>,
    pub(crate) stopped: Option<StopReason>,
    pub(crate) request: Option<Request>,
    /// All have ended or were given up.
    pub(crate) over: bool,
}

impl Crew {
    pub(crate) fn new(wake: OwnedFd, policy: StopPolicy) -> Self {
        let (roster, changed) = (Mutex::new(Roster::default()), Condvar::new());
        Self { roster, changed, policy, wake, streams: Arc::default() }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Roster> {
        self.roster.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `is_so` holds; false if `deadline` came first.
    pub(crate) fn wait_until(&self, deadline: Instant, is_so: impl Fn(&Roster) -> bool) -> bool {
        let left = deadline.saturating_duration_since(Instant::now());
        let waiting = self.changed.wait_timeout_while(self.lock(), left, |roster| !is_so(roster));
        !waiting.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    pub(crate) fn ask(&self, request: Request) {
        let mut roster = self.lock();
        let earlier = roster.request;
        roster.request = Some(earlier.map_or(request, |earlier| earlier.and(request, &self.policy)));
        drop(roster);
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }
}

impl Roster {
    pub(crate) fn worker(&self, rank: usize) -> Result<&Worker, LaunchError> {
        let found = self.workers.iter().find(|worker| worker.rank == rank);
        found.ok_or(LaunchError::NoSuchRank { rank, local: self.workers.len() })
    }

    /// How a worker ended; `None` while it runs.
    pub(crate) fn exit(&self, worker: &Worker) -> Option<Exit> {
        match worker.ended {
            None => self.over.then_some(Exit::Unkillable),
            Some(Ended { signal: Some(signal), .. }) if worker.was_told(signal) => Some(Exit::StoppedByUs),
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

/// Starts the workers, answers through `started`, and returns when none is left.
pub(crate) fn supervise(
    crew: &Crew,
    mut orders: Orders,
    started: impl FnOnce(Result<(), LaunchError>) + Send,
) {
    let room = Room::make(orders.specs.len());
    match start_all(crew, &orders, room.before) {
        Ok((epoll, pump)) => {
            started(Ok(()));
            run(crew, &mut orders, &epoll);
            (orders.hooks.on_end)();
            drop(pump);
        }
        Err(error) => {
            abandon(crew);
            started(Err(error));
        }
    }
    crew.lock().over = true;
    crew.changed.notify_all();
}

/// Starts and watches every worker, each of which may open as many files as `limit` says, and their output.
fn start_all(crew: &Crew, orders: &Orders, limit: Rlimit) -> Result<(OwnedFd, Pump), LaunchError> {
    let system = LaunchError::system("watch the workers");
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(&system)?;
    watch(&epoll, &crew.wake, WAKE).map_err(&system)?;
    let mut sources = Vec::new();
    for (index, spec) in orders.specs.iter().enumerate() {
        let sinks = sinks(&orders.options.output, spec.rank, index)?;
        sources.extend(start_one(crew, spec, &orders.options.output, limit)?.into_iter().zip(sinks));
        // At once, before the next is started: an early end keeps its place in the order.
        watch(&epoll, &crew.lock().workers[index].pidfd, index as u64).map_err(&system)?;
    }
    let pump = Pump::start(sources, Arc::clone(&crew.streams))
        .map_err(LaunchError::system("read the workers' output"))?;
    Ok((epoll, pump))
}

/// Where the streams of a worker lead. Asked for before it is there: what cannot be logged is not started.
fn sinks(output: &Output, rank: usize, local_rank: usize) -> Result<Vec<Sink>, LaunchError> {
    let sinks = Channel::BOTH.map(|channel| output.sink(rank, local_rank, channel));
    Ok(sinks.into_iter().collect::<Result<_, _>>()?)
}

/// Starts a worker and returns its pipes, if it has any.
fn start_one(
    crew: &Crew,
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
    crew.lock().workers.push(worker);
    if !pipes.is_empty() {
        let kept = |channel| Stream::new(spec.rank, channel, output.kept());
        crew.streams.lock().extend(Channel::BOTH.map(kept));
    }
    Ok(pipes)
}

fn watch(epoll: &OwnedFd, fd: &OwnedFd, data: u64) -> rustix::io::Result<()> {
    epoll::add(epoll, fd, epoll::EventData::new_u64(data), epoll::EventFlags::IN)
}

/// Not all could be started: those that were are killed and reaped.
fn abandon(crew: &Crew) {
    for worker in &mut crew.lock().workers {
        worker.stop(Signal::KILL);
        worker.wait_for_end(StopPolicy::default().patience);
        worker.reap();
    }
}

fn run(crew: &Crew, orders: &mut Orders, epoll: &OwnedFd) {
    let deadline = orders.options.deadline.and_then(|deadline| orders.started.checked_add(deadline));
    let policy = &orders.options.stop;
    let mut phase = Phase::Running;
    loop {
        let (now, view) = (Instant::now(), crew.lock().view(deadline));
        let next = decide(now, phase, &view, policy);
        if next != phase {
            enter(crew, next, reason(now, &view, policy));
            phase = next;
        }
        if phase == Phase::Over {
            return;
        }
        for (ended, exit) in reap_ready(crew, epoll, next_look(phase, &view, policy)) {
            (orders.hooks.on_exit)(&ended, exit);
        }
    }
}

/// Carries out a change of phase.
fn enter(crew: &Crew, phase: Phase, why: Option<StopReason>) {
    let mut roster = crew.lock();
    let signal = match phase {
        Phase::Terminating { .. } => roster.request.map_or(Signal::TERM, Request::signal),
        Phase::Killing { .. } => Signal::KILL,
        Phase::Running | Phase::Over => return,
    };
    roster.stopped = roster.stopped.or(why);
    tracing::debug!(?phase, ?why, "stopping the workers");
    roster.workers.iter_mut().filter(|worker| worker.ended.is_none()).for_each(|worker| worker.stop(signal));
}

/// Sleeps until a worker ends, the owner calls or `until`; returns the ends in the order they happened.
fn reap_ready(crew: &Crew, epoll: &OwnedFd, until: Option<Instant>) -> Vec<(Ended, Exit)> {
    let left = until.map(|until| until.saturating_duration_since(Instant::now()));
    let timeout = left.and_then(|left| Timespec::try_from(left).ok());
    let mut events = Vec::with_capacity(64);
    // An error (interrupted) means that nothing is ready; the caller's loop comes back here.
    let _ = epoll::wait(epoll, rustix::buffer::spare_capacity(&mut events), timeout.as_ref());
    let mut ends = Vec::new();
    let mut roster = crew.lock();
    for event in &events {
        match event.data.u64() {
            WAKE => drop(rustix::io::read(&crew.wake, &mut [0; 8])),
            index => ends.extend(roster.reap(index as usize, epoll)),
        }
    }
    drop(roster);
    crew.changed.notify_all();
    ends
}

impl Roster {
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
    fn ends_come_in_the_order_they_happened_even_when_seen_together() {
        let soon = Duration::from_secs(10);
        for order in [[2, 0, 1], [1, 2, 0], [0, 1, 2]] {
            let crew = Crew::new(eventfd(0, EventfdFlags::CLOEXEC).unwrap(), StopPolicy::default());
            let args = vec!["60".into()];
            let spec = |rank| WorkerSpec {
                rank,
                program: "sleep".into(),
                args: args.clone(),
                ..WorkerSpec::default()
            };
            let (specs, options) = ((0..3).map(spec).collect(), RunOptions::default());
            let orders = Orders { specs, options, started: Instant::now(), hooks: Hooks::default() };
            let (epoll, _pump) = start_all(&crew, &orders, Room::make(3).before).unwrap();
            for rank in order {
                let roster = crew.lock();
                roster.workers[rank].signal(Signal::KILL).unwrap();
                assert!(roster.workers[rank].wait_for_end(soon));
            }
            let ends = reap_ready(&crew, &epoll, Some(Instant::now() + soon));
            assert_eq!(ends.iter().map(|(ended, _)| ended.rank).collect::<Vec<_>>(), order);
            assert_eq!(crew.lock().root_cause, Some(order[0]));
        }
    }
}
