//! The event log: which ranks were lost, left, or aborted a group. One JSON line each, under one key of the store.
//!
//! ```text
//!  server (a connection ended), launcher (a process ended), group (abort, leave) ── append ─▶ LOG ── tail ─▶ all ranks
//! ```
//! A follower waits on the store, so an event takes as long as one message. To end a follower's wait early, post an
//! event.
//!
//! # Incarnations
//!
//! In one round the ranks may meet more than once: a group fails, every rank drops it and joins the same store again.
//! The server numbers these meetings from 1. A rank that joins takes part in the newest one. A rank that was already in
//! that one begins the next. Its number is the [`Member::incarnation`](crate::Member::incarnation).
//!
//! There is one log, which all ranks read from its beginning. It has two kinds of lines:
//!
//! * Lines without a number ([`post`]) hold for the rest of the round: `Lost` and `Exit`. The server does not admit a
//!   lost rank again before the next round, and a launcher starts each rank once a round, so neither is ever outdated.
//! * Lines with a number ([`post_in`]) hold for one meeting: `Left`, `LeftGroup`, `Abort`, `Call`, `Refused`.
//!
//! [`follow_in`] returns the lines without a number and those of one meeting: nothing outdated, and nobody has to
//! compare processes. Other keys that belong to a meeting (present ranks, addresses, names of groups) must contain the
//! number too: `PrefixStore::new(&incarnation.to_string(), store)`. The log itself always belongs to the whole store.
//!
//! # Size
//!
//! Successful calls post nothing: the log grows with failures and with ranks that leave the job or a group, not with
//! steps. A failed group costs at most a line of 8 KiB and a few short ones from each of its ranks. A rank reports only
//! the first groups that it leaves. The log may have 64 MiB a round.

use crate::store::Store;
use crate::store::error::StoreError;
use crate::store::request::MAX_VALUE;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::time::Instant;

/// The key of the log.
pub const LOG: &str = "drumline/events";
/// How many bytes of the log members may use. The rest is for the server and the launchers, so that a death can always
/// be reported.
pub(crate) const MEMBERS_SHARE: usize = MAX_VALUE - MAX_VALUE / 16;
/// The longest cause of an [`Event::Abort`] in the log. In a large world each rank may report every rank's call.
const MAX_CAUSE: usize = 8 * 1024;

/// An event that all ranks should know.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// A rank's connection to the store ended without a goodbye; posted by the store's server.
    Lost {
        /// The rank.
        rank: usize,
        /// Where it ran.
        host: String,
        /// Its process id.
        pid: u32,
    },
    /// A rank's process ended; posted by the launcher that reaped it.
    Exit {
        /// The rank.
        rank: usize,
        /// Where it ran.
        host: String,
        /// Its process id.
        pid: u32,
        /// Exit code, if it exited.
        code: Option<i32>,
        /// Signal, if one killed it.
        signal: Option<i32>,
    },
    /// A process that holds the key was not admitted as a member; posted by the store's server, once per rank and
    /// meeting.
    ///
    /// Ranks that still wait for all others need not wait longer. A group that is already complete continues: the
    /// refused process is not part of it.
    Refused {
        /// The rank that it wanted; `None` if its version differs, so that the rank is unknown.
        rank: Option<usize>,
        /// The reason that it was given.
        reason: String,
    },
    /// A rank has left regularly, or has joined again, which ends its part in the previous meeting.
    Left {
        /// The rank.
        rank: usize,
    },
    /// A rank has left a group and stays in the job.
    LeftGroup {
        /// The group.
        group: String,
        /// The rank.
        rank: usize,
    },
    /// A rank has aborted a group.
    Abort {
        /// The group.
        group: String,
        /// The rank that did.
        by: usize,
        /// Why.
        cause: String,
        /// Whether a new group may succeed.
        #[serde(default)]
        recoverable: bool,
    },
    /// What a rank is doing in a group: a description of its last call.
    Call {
        /// The group.
        group: String,
        /// The rank.
        rank: usize,
        /// The call.
        text: String,
    },
}

