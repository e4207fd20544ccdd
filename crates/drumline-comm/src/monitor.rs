//! The one thread that listens for bad news: follows the job's event log and gives up the groups concerned.
//!
//! ```text
//!   store ── Lost, Exit, Left, Abort ──▶ monitor ──▶ Fate of each group: "given up, because …"
//!                                          │            ▲ looked at by every wait
//!            ◀── Call (what we do) ────────┘ when somebody calls a group off
//! ```
//! A lost connection is known at once, the exit status a moment later (from the launcher); the monitor waits that moment
//! so that the error can name it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use drumline_rendezvous::Store;
use drumline_rendezvous::events::{self, Event};

use crate::call::{Call, Trace};
use crate::error::CommError;

/// How long the exit status of a lost rank may take to arrive.
const STATUS_WAIT: Duration = Duration::from_millis(250);

/// Whether a group can still be used, seen by its calls and by the monitor.
#[derive(Debug)]
pub(crate) struct Fate {
    /// The group's name.
    pub(crate) group: String,
    /// Its members, as ranks of the job.
    pub(crate) members: Vec<usize>,
    /// Raised once; the cause is there before.
    pub(crate) given_up: AtomicBool,
    /// Members that have left in good order, by index.
    pub(crate) left: Vec<AtomicBool>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    cause: Option<CommError>,
    /// What members said they do, when a group was called off.
    calls: HashMap<usize, Trace>,
    /// The last call of this rank, for others to ask.
    own_call: Option<(Call, u64)>,
}

impl Fate {
    pub(crate) fn new(group: String, members: Vec<usize>) -> Self {
        let left = members.iter().map(|_| AtomicBool::new(false)).collect();
        Self { group, members, given_up: AtomicBool::new(false), left, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives the group up, unless that has happened; returns the cause that holds.
    pub(crate) fn give_up(&self, cause: CommError) -> CommError {
        let cause = self.state().cause.get_or_insert(cause).clone();
        self.given_up.store(true, Ordering::Release);
        cause
    }

    /// Why the group was given up, if it was.
    pub(crate) fn cause(&self) -> Option<CommError> {
        self.state().cause.clone()
    }

    /// Notes what this rank does, for others to ask; only where they cannot read it from shared memory.
    pub(crate) fn note(&self, call: Call, sequence: u64) {
        self.state().own_call = Some((call, sequence));
    }

    /// What a member said it does, if it has said so.
    pub(crate) fn said(&self, rank: usize) -> Option<Trace> {
        self.state().calls.get(&rank).cloned()
    }
}

/// Follows the event log until dropped.
#[derive(Debug)]
pub(crate) struct Monitor {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    store: Arc<dyn Store>,
    rank: usize,
    host: String,
    fates: Mutex<Vec<Weak<Fate>>>,
    /// What is known of ranks that are gone, so that groups made later learn it too.
    gone: Mutex<HashMap<usize, Gone>>,
    stopping: AtomicBool,
}

#[derive(Debug, Clone)]
enum Gone {
    Left,
    Lost { host: String, pid: u32, how: String },
}

impl Monitor {
    pub(crate) fn start(store: Arc<dyn Store>, rank: usize, host: String) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            store,
            rank,
            host,
            fates: Mutex::default(),
            gone: Mutex::default(),
            stopping: AtomicBool::new(false),
        });
        let follower = shared.clone();
        let thread = std::thread::Builder::new().name("drumline-monitor".into()).spawn(move || follower.run())?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Watches over one more group.
    pub(crate) fn watch(&self, fate: &Arc<Fate>) {
        let mut fates = lock(&self.shared.fates);
        fates.retain(|fate| fate.strong_count() > 0);
        fates.push(Arc::downgrade(fate));
        for (&rank, gone) in lock(&self.shared.gone).iter() {
            apply(fate, rank, gone);
        }
    }

