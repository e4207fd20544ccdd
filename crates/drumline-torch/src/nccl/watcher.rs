//! The two threads of a communicator that see to it that nothing hangs.
//!
//! ```text
//!   announcer   one call after the other: meets the other ranks in the companion group, which finds calls that differ and ranks that are late
//!   watcher     every few milliseconds: is a group given up (lost rank, differing calls)? has NCCL an error? is a call on the GPU overdue?
//!               ─▶ both groups are given up with that cause ─▶ the communicator is aborted, which ends its kernels
//! ```
//! A call after that gives the same error as on the CPU. Neither thread is ever waited for by a call.

use std::collections::VecDeque;
use std::fmt;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use drumline_comm::{Announced, CommError, ProcessGroup, Standing};

use super::communicator::Line;
use crate::cuda::{Event, Follower, Stream, Timing, follow_launches, set_device};
use crate::error::TorchError;

/// How often the watcher looks.
const LOOK: Duration = Duration::from_millis(20);

/// How long news of a lost rank may take, after NCCL has noticed that something is wrong.
const NEWS_WAIT: Duration = Duration::from_millis(600);

/// How many elements this rank sends to each, and expects of each: what the others must know where lengths are each rank's own.
#[derive(Debug)]
pub(crate) struct Parts {
    pub(crate) sends: Vec<usize>,
    pub(crate) receives: Vec<usize>,
}

/// Tells the other ranks of calls, beside the calls themselves.
#[derive(Debug)]
pub(super) struct Announcer {
    calls: Option<Sender<(Announced, Option<Parts>)>>,
    thread: Option<JoinHandle<()>>,
}

impl Announcer {
    pub(super) fn new(companion: ProcessGroup) -> std::io::Result<Self> {
        let (sender, calls) = channel::<(Announced, Option<Parts>)>();
        // A group that is given up stays so; the watcher sees it and acts.
        let run = move || {
            calls.into_iter().for_each(|(call, parts)| match parts {
                None => drop(companion.meet(call)),
                Some(Parts { sends, receives }) => drop(companion.meet_in_parts(call, &sends, &receives)),
            });
        };
        let thread = std::thread::Builder::new().name("nccl-announcer".into()).spawn(run)?;
        Ok(Self { calls: Some(sender), thread: Some(thread) })
    }

    pub(super) fn announce(&self, call: Announced, parts: Option<Parts>) {
        // The thread lives until the sender is dropped.
        let _ = self.calls.as_ref().map(|calls| calls.send((call, parts)));
    }

    /// Waits until all has been said: other ranks may be on their way to calls that this one has made, and each has its deadline.
    pub(super) fn end(&mut self) {
        self.calls = None;
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// What was put on the GPU and has not ended.
#[derive(Debug)]
pub(super) struct Outstanding {
    /// Behind it on the GPU. A graph that is just being launched has none yet.
    pub(super) done: Option<Event>,
    /// A call, or a launched graph with calls.
    pub(super) call: Option<Announced>,
    pub(super) since: Instant,
}

impl fmt::Display for Outstanding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.call {
            Some(call) => write!(f, "{call}"),
            None => f.write_str("a CUDA graph with collectives"),
        }
    }
}

/// The thread and what it looks at.
#[derive(Debug)]
pub(super) struct Watcher {
    pub(super) timeout: Duration,
    watch: Arc<Watch>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Watch {
    line: Arc<Line>,
    group: Standing,
    companion: Standing,
    timeout: Duration,
    state: Mutex<State>,
    woken: Condvar,
}

#[derive(Debug, Default)]
struct State {
    outstanding: VecDeque<Outstanding>,
    failure: Option<CommError>,
    is_ending: bool,
}

impl Watcher {
    pub(super) fn new(
        line: Arc<Line>,
        group: &ProcessGroup,
        companion: &ProcessGroup,
    ) -> std::io::Result<Self> {
        let (state, woken, timeout) = (Mutex::default(), Condvar::new(), group.timeout());
        let (group, companion) = (group.standing(), companion.standing());
        let watch = Arc::new(Watch { line, group, companion, timeout, state, woken });
        let watching = watch.clone();
        let thread = std::thread::Builder::new().name("nccl-watcher".into()).spawn(move || watching.run())?;
        Ok(Self { timeout, watch, thread: Some(thread) })
    }

    /// An error if the group was given up.
    pub(super) fn check(&self) -> Result<(), CommError> {
        self.failure().map_or(Ok(()), Err)
    }

    pub(super) fn failure(&self) -> Option<CommError> {
        self.watch.state().failure.clone().or_else(|| self.watch.news())
    }

