//! How long nothing has been heard from the store's host, over all connections of a client together.
//!
//! A network that is out for a while is waited for; a host that stays silent for longer than `DRUMLINE_HOST_TIMEOUT` is
//! given up. Silence begins with the first sign of it, a connection that broke or a reply that did not come, not with the
//! last word: who asks nothing hears nothing.
//!
//! A host that refuses connections is not silent: its store's process has ended. But a firewall can refuse in its name for a
//! moment, so that counts only when nothing else has been heard from another host for a while.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// For so long another host must refuse connections before its store counts as gone.
const REFUSED: Duration = Duration::from_millis(1500);
/// Refusals that are further apart have nothing to do with each other.
const APART: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct Silence {
    signs: Mutex<Signs>,
    patience: Duration,
}

#[derive(Debug, Default)]
struct Signs {
    silent_since: Option<Instant>,
    refusals: Option<Refusals>,
}

/// Refused connections, with nothing else between them.
#[derive(Debug)]
struct Refusals {
    first: Instant,
    last: Instant,
}

impl Silence {
    pub(super) fn new(patience: Duration) -> Silence {
        Silence { signs: Mutex::default(), patience }
    }

    /// Something came from the host.
    pub(super) fn broken(&self) {
        *self.signs() = Signs::default();
    }

    /// Nothing came from the host though it should have.
    pub(super) fn noticed(&self, now: Instant) {
        self.signs().silent_since.get_or_insert(now);
    }

    /// The host could not be reached, and did not refuse either.
    pub(super) fn unreached(&self, now: Instant) {
        self.noticed(now);
        self.signs().refusals = None;
    }

    /// The host has refused a connection: whether it has done so for long enough to be believed.
    pub(super) fn is_refused_for_good(&self, now: Instant) -> bool {
        let mut signs = self.signs();
        signs.silent_since.get_or_insert(now);
        let is_apart = |refusals: &Refusals| now.saturating_duration_since(refusals.last) > APART;
        let before = signs.refusals.take().filter(|refusals| !is_apart(refusals));
        let first = before.map_or(now, |refusals| refusals.first);
        signs.refusals = Some(Refusals { first, last: now });
        now.saturating_duration_since(first) >= REFUSED.min(self.patience / 2)
    }

    /// For how long nothing has come; `None` if there is no sign of silence.
    pub(super) fn lasted(&self, now: Instant) -> Option<Duration> {
        self.signs().silent_since.map(|since| now.saturating_duration_since(since))
    }

    /// When the host is given up, if it stays silent.
    pub(super) fn ends(&self) -> Option<Instant> {
        self.signs().silent_since.map(|since| since + self.patience)
    }

    /// Whether the host has been silent for too long.
    pub(super) fn is_over(&self, now: Instant) -> bool {
        self.ends().is_some_and(|end| end <= now)
    }

    fn signs(&self) -> MutexGuard<'_, Signs> {
        self.signs.lock().unwrap_or_else(PoisonError::into_inner)
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

    #[test]
    fn refusals_are_believed_when_nothing_else_was_heard_for_a_while() {
        let (silence, began) = (Silence::new(Duration::from_secs(30)), Instant::now());
        let refused = |millis| silence.is_refused_for_good(began + Duration::from_millis(millis));
        assert_eq!([0, 700, 1400, 1500].map(refused), [false, false, false, true]);
        silence.broken();
        assert_eq!([1600, 2400].map(refused), [false; 2], "it has answered");
        silence.unreached(began);
        assert_eq!([2500, 3200].map(refused), [false; 2], "it was silent");
        assert_eq!([9000, 9900].map(refused), [false; 2], "long after the last one");
        let hasty = Silence::new(Duration::from_secs(1));
        let refused = |millis| hasty.is_refused_for_good(began + Duration::from_millis(millis));
        assert_eq!([0, 500].map(refused), [false, true], "before a silent host would be given up");
    }
}
