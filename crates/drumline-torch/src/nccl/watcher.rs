//! The threads of a communicator that detect hangs.
//!
//! ```text
//!   announcer   announces each call in the companion group, which detects different calls and late ranks
//!   asker       every few milliseconds: which calls have ended on the GPU?
//!   watcher     as often: has a group failed (lost rank, different calls)? has NCCL an error? is a call overdue?
//!               ─▶ both groups fail with that cause ─▶ the communicator is aborted, which ends its kernels
//! ```
//! The watcher itself makes no call to the driver, which may block while the program copies from a waiting GPU to
//! memory that is not pinned.
//!
//! After a failure calls return the same error as on the CPU. Calls never wait for these threads.

use std::collections::VecDeque;
use std::fmt;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use drumline_comm::{CommError, ExternalCall, GroupStatus, ProcessGroup};

use super::communicator::Line;
use crate::cuda::{Event, Follower, Launched, Stream, Timing, follow_launches, set_device};
use crate::error::TorchError;

/// How often watcher and asker check.
const CHECK_INTERVAL: Duration = Duration::from_millis(20);

/// After a problem is seen, how long to wait for the report of a lost or late rank, which is the better error.
const NEWS_WAIT: Duration = Duration::from_millis(600);

/// How long a graph may run after a rank has left normally: its collectives may be done, and the rest of it takes a
/// while.
const LEFT_WAIT: Duration = Duration::from_secs(10);

/// How many elements this rank sends to each rank and expects from each. Ranks compare these where lengths differ.
#[derive(Debug)]
pub(crate) struct Parts {
    pub(crate) sends: Vec<usize>,
    pub(crate) receives: Vec<usize>,
}

/// Announces calls to the other ranks, in parallel with the calls themselves.
#[derive(Debug)]
pub(super) struct Announcer {
    calls: Option<Sender<(ExternalCall, Option<Parts>)>>,
    thread: Option<JoinHandle<()>>,
}

impl Announcer {
    pub(super) fn new(companion: ProcessGroup) -> std::io::Result<Self> {
        let (sender, calls) = channel::<(ExternalCall, Option<Parts>)>();
        // If a call fails, the group stays failed, and the watcher sees it.
        let run = move || {
            calls.into_iter().for_each(|(call, parts)| match parts {
                None => drop(companion.agree_on(call)),
                Some(Parts { sends, receives }) => drop(companion.agree_on_uneven(call, &sends, &receives)),
            });
        };
        let thread = std::thread::Builder::new().name("nccl-announcer".into()).spawn(run)?;
        Ok(Self { calls: Some(sender), thread: Some(thread) })
    }

    pub(super) fn announce(&self, call: ExternalCall, parts: Option<Parts>) {
        // The thread lives until the sender is dropped.
        let _ = self.calls.as_ref().map(|calls| calls.send((call, parts)));
    }

    /// Waits until all calls are announced: other ranks may still make calls that this one has made. Each has a
    /// deadline.
    pub(super) fn end(&mut self) {
        self.calls = None;
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Work on the GPU that has not ended.
#[derive(Debug)]
pub(super) struct Outstanding {
    /// The event after it. A graph that is being launched has none yet.
    pub(super) done: Option<Event>,
    pub(super) work: Work,
}

/// Work on the GPU, and when it was queued.
#[derive(Debug, Clone)]
pub(super) struct Work {
    what: What,
    since: Instant,
}

/// Work that the GPU reports as failed.
#[derive(Debug)]
struct FailedWork {
    work: Work,
    error: TorchError,
}

#[derive(Debug, Clone)]
enum What {
    Call(ExternalCall),
    Graph(Launched),
}

/// How many calls of a graph are named.
const NAMED: usize = 8;

impl Work {
    pub(super) fn call(call: ExternalCall) -> Self {
        Self { what: What::Call(call), since: Instant::now() }
    }

    fn graph(launched: Launched) -> Self {
        Self { what: What::Graph(launched), since: Instant::now() }
    }

    fn is_graph(&self) -> bool {
        matches!(self.what, What::Graph(_))
    }
}

impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Launched { step, calls } = match &self.what {
            What::Call(call) => return write!(f, "{call}"),
            What::Graph(launched) => launched,
        };
        match step {
            Some(step) => write!(f, "the CUDA graph of step {step}")?,
            None => f.write_str("a CUDA graph")?,
        }
        // The calls of a `Ddp` are its buckets, in order.
        let named: Vec<String> = calls
            .iter()
            .enumerate()
            .take(NAMED)
            .map(|(index, call)| format!("bucket or call {index}: {call}"))
            .collect();
        let more = calls.len().saturating_sub(NAMED);
        let more = if more > 0 { format!(", and {more} more") } else { String::new() };
        write!(f, " with {} collectives ({}{more})", calls.len(), named.join(", "))
    }
}