    /// Tells all ranks that a group is called off.
    pub(crate) fn call_off(&self, fate: &Fate, cause: &CommError) {
        let event = Event::Abort { group: fate.group.clone(), by: self.shared.rank, cause: cause.to_string() };
        if let Err(error) = events::post(&*self.shared.store, &event) {
            tracing::debug!(%error, group = fate.group, "cannot tell the others that the group is called off");
        }
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::Release);
        // Our own event ends our own wait. A rank that panics has not left in good order.
        let rank = self.shared.rank;
        let event = match std::thread::panicking() {
            true => Event::Exit { rank, host: self.shared.host.clone(), pid: std::process::id(), code: None, signal: None },
            false => Event::Left { rank },
        };
        if let Err(error) = events::post(&*self.shared.store, &event) {
            tracing::debug!(%error, rank = self.shared.rank, "cannot say goodbye");
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn run(&self) {
        let mut log = events::follow(&self.store);
        let mut lost: Vec<(Instant, Event)> = Vec::new();
        while !self.stopping.load(Ordering::Acquire) {
            let patience = lost.first().map_or(Duration::from_secs(3600), |(since, _)| {
                (*since + STATUS_WAIT).saturating_duration_since(Instant::now())
            });
            match log.next_batch(Instant::now() + patience) {
                Ok(events) => events.into_iter().for_each(|event| self.handle(event, &mut lost)),
                Err(error) => return self.lost_store(&error.to_string()),
            }
            let now = Instant::now();
            let due: Vec<_> = lost.extract_if(.., |(since, _)| *since + STATUS_WAIT <= now).collect();
            for (_, event) in due {
                if let Event::Lost { rank, host, pid } = event {
                    self.gone(rank, Gone::Lost { host, pid, how: "its connection ended".into() });
                }
            }
        }
    }

    fn handle(&self, event: Event, lost: &mut Vec<(Instant, Event)>) {
        match event {
            Event::Lost { .. } => lost.push((Instant::now(), event)),
            Event::Exit { rank, host, pid, code, signal } => {
                lost.retain(|(_, event)| !matches!(event, Event::Lost { rank: known, .. } if *known == rank));
                self.gone(rank, Gone::Lost { host, pid, how: exit_text(code, signal) });
            }
            Event::Left { rank } => self.gone(rank, Gone::Left),
            Event::Abort { group, by, cause } => self.called_off(&group, by, cause),
            Event::Call { group, rank, text } => {
                if let Ok(trace) = serde_json::from_str::<Trace>(&text) {
                    self.for_group(&group, |fate| drop(fate.state().calls.insert(rank, trace.clone())));
                }
            }
        }
    }

    fn gone(&self, rank: usize, gone: Gone) {
        // A rank that left in good order and then ended is not lost.
        let first = match lock(&self.gone).entry(rank) {
            std::collections::hash_map::Entry::Occupied(_) => false,
            std::collections::hash_map::Entry::Vacant(place) => {
                place.insert(gone.clone());
                true
            }
        };
        if first && rank != self.rank {
            lock(&self.fates).iter().filter_map(Weak::upgrade).for_each(|fate| apply(&fate, rank, &gone));
        }
    }

    fn called_off(&self, group: &str, by: usize, cause: String) {
        self.for_group(group, |fate| {
            let own_call = fate.state().own_call.clone();
            if let Some((call, sequence)) = own_call {
                let text = serde_json::to_string(&call.trace(sequence)).unwrap_or_default();
                let _ = events::post(&*self.store, &Event::Call { group: group.into(), rank: self.rank, text });
            }
            if by != self.rank {
                fate.give_up(CommError::CalledOff { group: group.into(), by, cause: cause.clone() });
            }
        });
    }

    fn for_group(&self, group: &str, mut act: impl FnMut(&Fate)) {
        lock(&self.fates).iter().filter_map(Weak::upgrade).filter(|fate| fate.group == group).for_each(|fate| act(&fate));
    }

    fn lost_store(&self, error: &str) {
        // When the host of the store has left in good order, only new groups need it.
        if self.stopping.load(Ordering::Acquire) || matches!(lock(&self.gone).get(&0), Some(Gone::Left)) {
            return;
        }
        for fate in lock(&self.fates).iter().filter_map(Weak::upgrade) {
            fate.give_up(CommError::Store { group: fate.group.clone(), cause: error.into() });
        }
    }
}

fn apply(fate: &Fate, rank: usize, gone: &Gone) {
    let Some(index) = fate.members.iter().position(|&member| member == rank) else { return };
    match gone {
        Gone::Left => fate.left[index].store(true, Ordering::Release),
        Gone::Lost { host, pid, how } => {
            let (host, how) = (host.clone(), how.clone());
            fate.give_up(CommError::PeerLost { group: fate.group.clone(), rank, host, pid: *pid, how });
        }
    }
}

fn exit_text(code: Option<i32>, signal: Option<i32>) -> String {
    match (code, signal) {
        (_, Some(signal)) => format!("killed by signal {signal}{}", signal_name(signal)),
        (Some(code), None) => format!("exited with code {code} without leaving the group"),
        (None, None) => "it panicked".into(),
    }
}

fn signal_name(signal: i32) -> String {
    rustix::process::Signal::from_named_raw(signal).map_or(String::new(), |signal| format!(" ({signal:?})"))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