impl Event {
    /// Encodes the event as one line that holds for the whole round.
    pub fn to_line(&self) -> Vec<u8> {
        Line { incarnation: None, event: &*self.cut() }.encode()
    }

    /// Encodes the event as one line that holds for one meeting.
    pub fn to_line_in(&self, incarnation: u64) -> Vec<u8> {
        Line { incarnation: Some(incarnation), event: &*self.cut() }.encode()
    }

    /// The same event, with a cause cut to the allowed length.
    fn cut(&self) -> Cow<'_, Event> {
        match self {
            Event::Abort { group, by, cause, recoverable } if cause.len() > MAX_CAUSE => {
                let end = (0..=MAX_CAUSE).rev().find(|end| cause.is_char_boundary(*end)).unwrap_or(0);
                let group = group.clone();
                let cause = format!("{}…", &cause[..end]);
                Cow::Owned(Event::Abort { group, by: *by, cause, recoverable: *recoverable })
            }
            other => Cow::Borrowed(other),
        }
    }
}

/// A line of the log.
#[derive(Serialize, Deserialize)]
struct Line<E> {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    incarnation: Option<u64>,
    #[serde(flatten)]
    event: E,
}

impl Line<&Event> {
    fn encode(&self) -> Vec<u8> {
        let mut line = serde_json::to_vec(self).expect("an event has only strings and numbers");
        line.push(b'\n');
        line
    }
}

/// Posts an event that holds for the rest of the round.
pub fn post(store: &(impl Store + ?Sized), event: &Event) -> Result<(), StoreError> {
    store.append(LOG, &event.to_line()).map(drop)
}

/// Posts an event that holds for one meeting.
pub fn post_in(store: &(impl Store + ?Sized), incarnation: u64, event: &Event) -> Result<(), StoreError> {
    store.append(LOG, &event.to_line_in(incarnation)).map(drop)
}

/// Follows the log of `store` (`&dyn Store`, `Arc<dyn Store>`, ..) with the events of all meetings.
pub fn follow<S: Store>(store: S) -> Follower<S> {
    Follower { store, offset: 0, incarnation: None }
}

/// Follows the log with the events of one meeting and those of the whole round.
///
/// ```
/// use drumline_rendezvous::events::{Event, follow_in, post, post_in};
/// use drumline_rendezvous::MemoryStore;
/// use std::time::{Duration, Instant};
/// let store = MemoryStore::new();
/// let lost = Event::Lost { rank: 2, host: "n1".into(), pid: 77 };
/// post_in(&store, 1, &Event::Left { rank: 3 })?;
/// post(&store, &lost)?;
/// let mut log = follow_in(&store, 2);
/// assert_eq!(log.next_batch(Instant::now() + Duration::from_secs(1))?, [lost]);
/// # Ok::<(), drumline_rendezvous::StoreError>(())
/// ```
pub fn follow_in<S: Store>(store: S, incarnation: u64) -> Follower<S> {
    Follower { store, offset: 0, incarnation: Some(incarnation) }
}

/// The key under which the server records the meeting of a rank.
pub(crate) fn incarnation_key(rank: usize) -> String {
    format!("drumline/joined/{rank}")
}

/// The meeting in which a rank that has joined takes part.
pub(crate) fn incarnation_of(store: &dyn Store, rank: usize, deadline: Instant) -> Result<u64, StoreError> {
    let held = store.get(&incarnation_key(rank), deadline)?;
    let number = std::str::from_utf8(&held).ok().and_then(|text| text.parse().ok());
    number.ok_or_else(|| StoreError::Rejected {
        reason: format!("{:?} is not a number; try leaving this key to the store", incarnation_key(rank)),
    })
}

