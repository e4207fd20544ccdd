//! Decides when to report that something still waits: soon enough to be useful, rarely enough not to fill the log.

use std::time::{Duration, Instant};

const FIRST: Duration = Duration::from_secs(5);
const AGAIN: Duration = Duration::from_secs(30);

/// Due five seconds after the start of a wait, and every thirty seconds from then on.
#[derive(Debug)]
pub(crate) struct Reminder {
    next: Instant,
}

impl Reminder {
    pub(crate) fn new(began: Instant) -> Reminder {
        Reminder { next: began + FIRST }
    }

    /// Whether to report now; `true` once for each due time.
    pub(crate) fn is_due(&mut self, now: Instant) -> bool {
        let due = now >= self.next;
        if due {
            self.next = now + AGAIN;
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_five_seconds_then_every_thirty() {
        let began = Instant::now();
        let mut reminder = Reminder::new(began);
        let due = (0..=100).filter(|second| reminder.is_due(began + Duration::from_secs(*second)));
        assert_eq!(due.collect::<Vec<_>>(), [5, 35, 65, 95]);
    }
}
