//! Whether a group can still be used, and the last calls of its members. Used by the group's calls and by the monitor.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::STATUS_WAIT;
use crate::call::{Call, Trace};
use crate::error::CommError;
use crate::group::GroupName;
use crate::shm::Board;

/// How many calls are remembered for other ranks to ask for.
const REMEMBERED: usize = 8;

/// The state of one group. Its locks are held for moments only, whatever the group's calls wait for.
#[derive(Debug)]
pub(crate) struct GroupState {
    /// The group's name.
    pub(crate) group: GroupName,
    /// Its members, as ranks of the job.
    pub(crate) members: Vec<usize>,
    /// Set once, after the cause.
    pub(crate) given_up: AtomicBool,
    /// Members that are known to have left the group or the job normally, by index.
    pub(crate) left: Vec<AtomicBool>,
    /// What the members on this node publish about themselves, once the group is formed.
    pub(crate) board: OnceLock<Board>,
    /// The number of this rank's last collective that has returned. Not sent to other ranks.
    pub(crate) ended: AtomicU64,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
pub(super) struct Inner {
    cause: Option<CommError>,
    /// The calls that members have reported, after one of them failed.
    reports: HashMap<usize, CallReport>,
    /// The number of the call that others have asked for; 0 if nobody has asked.
    pub(super) asked: u64,
    /// The number of the call that this rank has reported.
    pub(super) answered: Option<u64>,
    /// How many reports this rank has made.
    num_reports: u32,
    /// The last collectives of this rank and their numbers. A rank that only sends may be ahead of the others, so several
    /// are remembered.
    own_calls: VecDeque<(Call, u64)>,
    /// The last call of this rank that sends or receives messages.
    own_message: Option<OwnMessage>,
}

#[derive(Debug)]
struct OwnMessage {
    call: Call,
    number: u64,
    /// The number of the collective before it.
    after: u64,
}

/// A rank's last call, as it reports it in [`Event::Call`](drumline_rendezvous::events::Event::Call).
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct CallReport {
    /// The number of this report: reports of different threads may arrive in another order.
    turn: u32,
    /// The collective that was asked for, or the last one.
    pub(super) trace: Trace,
    /// The last call, if it sends or receives messages.
    #[serde(rename = "letter")]
    message: Option<Trace>,
    /// Whether the other ranks are asked to report theirs.
    pub(super) asks: bool,
}

impl Inner {
    fn own_call(&self, sequence: u64) -> Trace {
        let found = self.own_calls.iter().rfind(|(_, number)| *number <= sequence);
        found.map_or_else(Trace::none, |(call, number)| call.trace(*number))
    }

    fn num_own_calls(&self) -> u64 {
        self.own_calls.back().map_or(0, |(_, number)| *number)
    }

    /// The last call of this rank, if it sends or receives messages.
    fn last_message(&self) -> Option<Trace> {
        let message = self.own_message.as_ref().filter(|message| message.after == self.num_own_calls())?;
        Some(message.call.trace(message.number))
    }

    /// This rank's report of its `sequence`-th call, or of its last one.
    pub(super) fn report(&mut self, sequence: u64) -> CallReport {
        let trace = self.own_call(sequence);
        self.answered = Some(trace.sequence);
        self.num_reports += 1;
        CallReport { turn: self.num_reports, trace, message: self.last_message(), asks: false }
    }

