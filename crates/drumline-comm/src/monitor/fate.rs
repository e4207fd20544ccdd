//! Whether a group can still be used, and what its members said they do: seen by its calls and by the monitor.

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

/// Calls remembered for others to ask.
const REMEMBERED: usize = 8;

/// The fate of one group. Its locks are held for moments only, whatever the group's calls wait for.
#[derive(Debug)]
pub(crate) struct Fate {
    /// The group's name.
    pub(crate) group: GroupName,
    /// Its members, as ranks of the job.
    pub(crate) members: Vec<usize>,
    /// Raised once; the cause is there before.
    pub(crate) given_up: AtomicBool,
    /// Members that are known to have let go of the group, or left the job, in good order, by index.
    pub(crate) left: Vec<AtomicBool>,
    /// What the members on this node show of themselves, once the group is formed.
    pub(crate) board: OnceLock<Board>,
    /// The number of this rank's last collective that has ended: told to nobody, only compared by who looks.
    pub(crate) ended: AtomicU64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
pub(super) struct State {
    cause: Option<CommError>,
    /// What members said they do, when one of them ran into trouble.
    words: HashMap<usize, Word>,
    /// The number of the call that others want to know of; 0 if nobody has asked.
    pub(super) asked: u64,
    /// The number of the call that this rank has told them of.
    pub(super) answered: Option<u64>,
    /// How often this rank has said something.
    turns: u32,
    /// The last collectives of this rank and their numbers, for others to ask: one who only sends may be ahead of them.
    own_calls: VecDeque<(Call, u64)>,
    /// The last call of this rank that sends or receives messages.
    own_letter: Option<OwnLetter>,
}

#[derive(Debug)]
struct OwnLetter {
    call: Call,
    number: u64,
    /// The number of the collective before it.
    after: u64,
}

/// What a rank says of itself in [`Event::Call`](drumline_rendezvous::events::Event::Call).
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Word {
    /// Counts what this rank has said in the group: its threads may be heard in another order.
    turn: u32,
    /// The collective in question.
    pub(super) trace: Trace,
    /// What it did last, if that was to send or receive messages.
    letter: Option<Trace>,
    /// The others shall say the same of themselves.
    pub(super) asks: bool,
}

impl State {
    fn own_call(&self, sequence: u64) -> Trace {
        let found = self.own_calls.iter().rfind(|(_, number)| *number <= sequence);
        found.map_or_else(Trace::none, |(call, number)| call.trace(*number))
    }

    fn num_own_calls(&self) -> u64 {
        self.own_calls.back().map_or(0, |(_, number)| *number)
    }

    /// What this rank did last, if that was to send or receive messages.
    fn last_letter(&self) -> Option<Trace> {
        let letter = self.own_letter.as_ref().filter(|letter| letter.after == self.num_own_calls())?;
        Some(letter.call.trace(letter.number))
    }

    /// What this rank is to say of its `sequence`-th call, or last one.
    pub(super) fn word(&mut self, sequence: u64) -> Word {
        let trace = self.own_call(sequence);
        self.answered = Some(trace.sequence);
        self.turns += 1;
        Word { turn: self.turns, trace, letter: self.last_letter(), asks: false }
    }

    pub(super) fn hear(&mut self, rank: usize, word: Word) {
        if self.words.get(&rank).is_none_or(|known| known.turn < word.turn) {
            self.words.insert(rank, word);
        }
    }
}

impl Fate {
    pub(crate) fn new(group: GroupName, members: Vec<usize>) -> Self {
        let left = members.iter().map(|_| AtomicBool::new(false)).collect();
        let (given_up, board) = (AtomicBool::new(false), OnceLock::new());
        Self { group, members, given_up, left, board, ended: AtomicU64::new(0), state: Mutex::default() }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives the group up, unless that has happened; returns the cause that holds, and whether it is this one.
    ///
    /// A mismatch that this rank has seen itself says more than that another rank has called the group off.
    pub(crate) fn give_up(&self, cause: CommError) -> (CommError, bool) {
        let mut state = self.state();
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
        self.state().cause.clone()
    }

    /// Why the group was given up, if it was or is about to be: a rank's end shows in many places before it is news.
    pub(crate) fn cause_soon(&self) -> Option<CommError> {
        let deadline = Instant::now() + 2 * STATUS_WAIT;
        while self.cause().is_none() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
        self.cause()
    }

    /// Why these members, by index, never will share memory, if one is gone. Others may be done with the group already.
    pub(crate) fn absence(&self, local: &[usize]) -> Option<String> {
        if let Some(cause) = self.cause() {
            return Some(cause.to_string());
        }
        let index = local.iter().find(|&&index| self.left[index].load(Ordering::Acquire))?;
        Some(format!("{} has left", self.group.rank(self.members[*index])))
    }

    /// The `sequence`-th collective of this rank, or the last if it has not come that far.
    pub(crate) fn own_call(&self, sequence: u64) -> Trace {
        self.state().own_call(sequence)
    }

    /// Notes which collective this rank makes, for others to ask; only where they cannot read it from shared memory. Says
    /// whether they have asked.
    pub(crate) fn note(&self, call: Call, sequence: u64) -> bool {
        let mut state = self.state();
        if state.own_calls.len() == REMEMBERED {
            state.own_calls.pop_front();
        }
        state.own_calls.push_back((call, sequence));
        sequence <= state.asked
    }

    /// Notes which messages this rank sends or receives, as its `number`-th such call; as [`note`](Self::note).
    pub(crate) fn note_letter(&self, call: Call, number: u64) {
        let mut state = self.state();
        let after = state.num_own_calls();
        state.own_letter = Some(OwnLetter { call, number, after });
    }

    /// The last collective of the member with this index: read from shared memory, or what it said when asked.
    pub(crate) fn last_collective(&self, index: usize) -> Option<Trace> {
        let shown = self.board.get().and_then(|board| board.last_collective(index));
        shown.or_else(|| Some(self.state().words.get(&self.members[index])?.trace.clone()))
    }

    /// The collective that this rank, the member with this index, is in.
    pub(crate) fn under_way(&self, index: usize) -> Option<Trace> {
        let shown = self.board.get().and_then(|board| board.last_collective(index));
        let last = shown.unwrap_or_else(|| self.own_call(u64::MAX));
        (last.sequence > self.ended.load(Ordering::Relaxed)).then_some(last)
    }

    /// The last call of the member with this index, be it a collective or one that sends or receives messages.
    pub(crate) fn last_call(&self, index: usize) -> Option<Trace> {
        let shown = self.board.get().and_then(|board| board.last_call(index));
        shown.or_else(|| {
            let state = self.state();
            let word = state.words.get(&self.members[index])?;
            Some(word.letter.as_ref().unwrap_or(&word.trace).clone())
        })
    }

    /// The last call of this rank as far as it has noted it itself: see [`note`](Self::note).
    pub(crate) fn own_last_call(&self) -> Trace {
        let state = self.state();
        state.last_letter().unwrap_or_else(|| state.own_call(u64::MAX))
    }
}