/// A group whose collectives on the GPU may fail after they were queued.
pub(crate) trait Watched: Send + Sync {
    /// Why its results are not valid.
    fn failure(&self) -> Option<CommError>;
}

/// All of this process whose groups still exist.
static WATCHED: Mutex<Vec<Weak<dyn Watched>>> = Mutex::new(Vec::new());

fn watched() -> MutexGuard<'static, Vec<Weak<dyn Watched>>> {
    WATCHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Lets [`check_all`] look at a group, as long as it exists.
pub(crate) fn enlist(group: Weak<dyn Watched>) {
    let mut all = watched();
    all.retain(|known| known.strong_count() > 0);
    all.push(group);
}

/// An error if a group of this process has failed.
pub(super) fn check_all() -> Result<(), CommError> {
    let all: Vec<Arc<dyn Watched>> = watched().iter().filter_map(Weak::upgrade).collect();
    all.iter().find_map(|group| group.failure()).map_or(Ok(()), Err)
}

impl Watched for Watch {
    fn failure(&self) -> Option<CommError> {
        let is_ending = self.state().is_ending;
        if is_ending { None } else { Watch::failure(self) }
    }
}

/// The threads and what they watch.
#[derive(Debug)]
pub(super) struct Watcher {
    pub(super) timeout: Duration,
    watch: Arc<Watch>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct Watch {
    line: Arc<Line>,
    group: GroupStatus,
    companion: GroupStatus,
    timeout: Duration,
    state: Mutex<State>,
    woken: Condvar,
}

#[derive(Debug, Default)]
struct State {
    outstanding: VecDeque<Outstanding>,
    /// The oldest one, while its event is queried.
    asked: Option<Work>,
    failure: Option<CommError>,
    /// When a rank was first seen to have left.
    left_since: Option<Instant>,
    is_ending: bool,
}

impl State {
    fn oldest(&self) -> Option<Work> {
        self.asked.clone().or_else(|| self.outstanding.front().map(|oldest| oldest.work.clone()))
    }

    /// Takes the oldest, to query its event.
    fn take_oldest(&mut self) -> Option<(Event, Work)> {
        let event = self.outstanding.front_mut()?.done.take()?;
        let work = self.outstanding.pop_front()?.work;
        self.asked = Some(work.clone());
        Some((event, work))
    }
}

impl Watcher {
    pub(super) fn new(
        line: Arc<Line>,
        group: &ProcessGroup,
        companion: &ProcessGroup,
    ) -> std::io::Result<Self> {
        let (state, woken, timeout) = (Mutex::default(), Condvar::new(), group.timeout());
        let (group, companion) = (group.status(), companion.status());
        let watch = Arc::new(Watch { line, group, companion, timeout, state, woken });
        let weak: Weak<Watch> = Arc::downgrade(&watch);
        enlist(weak);
        let (watching, asking) = (watch.clone(), watch.clone());
        let named = |name: &str| std::thread::Builder::new().name(name.to_owned());
        let threads = vec![
            named("nccl-watcher").spawn(move || watching.watch())?,
            named("nccl-asker").spawn(move || asking.ask())?,
        ];
        Ok(Self { timeout, watch, threads })
    }

