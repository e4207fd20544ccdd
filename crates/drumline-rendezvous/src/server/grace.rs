//! Members whose life line has ended: how long each may take to resume before it is reported as lost.
//!
//! A process that dies loses all its connections at the same moment, so one that has none left gets a short grace: just
//! enough to come back if it was the network that broke them. One that has others still open lives, and may not even know that its
//! life line is broken until it sends the next ping over it.

use crate::client_note::ClientNumber;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// For a member without any connection. With the 250 ms for which a group waits for the exit status, a death is
/// named within a second.
const ALONE: Duration = Duration::from_millis(400);
/// For a member that has other connections; longer than the time between two pings.
const IN_TOUCH: Duration = Duration::from_secs(5);

/// Who is waited for, and until when.
#[derive(Debug, Default)]
pub(super) struct Graces(HashMap<Missing, Instant>);

/// A member without a life line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Missing {
    pub(super) rank: u32,
    pub(super) number: ClientNumber,
}

impl Graces {
    /// The life line of a member has ended; it has `others` more connections.
    pub(super) fn begin(&mut self, member: Missing, others: usize, now: Instant) {
        self.0.insert(member, now + if others == 0 { ALONE } else { IN_TOUCH });
    }

    /// The last connection of a member has ended.
    pub(super) fn alone(&mut self, member: Missing, now: Instant) {
        if let Some(until) = self.0.get_mut(&member) {
            *until = (*until).min(now + ALONE);
        }
    }

    /// The member is back, or has left.
    pub(super) fn end(&mut self, member: Missing) {
        self.0.remove(&member);
    }

    /// When somebody's time is up next.
    pub(super) fn next_turn(&self) -> Option<Instant> {
        self.0.values().min().copied()
    }

    /// Takes out those whose time is up.
    pub(super) fn due(&mut self, now: Instant) -> Vec<Missing> {
        self.0.extract_if(|_, until| *until <= now).map(|(member, _)| member).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_no_connection_left_is_waited_for_a_moment_and_others_longer() {
        let (mut graces, began) = (Graces::default(), Instant::now());
        let [dead, alive, back] = [0, 1, 2].map(|rank| Missing { rank, number: ClientNumber::random() });
        graces.begin(dead, 0, began);
        graces.begin(alive, 2, began);
        graces.begin(back, 0, began);
        graces.end(back);
        assert_eq!(graces.next_turn(), Some(began + ALONE));
        assert_eq!(graces.due(began + ALONE), [dead]);
        assert_eq!(graces.due(began + IN_TOUCH - ALONE), [], "it has other connections");
        graces.alone(alive, began + IN_TOUCH / 2);
        assert_eq!(graces.due(began + IN_TOUCH / 2 + ALONE), [alive], "and then it has none");
        assert_eq!(graces.next_turn(), None);
    }
}
