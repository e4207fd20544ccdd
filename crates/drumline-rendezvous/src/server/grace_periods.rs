//! Members whose life line has ended: how long each may take to resume before it is reported as lost.
//!
//! A process that dies loses all its connections at the same moment. So a member without connections gets a short grace
//! period: just enough to come back if the network broke them. A member with other open connections is alive, and may
//! not even know that its life line is broken until it sends the next ping. A process of this machine can be inspected:
//! if it is seen to have ended, there is no grace period.

use crate::client_note::ClientNumber;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// For a member without any connection. Together with the 250 ms in which a group waits for the exit status, a death is
/// reported within a second.
const DISCONNECTED: Duration = Duration::from_millis(300);
/// For a member that has other connections; longer than the time between two pings.
const CONNECTED: Duration = Duration::from_secs(5);
/// How often processes of this machine are checked.
const CHECK: Duration = Duration::from_millis(20);

/// The members in a grace period, and when it ends.
#[derive(Debug, Default)]
pub(super) struct GracePeriods(HashMap<Missing, GracePeriod>);

#[derive(Debug)]
struct GracePeriod {
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

impl GracePeriods {
    /// Begins the period of a member whose life line has ended. It has `others` more connections and, on this machine,
    /// the process `pid`.
    pub(super) fn begin(&mut self, member: Missing, pid: Option<u32>, others: usize, now: Instant) {
        let until = now + if others == 0 { DISCONNECTED } else { CONNECTED };
        self.0.insert(member, GracePeriod { until, pid });
    }

    /// Shortens the period of a member whose last connection has ended.
    pub(super) fn disconnected(&mut self, member: Missing, now: Instant) {
        if let Some(period) = self.0.get_mut(&member) {
            period.until = period.until.min(now + DISCONNECTED);
        }
    }

    /// Ends the period of a member that is back or has left.
    pub(super) fn end(&mut self, member: Missing) {
        self.0.remove(&member);
    }

    /// When the next period ends, or the next check is due.
    pub(super) fn next_turn(&self, now: Instant) -> Option<Instant> {
        let turn = |period: &GracePeriod| {
            if period.pid.is_some() { period.until.min(now + CHECK) } else { period.until }
        };
        self.0.values().map(turn).min()
    }

    /// Removes and returns the members whose period is over or whose process has ended.
    pub(super) fn due(&mut self, now: Instant, has_ended: impl Fn(u32) -> bool) -> Vec<Missing> {
        let is_due = |period: &GracePeriod| period.until <= now || period.pid.is_some_and(&has_ended);
        self.0.extract_if(|_, period| is_due(period)).map(|(member, _)| member).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disconnected_members_get_a_short_period_and_others_a_longer_one() {
        let (mut periods, began) = (GracePeriods::default(), Instant::now());
        let [dead, alive, back] = [0, 1, 2].map(|rank| Missing { rank, number: ClientNumber::random() });
        let due =
            |periods: &mut GracePeriods, time| periods.due(time, |_| panic!("it runs on another machine"));
        periods.begin(dead, None, 0, began);
        periods.begin(alive, None, 2, began);
        periods.begin(back, None, 0, began);
        periods.end(back);
        assert_eq!(periods.next_turn(began), Some(began + DISCONNECTED));
        assert_eq!(due(&mut periods, began + DISCONNECTED), [dead]);
        assert_eq!(due(&mut periods, began + CONNECTED - DISCONNECTED), [], "it has other connections");
        periods.disconnected(alive, began + CONNECTED / 2);
        assert_eq!(due(&mut periods, began + CONNECTED / 2 + DISCONNECTED), [alive], "then it has none");
        assert_eq!(periods.next_turn(began), None);
    }

    #[test]
    fn an_ended_process_of_this_machine_gets_no_period() {
        let (mut periods, began) = (GracePeriods::default(), Instant::now());
        let member = Missing { rank: 0, number: ClientNumber::random() };
        periods.begin(member, Some(77), 1, began);
        assert_eq!(periods.next_turn(began), Some(began + CHECK));
        assert_eq!(periods.due(began, |pid| pid != 77), [], "control: it runs");
        assert_eq!(periods.due(began, |pid| pid == 77), [member]);
    }
}