    /// An error if the group has failed.
    pub(super) fn check(&self) -> Result<(), CommError> {
        self.failure().map_or(Ok(()), Err)
    }

    pub(super) fn failure(&self) -> Option<CommError> {
        self.watch.failure()
    }

    pub(super) fn follow(&self, call: Outstanding) {
        self.watch.state().outstanding.push_back(call);
    }

    /// Watches each launch of the graph in which this call is being recorded, like a call.
    pub(super) fn follow_launches(&self, recording: u64, call: &ExternalCall) {
        let watch: Weak<Watch> = Arc::downgrade(&self.watch);
        follow_launches(recording, watch, call.to_string());
    }

    /// NCCL returned an error. It is the cause, unless a rank turns out to be lost.
    pub(super) fn fail_soon(&self, trouble: &str) -> CommError {
        let cause = self.watch.news_soon().unwrap_or_else(|| self.watch.group.abort(trouble));
        self.watch.fail(cause)
    }

    /// Fails both groups if one has failed.
    pub(super) fn spread_failure(&self) {
        if let Some(cause) = self.failure() {
            self.watch.fail(cause);
        }
    }

    /// Waits until all calls have ended on the GPU, then ends the threads. An error if calls do not end.
    pub(super) fn end(&mut self) -> Result<(), CommError> {
        let (deadline, is_idle) = (Instant::now() + self.timeout, || self.watch.state().oldest().is_none());
        while !is_idle() && self.failure().is_none() && Instant::now() < deadline {
            self.watch.woken.notify_all();
            std::thread::sleep(Duration::from_millis(1));
        }
        let is_idle = is_idle();
        self.watch.state().is_ending = true;
        self.watch.woken.notify_all();
        // The asker may be blocked in the driver until the abort.
        self.threads.drain(..).filter(|_| is_idle).for_each(|thread| drop(thread.join()));
        self.check()?;
        if is_idle {
            Ok(())
        } else {
            Err(self.watch.group.abort("calls on a GPU had not ended when the group was dropped"))
        }
    }
}

impl Follower for Watch {
    fn launch(
        &self,
        launched: Launched,
        launch: &mut dyn FnMut() -> Result<(), TorchError>,
    ) -> Result<(), TorchError> {
        let _launch = self.line.begin_launch();
        // Calls of an aborted communicator must not run.
        self.failure().map_or(Ok(()), Err)?;
        // A launch may block as long as the calls run.
        self.state().outstanding.push_back(Outstanding { done: None, work: Work::graph(launched) });
        let launched = launch().and_then(|()| self.mark());
        let mut state = self.state();
        let place = state.outstanding.iter().position(|launched| launched.done.is_none());
        match (launched, place) {
            (Ok(done), Some(place)) => state.outstanding[place].done = Some(done),
            (Ok(_), None) => {}
            (Err(error), place) => {
                place.map(|place| state.outstanding.remove(place));
                return Err(error);
            }
        }
        Ok(())
    }
}

impl Watch {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn failure(&self) -> Option<CommError> {
        self.state().failure.clone().or_else(|| self.news())
    }

    /// An event after the current work of the current stream.
    fn mark(&self) -> Result<Event, TorchError> {
        let mark = Event::new(Timing::Off)?;
        mark.record(Stream::current(self.line.stream.device())?)?;
        Ok(mark)
    }

    /// The failure of one of the groups, if there is one.
    fn news(&self) -> Option<CommError> {
        self.group.failure().or_else(|| self.companion.failure())
    }

    fn news_soon(&self) -> Option<CommError> {
        let deadline = Instant::now() + NEWS_WAIT;
        while self.news().is_none() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
        self.news()
    }

    /// Waits until the next check. Returns false if there is nothing to watch any more.
    fn wait_for_next_check(&self) -> bool {
        let (state, _) =
            self.woken.wait_timeout(self.state(), CHECK_INTERVAL).unwrap_or_else(PoisonError::into_inner);
        !state.is_ending && state.failure.is_none()
    }

