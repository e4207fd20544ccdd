//! The threads of a communicator that see to it that nothing hangs.
//!
//! ```text
//!   announcer   one call after the other: meets the other ranks in the companion group, which finds calls that differ and ranks that are late
//!   asker       every few milliseconds: which calls have ended on the GPU?
//!   watcher     as often: is a group given up (lost rank, differing calls)? has NCCL an error? is a call overdue that is not known to have ended?
//!               ─▶ both groups are given up with that cause ─▶ the communicator is aborted, which ends its kernels
//! ```
//! The watcher itself asks the driver nothing: that may be busy for as long as the program copies from a GPU that waits, to memory that is not pinned.
//!
//! A call after a failure gives the same error as on the CPU. None of the threads is ever waited for by a call.

use std::collections::VecDeque;
use std::fmt;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use drumline_comm::{Announced, CommError, ProcessGroup, Standing};

use super::communicator::Line;
use crate::cuda::{Event, Follower, Launched, Stream, Timing, follow_launches, set_device};
use crate::error::TorchError;

/// How often watcher and asker look.
const LOOK: Duration = Duration::from_millis(20);

/// How long news of a rank that is lost or late may take, after something is seen to be wrong: they say more.
const NEWS_WAIT: Duration = Duration::from_millis(600);

/// How long a graph may go on after a rank has left, in good order: its calls may be done, and the rest of it takes a while.
const LEFT_WAIT: Duration = Duration::from_secs(10);

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
    pub(super) work: Work,
}

/// What is on the GPU, and since when.
#[derive(Debug, Clone)]
pub(super) struct Work {
    what: What,
    since: Instant,
}

#[derive(Debug, Clone)]
enum What {
    Call(Announced),
    Graph(Launched),
}

/// Of a graph's calls so many are named.
const NAMED: usize = 8;

