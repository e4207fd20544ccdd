//! The monitor: one thread that follows the job's event log and gives up the groups that an event concerns.
//!
//! ```text
//!   store ── Lost, Exit, Left, LeftGroup, Abort ──▶ monitor ──▶ GroupState: "given up, because …"
//!                                                     │            ▲ checked by every wait
//!            ◀── Call (this rank's last call) ────────┘ when another rank reports its own
//! ```
//! A rank whose call fails first reports its last call. The other ranks answer with theirs. So the cause with which it then
//! calls the group off contains the calls of all ranks.
//! The end of a connection is known at once, the exit status a moment later (from the launcher). The monitor waits for that
//! moment, so that the error can contain the status.

mod group_state;
mod processes;
mod rank_end;

use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use drumline_rendezvous::events::{self, Event};
use drumline_rendezvous::{Member, Store};

use crate::call::OngoingCall;
use crate::error::CommError;
use crate::event_poster::EventPoster;
use group_state::CallReport;
pub(crate) use group_state::GroupState;
pub(crate) use processes::Neighbour;
use rank_end::{RankEnd, exit_text, silent_end, store_end};

/// How long leaving the job may take.
const GOODBYE_TIMEOUT: Duration = Duration::from_secs(2);

/// How long the exit status of a lost rank may take to arrive.
const STATUS_WAIT: Duration = Duration::from_millis(250);

/// How often a process reports that it has dropped a group: the log is for the whole job. After that, the ends of its links
/// show it.
const MAX_LEAVE_EVENTS: usize = 256;

/// How many leave events are remembered. All ranks form a group at about the same time, so few are needed.
const REMEMBERED: usize = 1024;

/// Follows the event log until dropped.
#[derive(Debug)]
pub(crate) struct Monitor {
    shared: Arc<Shared>,
    poster: EventPoster,
    num_leave_events: AtomicUsize,
    thread: Option<JoinHandle<()>>,
    /// The thread that watches processes, and the pipe whose end stops it.
    watcher: OnceLock<(JoinHandle<()>, OwnedFd)>,
}

#[derive(Debug)]
struct Shared {
    store: Arc<dyn Store>,
    rank: usize,
    host: String,
    /// The number of this meeting; see [`events`].
    incarnation: u64,
    /// The first process that was refused, and why.
    refused: Mutex<Option<String>>,
    groups: Mutex<Vec<Weak<GroupState>>>,
    /// The ranks that have ended, so that groups that are made later know it too.
    gone: Mutex<HashMap<usize, RankEnd>>,
    /// Groups that other ranks have called off, perhaps before this rank had formed them.
    called_off: Mutex<HashMap<String, CalledOff>>,
    /// The rank whose process hosts the store, its host and its process, if a rank hosts it.
    store_host: OnceLock<(usize, String, u32)>,
    /// The ranks that have lately dropped a group, perhaps before this rank had formed it.
    left_groups: Mutex<VecDeque<(String, usize)>>,
    store_is_lost: AtomicBool,
    stopping: AtomicBool,
}

/// The rank that called a group off, and why.
#[derive(Debug, Clone)]
struct CalledOff {
    by: usize,
    cause: String,
    recoverable: bool,
}

impl CalledOff {
    fn error(&self, state: &GroupState) -> CommError {
        let Self { by, cause, recoverable } = self.clone();
        CommError::CalledOff { group: state.group.clone(), by, cause, recoverable }
    }
}