    pub(super) fn follow(&self, call: Outstanding) {
        self.watch.state().outstanding.push_back(call);
    }

    /// Each launch of the graph that is being recorded is followed like a call.
    pub(super) fn follow_launches(&self) {
        let watch: Weak<Watch> = Arc::downgrade(&self.watch);
        follow_launches(watch);
    }

    /// NCCL refused a call: the cause is that, unless a rank turns out to be gone.
    pub(super) fn fail_soon(&self, trouble: &str) -> CommError {
        let cause = self.watch.news_soon().unwrap_or_else(|| self.watch.group.abort(trouble));
        self.watch.fail(cause)
    }

    /// Gives all up, if one of the groups was.
    pub(super) fn spread_failure(&self) {
        if let Some(cause) = self.failure() {
            self.watch.fail(cause);
        }
    }

    /// Waits until all calls have ended on the GPU, then ends the thread; an error if they do not.
    pub(super) fn end(&mut self) -> Result<(), CommError> {
        let deadline = Instant::now() + self.timeout;
        while self.failure().is_none() && Instant::now() < deadline {
            if self.watch.state().drop_ended().is_ok_and(|is_empty| is_empty) {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let mut state = self.watch.state();
        let is_idle = state.outstanding.is_empty();
        state.is_ending = true;
        drop(state);
        self.watch.woken.notify_all();
        let _ = self.thread.take().map(JoinHandle::join);
        self.check()?;
        if is_idle {
            Ok(())
        } else {
            Err(self.watch.group.abort("calls on a GPU were still under way at its end"))
        }
    }
}

impl Follower for Watch {
    fn launches(&self) {
        tracing::trace!("a graph with collectives is launched");
        self.state().outstanding.push_back(Outstanding { done: None, call: None, since: Instant::now() });
    }

    fn launched(&self) -> Result<(), TorchError> {
        let done = Event::new(Timing::Off)?;
        done.record(Stream::current(self.line.stream.device())?)?;
        tracing::trace!("it is on its way");
        if let Some(launched) = self.state().outstanding.iter_mut().find(|launched| launched.done.is_none()) {
            launched.done = Some(done);
        }
        Ok(())
    }
}

impl Watch {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Why one of the groups was given up, if it was.
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

    fn run(&self) {
        // Else questions about the GPU's marks would wake the first GPU for this thread.
        let _ = set_device(self.line.stream.device());
        loop {
            let state = self.state();
            let (state, _) = self.woken.wait_timeout(state, LOOK).unwrap_or_else(PoisonError::into_inner);
            if state.is_ending || state.failure.is_some() {
                return;
            }
            drop(state);
            if let Some(cause) = self.look() {
                self.fail(cause);
                return;
            }
        }
    }

    fn look(&self) -> Option<CommError> {
        if let Some(cause) = self.news() {
            return Some(cause);
        }
        if let Some(trouble) = self.line.trouble() {
            return Some(self.news_soon().unwrap_or_else(|| self.group.abort(&trouble)));
        }
        let ended = self.state().drop_ended();
        let trouble = ended.map_or_else(Some, |_| self.overdue())?;
        Some(self.group.abort(&trouble))
    }

    /// All ranks have made the call, or its announcement would have failed: it is the GPUs that do not come to an end. Of a graph that is not known: a rank may not have
    /// launched its own.
    fn overdue(&self) -> Option<String> {
        let state = self.state();
        let oldest = state.outstanding.front().filter(|call| call.since.elapsed() > self.timeout)?;
        let or_late = if oldest.call.is_none() { "; another rank may be late" } else { "" };
        Some(format!(
            "{oldest} has not ended on the GPU after {:?}{or_late}; try a longer timeout (DRUMLINE_TIMEOUT) if the work before it takes that long",
            self.timeout
        ))
    }

    /// Gives both groups up, and ends what is under way.
    fn fail(&self, cause: CommError) -> CommError {
        let cause = {
            let mut state = self.state();
            state.outstanding.clear();
            state.failure.get_or_insert(cause).clone()
        };
        self.group.give_up(cause.clone());
        self.companion.give_up(cause.clone());
        self.line.abort();
        cause
    }
}

impl State {
    /// Forgets the calls that have ended; says whether none is left. An error is the GPU's.
    fn drop_ended(&mut self) -> Result<bool, String> {
        while let Some(oldest) = self.outstanding.front() {
            match oldest.done.as_ref().map_or(Ok(false), Event::is_done) {
                Ok(true) => drop(self.outstanding.pop_front()),
                Ok(false) => return Ok(false),
                Err(error) => return Err(format!("{oldest}: {error}")),
            }
        }
        Ok(true)
    }
}