impl Work {
    pub(super) fn call(call: Announced) -> Self {
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
        // The calls of a `Ddp` are its buckets, in their order.
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

/// All of this process, as long as their groups are there.
static WATCHES: Mutex<Vec<Weak<Watch>>> = Mutex::new(Vec::new());

fn watches() -> MutexGuard<'static, Vec<Weak<Watch>>> {
    WATCHES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An error if one of them has failed.
pub(super) fn check_all() -> Result<(), CommError> {
    let all: Vec<Arc<Watch>> = watches().iter().filter_map(Weak::upgrade).collect();
    let mut failures =
        all.iter().filter(|watch| !watch.state().is_ending).filter_map(|watch| watch.failure());
    failures.next().map_or(Ok(()), Err)
}

/// The threads and what they look at.
#[derive(Debug)]
pub(super) struct Watcher {
    pub(super) timeout: Duration,
    watch: Arc<Watch>,
    threads: Vec<JoinHandle<()>>,
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
    /// The oldest of them, while the driver is asked about it.
    asked: Option<Work>,
    failure: Option<CommError>,
    /// Since when a rank is known to have left.
    left_since: Option<Instant>,
    is_ending: bool,
}

impl State {
    fn oldest(&self) -> Option<Work> {
        self.asked.clone().or_else(|| self.outstanding.front().map(|oldest| oldest.work.clone()))
    }

    /// The oldest, for the driver to be asked about.
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
        let (group, companion) = (group.standing(), companion.standing());
        let watch = Arc::new(Watch { line, group, companion, timeout, state, woken });
        let mut all = watches();
        all.retain(|known| known.strong_count() > 0);
        all.push(Arc::downgrade(&watch));
        drop(all);
        let (watching, asking) = (watch.clone(), watch.clone());
        let named = |name: &str| std::thread::Builder::new().name(name.to_owned());
        let threads = vec![
            named("nccl-watcher").spawn(move || watching.watch())?,
            named("nccl-asker").spawn(move || asking.ask())?,
        ];
        Ok(Self { timeout, watch, threads })
    }

    /// An error if the group was given up.
    pub(super) fn check(&self) -> Result<(), CommError> {
        self.failure().map_or(Ok(()), Err)
    }

    pub(super) fn failure(&self) -> Option<CommError> {
        self.watch.failure()
    }

    pub(super) fn follow(&self, call: Outstanding) {
        self.watch.state().outstanding.push_back(call);
    }

    /// Each launch of the graph in which this call is being recorded is followed like a call.
    pub(super) fn follow_launches(&self, recording: u64, call: &Announced) {
        let watch: Weak<Watch> = Arc::downgrade(&self.watch);
        follow_launches(recording, watch, call.to_string());
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

    /// Waits until all calls have ended on the GPU, then ends the threads; an error if they do not.
    pub(super) fn end(&mut self) -> Result<(), CommError> {
        let (deadline, is_idle) = (Instant::now() + self.timeout, || self.watch.state().oldest().is_none());
        while !is_idle() && self.failure().is_none() && Instant::now() < deadline {
            self.watch.woken.notify_all();
            std::thread::sleep(Duration::from_millis(1));
        }
        let is_idle = is_idle();
        self.watch.state().is_ending = true;
        self.watch.woken.notify_all();
        // The asker may be kept by the driver until the abort.
        self.threads.drain(..).filter(|_| is_idle).for_each(|thread| drop(thread.join()));
        self.check()?;
        if is_idle {
            Ok(())
        } else {
            Err(self.watch.group.abort("calls on a GPU were still under way at its end"))
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
        // Calls of a communicator that was aborted must not run.
        self.failure().map_or(Ok(()), Err)?;
        // Launching may take as long as the calls do.
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

    /// A mark behind what the current stream has to do.
    fn mark(&self) -> Result<Event, TorchError> {
        let mark = Event::new(Timing::Off)?;
        mark.record(Stream::current(self.line.stream.device())?)?;
        Ok(mark)
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

    /// Waits a little; false if there is nothing to look at any more.
    fn goes_on(&self) -> bool {
        let (state, _) = self.woken.wait_timeout(self.state(), LOOK).unwrap_or_else(PoisonError::into_inner);
        !state.is_ending && state.failure.is_none()
    }

    fn watch(&self) {
        // For NCCL, when it is asked how it is.
        let _ = set_device(self.line.stream.device());
        while self.goes_on() {
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
        let trouble = self.line.trouble().or_else(|| self.overdue()).or_else(|| self.abandoned())?;
        Some(self.news_soon().unwrap_or_else(|| self.group.abort(&trouble)))
    }

    fn ask(&self) {
        // Else questions about the GPU's marks would wake the first GPU for this thread.
        let _ = set_device(self.line.stream.device());
        while self.goes_on() {
            if let Err(trouble) = self.drop_ended() {
                self.fail(self.group.abort(&trouble));
                return;
            }
        }
    }

    /// Forgets the calls that have ended. An error is the GPU's.
    fn drop_ended(&self) -> Result<(), String> {
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
                Err(error) => return Err(format!("{work}: {error}")),
            }
        }
    }

    /// All ranks have made the call, or its announcement would have failed: it is the GPUs that do not come to an end. Of a graph that is not known: a rank may not have
    /// launched its own.
    fn overdue(&self) -> Option<String> {
        let oldest = self.state().oldest().filter(|oldest| oldest.since.elapsed() > self.timeout)?;
        let or_late = if oldest.is_graph() { "; another rank may be late" } else { "" };
        Some(format!(
            "{oldest} has not ended on the GPU after {:?}{or_late}; try a longer timeout (DRUMLINE_TIMEOUT) if the work before it takes that long",
            self.timeout
        ))
    }

    /// A graph waits for a rank that has left. Calls one by one find that out in their announcements.
    fn abandoned(&self) -> Option<String> {
        let left = self.group.left().or_else(|| self.companion.left())?;
        let mut state = self.state();
        let since = *state.left_since.get_or_insert_with(Instant::now);
        let oldest = state.oldest().filter(Work::is_graph)?;
        let wait = since.elapsed().min(oldest.since.elapsed());
        (wait > LEFT_WAIT).then(|| format!("{oldest} has not ended on the GPU, and rank {left} has left"))
    }

    /// Gives both groups up, and ends what is under way.
    fn fail(&self, cause: CommError) -> CommError {
        let cause = self.state().failure.get_or_insert(cause).clone();
        self.group.give_up(cause.clone());
        self.companion.give_up(cause.clone());
        self.line.abort();
        // Only now: marks are the driver's, which may be busy until the abort.
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
        let call = Announced::new(Op::AllReduce, DType::F32, 1024).reduce(ReduceOp::Avg);
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
