//! Members whose life line has ended: how long each may take to resume before it is reported as lost.
//!
//! A process that dies loses all its connections at the same moment, so one that has none left gets a short grace: just
//! enough to come back if it was the network that broke them. One that has others still open lives, and may not even know that its
//! life line is broken until it sends the next ping over it. A process of this machine can be looked at: when it is seen
//! to have ended, nothing is waited for.

use crate::client_note::ClientNumber;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// For a member without any connection. With the 250 ms for which a group waits for the exit status, a death is
/// named within a second.
const ALONE: Duration = Duration::from_millis(300);
/// For a member that has other connections; longer than the time between two pings.
const IN_TOUCH: Duration = Duration::from_secs(5);
/// How often processes of this machine are looked at.
const LOOK: Duration = Duration::from_millis(20);

/// Who is waited for, and until when.
#[derive(Debug, Default)]
pub(super) struct Graces(HashMap<Missing, Grace>);

#[derive(Debug)]
struct Grace {
    until: Instant,
    /// Its process, if it runs on this machine.
    pid: Option<u32>,
}

/// A member without a life line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Missing {
    pub(super) rank: u32,
    pub(super) number: ClientNumber,
}

impl Graces {
    /// The life line of a member has ended; it has `others` more connections, and on this machine the process `pid`.
    pub(super) fn begin(&mut self, member: Missing, pid: Option<u32>, others: usize, now: Instant) {
        let until = now + if others == 0 { ALONE } else { IN_TOUCH };
        self.0.insert(member, Grace { until, pid });
    }

    /// The last connection of a member has ended.
    pub(super) fn alone(&mut self, member: Missing, now: Instant) {
        if let Some(grace) = self.0.get_mut(&member) {
            grace.until = grace.until.min(now + ALONE);
        }
    }

    /// The member is back, or has left.
    pub(super) fn end(&mut self, member: Missing) {
        self.0.remove(&member);
    }

    /// When somebody's time is up next, or somebody is to be looked at.
    pub(super) fn next_turn(&self, now: Instant) -> Option<Instant> {
        let turn =
            |grace: &Grace| if grace.pid.is_some() { grace.until.min(now + LOOK) } else { grace.until };
        self.0.values().map(turn).min()
    }

    /// Takes out those whose time is up, and those whose process has ended.
    pub(super) fn due(&mut self, now: Instant, has_ended: impl Fn(u32) -> bool) -> Vec<Missing> {
        let is_due = |grace: &Grace| grace.until <= now || grace.pid.is_some_and(&has_ended);
        self.0.extract_if(|_, grace| is_due(grace)).map(|(member, _)| member).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_no_connection_left_is_waited_for_a_moment_and_others_longer() {
        let (mut graces, began) = (Graces::default(), Instant::now());
        let [dead, alive, back] = [0, 1, 2].map(|rank| Missing { rank, number: ClientNumber::random() });
        let due = |graces: &mut Graces, time| graces.due(time, |_| panic!("it runs elsewhere"));
        graces.begin(dead, None, 0, began);
        graces.begin(alive, None, 2, began);
        graces.begin(back, None, 0, began);
        graces.end(back);
        assert_eq!(graces.next_turn(began), Some(began + ALONE));
        assert_eq!(due(&mut graces, began + ALONE), [dead]);
        assert_eq!(due(&mut graces, began + IN_TOUCH - ALONE), [], "it has other connections");
        graces.alone(alive, began + IN_TOUCH / 2);
        assert_eq!(due(&mut graces, began + IN_TOUCH / 2 + ALONE), [alive], "and then it has none");
        assert_eq!(graces.next_turn(began), None);
    }

    #[test]
    fn a_process_of_this_machine_that_has_ended_is_not_waited_for() {
        let (mut graces, began) = (Graces::default(), Instant::now());
        let member = Missing { rank: 0, number: ClientNumber::random() };
        graces.begin(member, Some(77), 1, began);
        assert_eq!(graces.next_turn(began), Some(began + LOOK));
        assert_eq!(graces.due(began, |pid| pid != 77), [], "control: it runs");
        assert_eq!(graces.due(began, |pid| pid == 77), [member]);
    }
}