    pub(super) fn add_report(&mut self, rank: usize, report: CallReport) {
        if self.reports.get(&rank).is_none_or(|known| known.turn < report.turn) {
            self.reports.insert(rank, report);
        }
    }
}

impl GroupState {
    pub(crate) fn new(group: GroupName, members: Vec<usize>) -> Self {
        let left = members.iter().map(|_| AtomicBool::new(false)).collect();
        let given_up = AtomicBool::new(false);
        let ended = AtomicU64::new(0);
        Self { group, members, given_up, left, board: OnceLock::new(), ended, inner: Mutex::default() }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives the group up, unless it was given up before. Returns the cause that counts, and whether it is this one.
    ///
    /// A mismatch that this rank has seen itself says more than that another rank has called the group off.
    pub(crate) fn give_up(&self, cause: CommError) -> (CommError, bool) {
        let mut state = self.lock();
        let holds = match &state.cause {
            None => true,
            Some(CommError::CalledOff { .. }) => matches!(cause, CommError::Mismatch { .. }),
            Some(_) => false,
        };
        if holds {
            state.cause = Some(cause.clone());
        }
        self.given_up.store(true, Ordering::Release);
        (state.cause.clone().unwrap_or(cause), holds)
    }

    /// Why the group was given up, if it was.
    pub(crate) fn cause(&self) -> Option<CommError> {
        self.lock().cause.clone()
    }

    /// Why the group was given up, if it was or is about to be: the end of a rank shows in many places before its event comes.
    pub(crate) fn cause_soon(&self) -> Option<CommError> {
        let deadline = Instant::now() + 2 * STATUS_WAIT;
        while self.cause().is_none() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
        self.cause()
    }

    /// Why these members, by index, will never share memory, if one has ended. A member may have left the group already.
    pub(crate) fn missing_member(&self, local: &[usize]) -> Option<String> {
        if let Some(cause) = self.cause() {
            return Some(cause.to_string());
        }
        let index = local.iter().find(|&&index| self.left[index].load(Ordering::Acquire))?;
        Some(format!("{} has left", self.group.rank(self.members[*index])))
    }

    /// The `sequence`-th collective of this rank, or its last if it has made fewer.
    pub(crate) fn own_call(&self, sequence: u64) -> Trace {
        self.lock().own_call(sequence)
    }

    /// Records a collective of this rank, for ranks that cannot read it from shared memory. Returns whether they have asked
    /// for it.
    pub(crate) fn note(&self, call: Call, sequence: u64) -> bool {
        let mut state = self.lock();
        if state.own_calls.len() == REMEMBERED {
            state.own_calls.pop_front();
        }
        state.own_calls.push_back((call, sequence));
        sequence <= state.asked
    }

    /// Records this rank's `number`-th call that sends or receives messages; see [`note`](Self::note).
    pub(crate) fn note_message(&self, call: Call, number: u64) {
        let mut state = self.lock();
        let after = state.num_own_calls();
        state.own_message = Some(OwnMessage { call, number, after });
    }

    /// The last collective of the member with this index: read from shared memory, or as it was reported.
    pub(crate) fn last_collective(&self, index: usize) -> Option<Trace> {
        let shown = self.board.get().and_then(|board| board.last_collective(index));
        shown.or_else(|| Some(self.lock().reports.get(&self.members[index])?.trace.clone()))
    }

    /// The collective that this rank, the member with this index, has not returned from.
    pub(crate) fn ongoing(&self, index: usize) -> Option<Trace> {
        let shown = self.board.get().and_then(|board| board.last_collective(index));
        let last = shown.unwrap_or_else(|| self.own_call(u64::MAX));
        (last.sequence > self.ended.load(Ordering::Relaxed)).then_some(last)
    }

    /// The last call of the member with this index, whether it is a collective or sends or receives messages.
    pub(crate) fn last_call(&self, index: usize) -> Option<Trace> {
        let shown = self.board.get().and_then(|board| board.last_call(index));
        shown.or_else(|| {
            let state = self.lock();
            let report = state.reports.get(&self.members[index])?;
            Some(report.message.as_ref().unwrap_or(&report.trace).clone())
        })
    }

    /// The last call of this rank, as recorded by [`note`](Self::note) and [`note_message`](Self::note_message).
    pub(crate) fn own_last_call(&self) -> Trace {
        let state = self.lock();
        state.last_message().unwrap_or_else(|| state.own_call(u64::MAX))
    }
}
