//! How long nothing has been heard from the store's host, over all connections of a client together.
//!
//! A network that is out for a while is waited for; a host that stays silent for longer than `DRUMLINE_HOST_TIMEOUT` is
//! given up. Silence begins with the first sign of it, a connection that broke or a reply that did not come, not with the
//! last word: who asks nothing hears nothing.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

#[derive(Debug)]
pub(super) struct Silence {
    since: Mutex<Option<Instant>>,
    patience: Duration,
}

impl Silence {
    pub(super) fn new(patience: Duration) -> Silence {
        Silence { since: Mutex::new(None), patience }
    }

    /// Something came from the host.
    pub(super) fn broken(&self) {
        *self.since() = None;
    }

    /// Nothing came from the host though it should have.
    pub(super) fn noticed(&self, now: Instant) {
        self.since().get_or_insert(now);
    }

    /// For how long nothing has come; `None` if there is no sign of silence.
    pub(super) fn lasted(&self, now: Instant) -> Option<Duration> {
        self.since().map(|since| now.saturating_duration_since(since))
    }

    /// When the host is given up, if it stays silent.
    pub(super) fn ends(&self) -> Option<Instant> {
        self.since().map(|since| since + self.patience)
    }

    /// Whether the host has been silent for too long.
    pub(super) fn is_over(&self, now: Instant) -> bool {
        self.ends().is_some_and(|end| end <= now)
    }

    fn since(&self) -> MutexGuard<'_, Option<Instant>> {
        self.since.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silence_counts_from_its_first_sign_and_any_word_ends_it() {
        let (silence, began) = (Silence::new(Duration::from_secs(30)), Instant::now());
        let at = |seconds| began + Duration::from_secs(seconds);
        assert_eq!((silence.lasted(at(99)), silence.is_over(at(99))), (None, false), "nobody asked");
        silence.noticed(at(100));
        silence.noticed(at(110));
        assert_eq!(silence.lasted(at(120)), Some(Duration::from_secs(20)));
        assert!(!silence.is_over(at(129)) && silence.is_over(at(130)));
        silence.broken();
        assert!(!silence.is_over(at(500)));
    }
}