/// Reads the log from its beginning.
///
/// ```
/// use drumline_rendezvous::events::{Event, follow, post};
/// use drumline_rendezvous::MemoryStore;
/// use std::time::{Duration, Instant};
/// let store = MemoryStore::new();
/// post(&store, &Event::Left { rank: 3 })?;
/// let mut log = follow(&store);
/// assert_eq!(log.next_batch(Instant::now() + Duration::from_secs(1))?, [Event::Left { rank: 3 }]);
/// # Ok::<(), drumline_rendezvous::StoreError>(())
/// ```
#[derive(Debug)]
pub struct Follower<S> {
    store: S,
    offset: u64,
    incarnation: Option<u64>,
}

impl<S: Store> Follower<S> {
    /// The events since the last batch; waits for at least one. Empty if none came before the deadline.
    pub fn next_batch(&mut self, deadline: Instant) -> Result<Vec<Event>, StoreError> {
        loop {
            let bytes = match self.store.tail(LOG, self.offset, deadline) {
                Err(StoreError::Timeout { .. }) => return Ok(Vec::new()),
                other => other?,
            };
            self.offset += bytes.len() as u64;
            let lines = bytes.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
            let events: Vec<_> = lines.filter_map(parse).filter_map(|line| self.wanted(line)).collect();
            if !events.is_empty() {
                return Ok(events);
            }
        }
    }

    fn wanted(&self, line: Line<Event>) -> Option<Event> {
        let other = self.incarnation.zip(line.incarnation).is_some_and(|(ours, its)| ours != its);
        (!other).then_some(line.event)
    }
}

/// Parses a line; unknown lines of a newer version are skipped.
fn parse(line: &[u8]) -> Option<Line<Event>> {
    serde_json::from_slice(line).map_err(|error| tracing::warn!(%error, "skipped an unknown event")).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemoryStore;
    use std::time::Duration;

    #[test]
    fn unknown_lines_are_skipped_and_none_is_read_twice() {
        let store = MemoryStore::new();
        let exit = Event::Exit { rank: 2, host: "n1".into(), pid: 7, code: None, signal: Some(9) };
        post(&store, &exit).unwrap();
        store.append(LOG, b"{\"event\":\"dance\"}\n").unwrap();
        let mut log = follow(&store);
        assert_eq!(log.next_batch(Instant::now() + Duration::from_secs(1)).unwrap(), [exit]);
        assert!(log.next_batch(Instant::now()).unwrap().is_empty());
    }

    #[test]
    fn a_long_cause_is_cut_and_a_short_one_is_not() {
        let abort = |cause: String| Event::Abort { group: "world".into(), by: 1, cause, recoverable: true };
        let store = MemoryStore::new();
        post_in(&store, 1, &abort("é".repeat(100_000))).unwrap();
        post_in(&store, 1, &abort("short".into())).unwrap();
        let events = follow(&store).next_batch(Instant::now() + Duration::from_secs(1)).unwrap();
        assert_eq!(events, [abort("é".repeat(MAX_CAUSE / 2) + "…"), abort("short".into())]);
    }

    #[test]
    fn events_of_another_meeting_do_not_end_a_wait() {
        let store = MemoryStore::new();
        let abort =
            |by| Event::Abort { group: "world".into(), by, cause: "a mismatch".into(), recoverable: true };
        let mut second = follow_in(store.clone(), 2);
        let waiter =
            std::thread::spawn(move || second.next_batch(Instant::now() + Duration::from_secs(10)).unwrap());
        post_in(&store, 1, &abort(0)).unwrap();
        std::thread::sleep(Duration::from_millis(50));
        assert!(!waiter.is_finished());
        post_in(&store, 2, &abort(1)).unwrap();
        assert_eq!(waiter.join().unwrap(), [abort(1)]);
        let all = follow(&store).next_batch(Instant::now() + Duration::from_secs(1)).unwrap();
        assert_eq!(all, [abort(0), abort(1)]);
    }
}
