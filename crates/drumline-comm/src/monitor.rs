//! The one thread that listens for bad news: follows the job's event log and gives up the groups concerned.
//!
//! ```text
//!   store ── Lost, Exit, Left, LeftGroup, Abort ──▶ monitor ──▶ Fate of each group: "given up, because …"
//!                                                     │            ▲ looked at by every wait
//!            ◀── Call (what we do) ───────────────────┘ when somebody else says what he does
//! ```
//! A rank that runs into trouble first says what it does, which the others take as a question and answer, so that the
//! cause with which it then calls the group off has everybody's call in it.
//! A lost connection is known at once, the exit status a moment later (from the launcher); the monitor waits that moment
//! so that the error can name it.

mod fate;
mod gone;
mod processes;

use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use drumline_rendezvous::events::{self, Event};
use drumline_rendezvous::{Member, Store};

use crate::call::UnderWay;
use crate::error::CommError;
use crate::speaker::Speaker;
pub(crate) use fate::Fate;
use fate::Word;
use gone::{Gone, exit_text, silent_end, store_end};
pub(crate) use processes::Neighbour;

/// How long saying goodbye may take.
const FAREWELL: Duration = Duration::from_secs(2);

/// How long the exit status of a lost rank may take to arrive.
const STATUS_WAIT: Duration = Duration::from_millis(250);

/// How often a process tells that it lets go of a group: the log is for the whole job. Later its links' ends tell it.
const FAREWELLS: usize = 256;

/// How many times a rank let go of a group are remembered: a group is formed by all its ranks at about the same time.
const REMEMBERED: usize = 1024;

/// Follows the event log until dropped.
#[derive(Debug)]
pub(crate) struct Monitor {
    shared: Arc<Shared>,
    speaker: Speaker,
    num_farewells: AtomicUsize,
    thread: Option<JoinHandle<()>>,
    /// The thread that watches processes, and what it stops at when it is closed.
    watcher: OnceLock<(JoinHandle<()>, OwnedFd)>,
}

#[derive(Debug)]
struct Shared {
    store: Arc<dyn Store>,
    rank: usize,
    host: String,
    /// The number of this meeting; see [`events`].
    incarnation: u64,
    /// Who could not take part, and why.
    refused: Mutex<Option<String>>,
    fates: Mutex<Vec<Weak<Fate>>>,
    /// What is known of ranks that are gone, so that groups made later learn it too.
    gone: Mutex<HashMap<usize, Gone>>,
    /// Groups that others have called off, perhaps before this rank had formed them.
    called_off: Mutex<HashMap<String, CalledOff>>,
    /// The rank whose process hosts the store, where it runs, and its process, if it is a rank that does.
    store_host: OnceLock<(usize, String, u32)>,
    /// Who has let go of which group lately, perhaps before this rank had formed it.
    let_go: Mutex<VecDeque<(String, usize)>>,
    store_is_lost: AtomicBool,
    stopping: AtomicBool,
}

/// Who called a group off, and why.
#[derive(Debug, Clone)]
struct CalledOff {
    by: usize,
    cause: String,
    recoverable: bool,
}