impl Monitor {
    pub(crate) fn start(member: &Member) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            store: member.store.clone(),
            rank: member.rank,
            host: member.host.clone(),
            incarnation: member.incarnation,
            refused: Mutex::default(),
            groups: Mutex::default(),
            gone: Mutex::default(),
            called_off: Mutex::default(),
            store_host: OnceLock::new(),
            left_groups: Mutex::default(),
            store_is_lost: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
        });
        let follower = shared.clone();
        let thread =
            std::thread::Builder::new().name("drumline-monitor".into()).spawn(move || follower.run())?;
        let poster = EventPoster::default();
        let num_leave_events = AtomicUsize::new(0);
        Ok(Self { shared, poster, num_leave_events, thread: Some(thread), watcher: OnceLock::new() })
    }

    /// From now on the end of the store counts as the end of this rank.
    pub(crate) fn store_ends_with(&self, rank: usize, host: String, pid: u32) {
        let _ = self.shared.store_host.set((rank, host, pid));
    }

    /// From now on the ends of these processes are noticed, even if other processes hold their connections.
    pub(crate) fn watch_processes(&self, neighbours: Vec<Neighbour>) -> std::io::Result<()> {
        if neighbours.is_empty() {
            return Ok(());
        }
        let (stopped, stop) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        let shared = self.shared.clone();
        let thread = std::thread::Builder::new().name("drumline-watch".into());
        let thread = thread.spawn(move || processes::watch(&shared, neighbours, &stopped))?;
        let _ = self.watcher.set((thread, stop));
        Ok(())
    }

    /// While the ranks meet: a rank that was refused or has ended, if there is one, and why.
    pub(crate) fn loss(&self) -> Option<String> {
        if let Some(refusal) = &*lock(&self.shared.refused) {
            return Some(refusal.clone());
        }
        let gone = lock(&self.shared.gone);
        let others = gone.iter().filter(|(rank, _)| **rank != self.shared.rank);
        // A rank may have left because another was lost, which says more.
        let (rank, gone) = others.min_by_key(|(_, gone)| matches!(gone, RankEnd::Left))?;
        Some(match gone {
            RankEnd::Left => format!("rank {rank} has left"),
            RankEnd::Lost { host, pid, how } => format!("lost rank {rank} ({host}, pid {pid}): {how}"),
        })
    }

    /// Watches one more group.
    pub(crate) fn watch(&self, state: &Arc<GroupState>) {
        let mut groups = lock(&self.shared.groups);
        groups.retain(|state| state.strong_count() > 0);
        groups.push(Arc::downgrade(state));
        for (&rank, gone) in lock(&self.shared.gone).iter() {
            gone.apply(state, rank);
        }
        for (_, rank) in lock(&self.shared.left_groups).iter().filter(|(group, _)| **group == *state.group) {
            RankEnd::Left.apply(state, *rank);
        }
        if let Some(called_off) = lock(&self.shared.called_off).get(&*state.group) {
            state.give_up(called_off.error(state));
        }
    }

    /// The collectives that this rank has not returned from, in all groups.
    pub(crate) fn ongoing_calls(&self) -> Vec<OngoingCall> {
        let groups: Vec<_> = lock(&self.shared.groups).iter().filter_map(Weak::upgrade).collect();
        let call = |state: &Arc<GroupState>| {
            let index = state.members.iter().position(|&rank| rank == self.shared.rank)?;
            Some(OngoingCall { group: state.group.to_string(), call: state.ongoing(index)? })
        };
        groups.iter().filter_map(call).collect()
    }

    /// Reports this rank's `sequence`-th call in a group, or its last, and asks the other ranks to report theirs.
    pub(crate) fn ask(&self, state: &GroupState, sequence: u64) {
        let mut report = state.lock().report(sequence);
        report.asks = true;
        self.post(self.shared.call_event(state, &report));
    }

    /// Reports the call that this rank has just made, to ranks that have asked for it.
    #[cold]
    pub(crate) fn answer(&self, state: &GroupState) {
        let asked = state.lock().asked;
        if let Some(event) = self.shared.answer(state, asked) {
            self.post(event);
        }
    }

    /// Reports to all ranks that a group is called off.
    pub(crate) fn call_off(&self, state: &GroupState, cause: &CommError) {
        let text = match cause {
            CommError::CalledOff { cause, .. } => cause.clone(),
            other => other.to_string(),
        };
        // The event contains the group's name, so the text need not.
        let text = ["of", "on"]
            .iter()
            .fold(text, |text, word| text.replace(&format!(" {word} group `{}`", state.group), ""));
        let group = state.group.to_string();
        let recoverable = cause.is_recoverable();
        self.post(Event::Abort { group, by: self.shared.rank, cause: text, recoverable });
    }

    /// Reports to all ranks that this one has dropped a group.
    pub(crate) fn leave_group(&self, state: &GroupState) {
        if self.num_leave_events.fetch_add(1, Ordering::Relaxed) < MAX_LEAVE_EVENTS {
            self.post(Event::LeftGroup { group: state.group.to_string(), rank: self.shared.rank });
        }
    }

    /// Posts an event in the background.
    fn post(&self, event: Event) {
        let shared = self.shared.clone();
        self.poster.post(event, move |event| shared.post(event));
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::Release);
        // This rank's own event ends the monitor's wait. A rank that panics has not left normally.
        let rank = self.shared.rank;
        let event = if std::thread::panicking() {
            let host = self.shared.host.clone();
            Event::Exit { rank, host, pid: std::process::id(), code: None, signal: None }
        } else {
            Event::Left { rank }
        };
        let poster = std::mem::take(&mut self.poster);
        let shared = self.shared.clone();
        let thread = self.thread.take();
        let watcher = self.watcher.take();
        let (done, goodbye) = mpsc::channel();
        let leave = move || {
            poster.finish();
            shared.post(&event);
            let _ = thread.map(JoinHandle::join);
            if let Some((thread, stop)) = watcher {
                drop(stop);
                let _ = thread.join();
            }
            let _ = done.send(());
        };
        // A store whose host is frozen never answers, so this runs in a thread that is waited for only so long.
        if std::thread::Builder::new().name("drumline-goodbye".into()).spawn(leave).is_ok() {
            let _ = goodbye.recv_timeout(GOODBYE_TIMEOUT);
        }
    }
}