    fn watch(&self) {
        // NCCL's query needs the device.
        let _ = set_device(self.line.stream.device());
        while self.wait_for_next_check() {
            if let Some(cause) = self.find_failure() {
                self.fail(cause);
                return;
            }
        }
    }

    fn find_failure(&self) -> Option<CommError> {
        if let Some(cause) = self.news() {
            return Some(cause);
        }
        let trouble = self.line.trouble().or_else(|| self.overdue()).or_else(|| self.abandoned())?;
        Some(self.news_soon().unwrap_or_else(|| self.group.abort(&trouble)))
    }

    fn ask(&self) {
        // Otherwise queries of events would create a context on the first GPU for this thread.
        let _ = set_device(self.line.stream.device());
        while self.wait_for_next_check() {
            if let Err(failed) = self.drop_ended() {
                let FailedWork { work, error } = *failed;
                self.fail(self.group.abort(&format!("{work}: {error}")));
                return;
            }
        }
    }

    /// Removes the work that has ended. An error is an error of the GPU.
    fn drop_ended(&self) -> Result<(), Box<FailedWork>> {
        loop {
            let Some((done, work)) = self.state().take_oldest() else { return Ok(()) };
            let answer = done.is_done();
            let mut state = self.state();
            state.asked = None;
            match answer {
                Ok(true) => {}
                Ok(false) => {
                    state.outstanding.push_front(Outstanding { done: Some(done), work });
                    return Ok(());
                }
                Err(error) => return Err(Box::new(FailedWork { work, error })),
            }
        }
    }

    /// The oldest work, if it has not ended in time. For a call this is a problem of the GPUs: all ranks have made the
    /// call, or its announcement would have failed. For a graph another rank may not have launched its own.
    fn overdue(&self) -> Option<String> {
        let oldest = self.state().oldest().filter(|oldest| oldest.since.elapsed() > self.timeout)?;
        let or_late = if oldest.is_graph() { "; another rank may be late" } else { "" };
        Some(format!(
            "{oldest} has not ended on the GPU after {:?}{or_late}; try a longer timeout (DRUMLINE_TIMEOUT) if the work before it takes that long",
            self.timeout
        ))
    }

    /// A graph that waits for a rank that has left. Eager calls detect this in their announcements.
    fn abandoned(&self) -> Option<String> {
        let left = self.group.left().or_else(|| self.companion.left())?;
        let mut state = self.state();
        let since = *state.left_since.get_or_insert_with(Instant::now);
        let oldest = state.oldest().filter(Work::is_graph)?;
        let wait = since.elapsed().min(oldest.since.elapsed());
        (wait > LEFT_WAIT).then(|| format!("{oldest} has not ended on the GPU, and rank {left} has left"))
    }

    /// Fails both groups, and aborts the work on the GPU.
    fn fail(&self, cause: CommError) -> CommError {
        let cause = self.state().failure.get_or_insert(cause).clone();
        self.group.give_up(cause.clone());
        self.companion.give_up(cause.clone());
        self.line.abort();
        // Only now, because dropping events calls the driver, which may block until the abort.
        let ended = std::mem::take(&mut self.state().outstanding);
        drop(ended);
        cause
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use drumline_comm::{DType, Op, ReduceOp};

    #[test]
    fn a_graph_is_named_by_its_step_and_its_buckets() {
        let call = ExternalCall::new(Op::AllReduce, DType::F32, 1024).reduce(ReduceOp::Avg);
        let of = |step, calls: usize| {
            Work::graph(Launched { step, calls: (0..calls).map(|_| call.to_string()).collect() }).to_string()
        };
        let text = of(Some(34), 2);
        assert!(
            text.starts_with("the CUDA graph of step 34 with 2 collectives (bucket or call 0: all_reduce(1024 f32, avg) at "),
            "{text}"
        );
        assert!(text.contains("watcher.rs:") && text.contains(", bucket or call 1: all_reduce("), "{text}");
        assert!(of(None, 11).ends_with(", and 3 more)") && of(None, 11).starts_with("a CUDA graph with 11 "));
        assert_eq!(Work::call(call).to_string(), call.to_string());
    }
}