impl CalledOff {
    fn error(&self, fate: &Fate) -> CommError {
        let Self { by, cause, recoverable } = self.clone();
        CommError::CalledOff { group: fate.group.clone(), by, cause, recoverable }
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
            fates: Mutex::default(),
            gone: Mutex::default(),
            called_off: Mutex::default(),
            store_host: OnceLock::new(),
            let_go: Mutex::default(),
            store_is_lost: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
        });
        let follower = shared.clone();
        let thread =
            std::thread::Builder::new().name("drumline-monitor".into()).spawn(move || follower.run())?;
        let (speaker, num_farewells) = (Speaker::default(), AtomicUsize::new(0));
        Ok(Self { shared, speaker, num_farewells, thread: Some(thread), watcher: OnceLock::new() })
    }

    /// From now on the end of the store is the end of this rank.
    pub(crate) fn store_ends_with(&self, rank: usize, host: String, pid: u32) {
        let _ = self.shared.store_host.set((rank, host, pid));
    }

    /// From now on the ends of these processes are noticed, whoever else still holds their connections.
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

    /// For a meeting that is not over: a rank that was refused or is gone, if there is one, and why.
    pub(crate) fn loss(&self) -> Option<String> {
        if let Some(refusal) = &*lock(&self.shared.refused) {
            return Some(refusal.clone());
        }
        let gone = lock(&self.shared.gone);
        let others = gone.iter().filter(|(rank, _)| **rank != self.shared.rank);
        // Some leave because others were lost.
        let (rank, gone) = others.min_by_key(|(_, gone)| matches!(gone, Gone::Left))?;
        Some(match gone {
            Gone::Left => format!("rank {rank} has left"),
            Gone::Lost { host, pid, how } => format!("lost rank {rank} ({host}, pid {pid}): {how}"),
        })
    }

    /// Watches over one more group.
    pub(crate) fn watch(&self, fate: &Arc<Fate>) {
        let mut fates = lock(&self.shared.fates);
        fates.retain(|fate| fate.strong_count() > 0);
        fates.push(Arc::downgrade(fate));
        for (&rank, gone) in lock(&self.shared.gone).iter() {
            gone.tell(fate, rank);
        }
        for (_, rank) in lock(&self.shared.let_go).iter().filter(|(group, _)| **group == *fate.group) {
            Gone::Left.tell(fate, *rank);
        }
        if let Some(news) = lock(&self.shared.called_off).get(&*fate.group) {
            fate.give_up(news.error(fate));
        }
    }

    /// The collectives that this rank is in, in whichever group.
    pub(crate) fn calls_under_way(&self) -> Vec<UnderWay> {
        let fates: Vec<_> = lock(&self.shared.fates).iter().filter_map(Weak::upgrade).collect();
        let call = |fate: &Arc<Fate>| {
            let index = fate.members.iter().position(|&rank| rank == self.shared.rank)?;
            Some(UnderWay { group: fate.group.to_string(), call: fate.under_way(index)? })
        };
        fates.iter().filter_map(call).collect()
    }

    /// Says what this rank did as its `sequence`-th call in a group, or last, and so asks the others to say that too.
    pub(crate) fn ask(&self, fate: &Fate, sequence: u64) {
        let mut word = fate.state().word(sequence);
        word.asks = true;
        self.tell(self.shared.call_event(fate, &word));
    }

    /// Tells others, who have asked, of the call that this rank has just come to.
    #[cold]
    pub(crate) fn answer(&self, fate: &Fate) {
        let asked = fate.state().asked;
        if let Some(event) = self.shared.answer(fate, asked) {
            self.tell(event);
        }
    }

    /// Tells all ranks that a group is called off.
    pub(crate) fn call_off(&self, fate: &Fate, cause: &CommError) {
        let text = match cause {
            CommError::CalledOff { cause, .. } => cause.clone(),
            other => other.to_string(),
        };
        // Whoever hears it is told the group's name beside it.
        let text = ["of", "on"]
            .iter()
            .fold(text, |text, word| text.replace(&format!(" {word} group `{}`", fate.group), ""));
        let (group, by, recoverable) = (fate.group.to_string(), self.shared.rank, cause.is_recoverable());
        self.tell(Event::Abort { group, by, cause: text, recoverable });
    }

    /// Tells all ranks that this one has let go of a group.
    pub(crate) fn let_go(&self, fate: &Fate) {
        if self.num_farewells.fetch_add(1, Ordering::Relaxed) < FAREWELLS {
            self.tell(Event::LeftGroup { group: fate.group.to_string(), rank: self.shared.rank });
        }
    }

    fn tell(&self, event: Event) {
        let shared = self.shared.clone();
        self.speaker.say(event, move |event| shared.post(event));
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::Release);
        // Our own event ends our own wait. A rank that panics has not left in good order.
        let rank = self.shared.rank;
        let event = match std::thread::panicking() {
            true => Event::Exit {
                rank,
                host: self.shared.host.clone(),
                pid: std::process::id(),
                code: None,
                signal: None,
            },
            false => Event::Left { rank },
        };
        // A store whose host is frozen answers nobody; then what could not be said stays unsaid.
        let (speaker, shared, thread) =
            (std::mem::take(&mut self.speaker), self.shared.clone(), self.thread.take());
        let watcher = self.watcher.take();
        let (done, farewell) = mpsc::channel();
        let goodbye = move || {
            speaker.finish();
            shared.post(&event);
            let _ = thread.map(JoinHandle::join);
            if let Some((thread, stop)) = watcher {
                drop(stop);
                let _ = thread.join();
            }
            let _ = done.send(());
        };
        if std::thread::Builder::new().name("drumline-goodbye".into()).spawn(goodbye).is_ok() {
            let _ = farewell.recv_timeout(FAREWELL);
        }
    }
}