impl Shared {
    fn run(&self) {
        let mut log = events::follow_in(&self.store, self.incarnation);
        let mut lost: Vec<(Instant, Event)> = Vec::new();
        while !self.stopping.load(Ordering::Acquire) {
            let timeout = lost.first().map_or(Duration::from_secs(3600), |(since, _)| {
                (*since + STATUS_WAIT).saturating_duration_since(Instant::now())
            });
            match log.next_batch(Instant::now() + timeout) {
                Ok(events) => events.into_iter().for_each(|event| self.handle(event, &mut lost)),
                Err(error) => return self.lost_store(&error.to_string()),
            }
            let now = Instant::now();
            let due: Vec<_> = lost.extract_if(.., |(since, _)| *since + STATUS_WAIT <= now).collect();
            for (_, event) in due {
                if let Event::Lost { rank, host, pid } = event {
                    let how = silent_end(&host);
                    self.gone(rank, &RankEnd::Lost { host, pid, how });
                }
            }
        }
    }

    fn handle(&self, event: Event, lost: &mut Vec<(Instant, Event)>) {
        match event {
            Event::Lost { .. } => lost.push((Instant::now(), event)),
            Event::Exit { rank, host, pid, code, signal } => {
                lost.retain(|(_, event)| !matches!(event, Event::Lost { rank: known, .. } if *known == rank));
                self.gone(rank, &RankEnd::Lost { host, pid, how: exit_text(code, signal) });
            }
            Event::Left { rank } => self.gone(rank, &RankEnd::Left),
            Event::LeftGroup { rank, .. } if rank == self.rank => {}
            Event::LeftGroup { group, rank } => self.left_group(&group, rank),
            Event::Refused { rank, reason } => {
                let who = rank.map_or("a process".into(), |rank| format!("rank {rank}"));
                lock(&self.refused).get_or_insert(format!("{who} was refused: {reason}"));
            }
            Event::Abort { by, .. } if by == self.rank => {}
            Event::Abort { group, by, cause, recoverable } => {
                let called_off = CalledOff { by, cause, recoverable };
                // Remembered first: a group that is formed at this moment finds it there.
                lock(&self.called_off).insert(group.clone(), called_off.clone());
                self.for_group(&group, |state| drop(state.give_up(called_off.error(state))));
            }
            Event::Call { group, rank, text } => {
                if let Ok(report) = serde_json::from_str::<CallReport>(&text) {
                    self.for_group(&group, |state| self.receive_report(state, rank, &report));
                }
            }
        }
    }

