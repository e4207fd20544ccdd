//! When a rank last gave a sign of life, and so whether it is lost.

use super::{LOST_AFTER, RankStatus, State};

/// The last sign of life of a rank, by the reader's own clock: the clocks of other hosts may differ. Only a file that is seen for
/// the first time is judged by the time that it contains.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LastSign {
    /// The content of the file: a living rank changes it twice a second.
    pid: u32,
    time: f64,
    seen: f64,
}

impl LastSign {
    /// For a rank whose file is seen for the first time. `now` is in seconds since 1970.
    pub fn new(status: &RankStatus, now: f64) -> Self {
        Self { pid: status.pid, time: status.time, seen: status.time.min(now) }
    }

    /// Updates from the current content of the file; returns whether it has changed.
    pub fn look(&mut self, status: &RankStatus, now: f64) -> bool {
        let has_changed = (self.pid, self.time) != (status.pid, status.time);
        if has_changed {
            *self = Self { pid: status.pid, time: status.time, seen: now };
        }
        has_changed
    }

    /// Seconds since the last sign of life.
    pub fn silence(&self, now: f64) -> f64 {
        (now - self.seen).max(0.0)
    }

    /// Whether the rank has ended without reporting it.
    pub fn is_lost(&self, status: &RankStatus, now: f64) -> bool {
        status.state == State::Running && self.silence(now) > LOST_AFTER.as_secs_f64()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(time: f64) -> RankStatus {
        RankStatus { time, pid: 7, ..RankStatus::default() }
    }

    #[test]
    fn a_rank_is_lost_when_it_is_silent_and_has_not_ended() {
        let silent = written(100.0);
        let sign = LastSign::new(&silent, 100.0);
        assert!(!sign.is_lost(&silent, 104.9) && sign.is_lost(&silent, 105.1));
        for state in [State::Ended, State::Failed] {
            assert!(!sign.is_lost(&RankStatus { state, ..silent.clone() }, 200.0));
        }
    }

    #[test]
    fn clocks_of_other_hosts_may_be_wrong() {
        for clock in [40.0, 5000.0] {
            let mut sign = LastSign::new(&written(clock), 1000.0);
            assert_eq!(
                sign.is_lost(&written(clock), 1000.0),
                clock < 1000.0,
                "nothing better is known at first"
            );
            assert!(sign.look(&written(clock + 0.5), 1000.5) && !sign.is_lost(&written(clock + 0.5), 1005.0));
            assert!(!sign.look(&written(clock + 0.5), 1006.0) && sign.is_lost(&written(clock + 0.5), 1006.0));
            let restarted = RankStatus { pid: 8, ..written(clock + 0.5) };
            assert!(
                sign.look(&restarted, 1007.0) && !sign.is_lost(&restarted, 1007.0),
                "another process is a sign"
            );
        }
    }
}
