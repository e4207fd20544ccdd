//! The event log: who was lost, who left, who called a group off. One JSON line each, under one key of the store.
//!
//! ```text
//!  server (a connection ended), launcher (a process ended), group (abort, leave) ── append ─▶ LOG ── tail ─▶ everyone
//! ```
//! A follower is pushed to, so the news takes as long as one message. To end a follower's wait early, post an event.

use crate::store::Store;
use crate::store::error::StoreError;
use serde::{Deserialize, Serialize};
use std::time::Instant;

/// The key of the log.
pub const LOG: &str = "drumline/events";

/// Something all ranks should know.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// A rank's connection to the store ended without a goodbye; posted by the store's server.
    Lost {
        /// The rank.
        rank: usize,
        /// Where it ran.
        host: String,
        /// Its process.
        pid: u32,
    },
    /// A rank's process ended; posted by the launcher that reaped it.
    Exit {
        /// The rank.
        rank: usize,
        /// Where it ran.
        host: String,
        /// Its process.
        pid: u32,
        /// Exit code, if it exited.
        code: Option<i32>,
        /// Signal, if one killed it.
        signal: Option<i32>,
    },
    /// A rank has left in good order.
    Left {
        /// The rank.
        rank: usize,
    },
    /// A rank has called off a group.
    Abort {
        /// The group.
        group: String,
        /// The rank that did.
        by: usize,
        /// Why.
        cause: String,
        /// Whether a new group may fare better.
        #[serde(default)]
        recoverable: bool,
    },
    /// What a rank is doing in a group: its last call, in words.
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
    /// The event as one line.
    pub fn to_line(&self) -> Vec<u8> {
        let mut line = serde_json::to_vec(self).expect("an event has only strings and numbers");
        line.push(b'\n');
        line
    }
}

/// Adds an event to the log.
pub fn post(store: &(impl Store + ?Sized), event: &Event) -> Result<(), StoreError> {
    store.append(LOG, &event.to_line()).map(drop)
}

/// Follows the log of `store`: `&dyn Store`, `Arc<dyn Store>`, ..
pub fn follow<S: Store>(store: S) -> Follower<S> {
    Follower { store, offset: 0 }
}

/// Reads the log from its beginning on.
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
}

impl<S: Store> Follower<S> {
    /// The events since the last batch; waits for one. Empty if none came before the deadline.
    pub fn next_batch(&mut self, deadline: Instant) -> Result<Vec<Event>, StoreError> {
        let bytes = match self.store.tail(LOG, self.offset, deadline) {
            Err(StoreError::Timeout { .. }) => return Ok(Vec::new()),
            other => other?,
        };
        self.offset += bytes.len() as u64;
        Ok(bytes.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()).filter_map(parse).collect())
    }
}

/// A line of a newer version that this one does not know is passed over.
fn parse(line: &[u8]) -> Option<Event> {
    serde_json::from_slice(line).map_err(|error| tracing::warn!(%error, "passed over an unknown event")).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemoryStore;
    use std::time::Duration;

    #[test]
    fn unknown_lines_are_passed_over_and_none_is_read_twice() {
        let store = MemoryStore::new();
        let exit = Event::Exit { rank: 2, host: "n1".into(), pid: 7, code: None, signal: Some(9) };
        post(&store, &exit).unwrap();
        store.append(LOG, b"{\"event\":\"dance\"}\n").unwrap();
        let mut log = follow(&store);
        assert_eq!(log.next_batch(Instant::now() + Duration::from_secs(1)).unwrap(), [exit]);
        assert!(log.next_batch(Instant::now()).unwrap().is_empty());
    }
}