    fn receive_report(&self, state: &GroupState, rank: usize, report: &CallReport) {
        state.lock().add_report(rank, report.clone());
        if report.asks
            && rank != self.rank
            && let Some(event) = self.answer(state, report.trace.sequence)
        {
            self.post(&event);
        }
    }

    fn gone(&self, rank: usize, gone: &RankEnd) {
        // A rank that left normally and then ended is not lost.
        let first = match lock(&self.gone).entry(rank) {
            std::collections::hash_map::Entry::Occupied(_) => false,
            std::collections::hash_map::Entry::Vacant(place) => {
                place.insert(gone.clone());
                true
            }
        };
        if first && rank != self.rank {
            lock(&self.groups).iter().filter_map(Weak::upgrade).for_each(|state| gone.apply(&state, rank));
        }
    }

    fn left_group(&self, group: &str, rank: usize) {
        // Remembered first: a group that is formed at this moment finds it there.
        let mut left_groups = lock(&self.left_groups);
        if left_groups.len() == REMEMBERED {
            left_groups.pop_front();
        }
        left_groups.push_back((group.to_owned(), rank));
        drop(left_groups);
        self.for_group(group, |state| RankEnd::Left.apply(state, rank));
    }

    /// The event that reports this rank's `asked`-th call in a group, or its last if it has made fewer; `None` if it has
    /// reported that call before.
    fn answer(&self, state: &GroupState, asked: u64) -> Option<Event> {
        let mut calls = state.lock();
        calls.asked = asked;
        let before = calls.answered;
        let report = calls.report(asked);
        (calls.answered != before).then(|| self.call_event(state, &report))
    }

    fn call_event(&self, state: &GroupState, report: &CallReport) -> Event {
        let text = serde_json::to_string(report).unwrap_or_default();
        Event::Call { group: state.group.to_string(), rank: self.rank, text }
    }

    /// Posts an event for all ranks, unless the store is known to be lost: trying to reach it again would take long.
    /// Tells everyone, unless the store is known to be gone: trying to reach it again would take long.
    fn post(&self, event: &Event) {
        if self.store_is_lost.load(Ordering::Acquire) {
            return;
        }
        let posted = match event {
            // A process that has ended takes part in no later meeting either.
            Event::Exit { .. } | Event::Lost { .. } => events::post(&*self.store, event),
            _ => events::post_in(&*self.store, self.incarnation, event),
        };
        if let Err(error) = posted {
            tracing::debug!(%error, rank = self.rank, ?event, "cannot post an event");
        }
    }

    /// Runs `act` on the group's state, without holding a lock: `act` may take as long as a message.
    fn for_group(&self, group: &str, act: impl Fn(&GroupState)) {
        let groups: Vec<_> = lock(&self.groups).iter().filter_map(Weak::upgrade).collect();
        groups.iter().filter(|state| *state.group == *group).for_each(|state| act(state));
    }

    fn lost_store(&self, error: &str) {
        self.store_is_lost.store(true, Ordering::Release);
        let host = self.store_host.get();
        // When the host of the store has left normally, only new groups need the store.
        let has_left =
            host.is_some_and(|(rank, ..)| matches!(lock(&self.gone).get(rank), Some(RankEnd::Left)));
        if self.stopping.load(Ordering::Acquire) || has_left {
            return;
        }
        if let Some((rank, host, pid)) = host {
            let how = store_end(host, error);
            self.gone(*rank, &RankEnd::Lost { host: host.clone(), pid: *pid, how });
        }
        for state in lock(&self.groups).iter().filter_map(Weak::upgrade) {
            state.give_up(CommError::Store { group: state.group.clone(), cause: error.into() });
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