impl Shared {
    fn run(&self) {
        let mut log = events::follow_in(&self.store, self.incarnation);
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
                    let how = silent_end(&host);
                    self.gone(rank, Gone::Lost { host, pid, how });
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
            Event::LeftGroup { rank, .. } if rank == self.rank => {}
            Event::LeftGroup { group, rank } => self.has_let_go(group, rank),
            Event::Refused { rank, reason } => {
                let who = rank.map_or("a process".into(), |rank| format!("rank {rank}"));
                lock(&self.refused).get_or_insert(format!("{who} was refused: {reason}"));
            }
            Event::Abort { by, .. } if by == self.rank => {}
            Event::Abort { group, by, cause, recoverable } => {
                let news = CalledOff { by, cause, recoverable };
                // First: a group that is formed in this moment finds it there.
                lock(&self.called_off).insert(group.clone(), news.clone());
                self.for_group(&group, |fate| drop(fate.give_up(news.error(fate))));
            }
            Event::Call { group, rank, text } => {
                if let Ok(word) = serde_json::from_str::<Word>(&text) {
                    self.for_group(&group, |fate| self.hear(fate, rank, &word));
                }
            }
        }
    }

    fn hear(&self, fate: &Fate, rank: usize, word: &Word) {
        fate.state().hear(rank, word.clone());
        if word.asks
            && rank != self.rank
            && let Some(event) = self.answer(fate, word.trace.sequence)
        {
            self.post(&event);
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
            lock(&self.fates).iter().filter_map(Weak::upgrade).for_each(|fate| gone.tell(&fate, rank));
        }
    }

    fn has_let_go(&self, group: String, rank: usize) {
        // Remembered first: a group that is formed just now looks there or is told.
        let mut let_go = lock(&self.let_go);
        if let_go.len() == REMEMBERED {
            let_go.pop_front();
        }
        let_go.push_back((group.clone(), rank));
        drop(let_go);
        self.for_group(&group, |fate| Gone::Left.tell(fate, rank));
    }

    /// What this rank did as its `asked`-th call in a group, or last if it has not come that far, unless it has said so
    /// before.
    fn answer(&self, fate: &Fate, asked: u64) -> Option<Event> {
        let mut state = fate.state();
        state.asked = asked;
        let before = state.answered;
        let word = state.word(asked);
        (state.answered != before).then(|| self.call_event(fate, &word))
    }

    fn call_event(&self, fate: &Fate, word: &Word) -> Event {
        let text = serde_json::to_string(word).unwrap_or_default();
        Event::Call { group: fate.group.to_string(), rank: self.rank, text }
    }

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
            tracing::debug!(%error, rank = self.rank, ?event, "cannot tell the others");
        }
    }

    /// Acts on the group's fate, without a lock: to act may take the time of a message.
    fn for_group(&self, group: &str, act: impl Fn(&Fate)) {
        let fates: Vec<_> = lock(&self.fates).iter().filter_map(Weak::upgrade).collect();
        fates.iter().filter(|fate| *fate.group == *group).for_each(|fate| act(fate));
    }

    fn lost_store(&self, error: &str) {
        self.store_is_lost.store(true, Ordering::Release);
        let host = self.store_host.get();
        // When the host of the store has left in good order, only new groups need it.
        let has_left = host.is_some_and(|(rank, ..)| matches!(lock(&self.gone).get(rank), Some(Gone::Left)));
        if self.stopping.load(Ordering::Acquire) || has_left {
            return;
        }
        if let Some((rank, host, pid)) = host {
            let how = store_end(host, error);
            self.gone(*rank, Gone::Lost { host: host.clone(), pid: *pid, how });
        }
        for fate in lock(&self.fates).iter().filter_map(Weak::upgrade) {
            fate.give_up(CommError::Store { group: fate.group.clone(), cause: error.into() });
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
