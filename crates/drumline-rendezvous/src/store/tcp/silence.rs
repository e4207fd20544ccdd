//! How long the store's host has been silent, over all connections of a client.
//!
//! A client waits out a network outage, but gives up a host that is silent for longer than `DRUMLINE_HOST_TIMEOUT`.
//! Silence begins with its first sign: a connection that broke, or a reply that did not come. It does not begin with
//! the last message, because a client that sends no request gets no reply.
//!
//! A host that refuses connections is not silent: its store's process has ended. But a firewall can also refuse for a
//! moment. So for another host, refusals count only when nothing else was received from it for a while.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long another host must refuse connections before its store counts as gone.
const REFUSED: Duration = Duration::from_millis(1500);
/// Refusals further apart are unrelated.
const UNRELATED: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct Silence {
    signs: Mutex<Signs>,
    host_timeout: Duration,
}

#[derive(Debug, Default)]
struct Signs {
    silent_since: Option<Instant>,
    refusals: Option<Refusals>,
}

/// Refused connections, with no other result between them.
#[derive(Debug)]
struct Refusals {
    first: Instant,
    last: Instant,
}

impl Silence {
    pub(super) fn new(host_timeout: Duration) -> Silence {
        Silence { signs: Mutex::default(), host_timeout }
    }

    /// Ends the silence: something was received from the host.
    pub(super) fn end(&self) {
        *self.signs() = Signs::default();
    }

    /// Begins the silence, unless it has begun: the host did not answer in time.
    pub(super) fn begin(&self, now: Instant) {
        self.signs().silent_since.get_or_insert(now);
    }

    /// Records that the host could not be reached, and did not refuse either.
    pub(super) fn unreached(&self, now: Instant) {
        self.begin(now);
        self.signs().refusals = None;
    }

    /// Records that the host refused a connection. Returns whether it has refused for long enough to count as gone.
    pub(super) fn is_refused_for_good(&self, now: Instant) -> bool {
        let mut signs = self.signs();
        signs.silent_since.get_or_insert(now);
        let is_unrelated = |refusals: &Refusals| now.saturating_duration_since(refusals.last) > UNRELATED;
        let before = signs.refusals.take().filter(|refusals| !is_unrelated(refusals));
        let first = before.map_or(now, |refusals| refusals.first);
        signs.refusals = Some(Refusals { first, last: now });
        now.saturating_duration_since(first) >= REFUSED.min(self.host_timeout / 2)
    }

    /// How long the host has been silent; `None` if it is not.
    pub(super) fn lasted(&self, now: Instant) -> Option<Duration> {
        self.signs().silent_since.map(|since| now.saturating_duration_since(since))
    }

    /// When the host will be given up, if it stays silent.
    pub(super) fn ends(&self) -> Option<Instant> {
        self.signs().silent_since.map(|since| since + self.host_timeout)
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
    fn silence_counts_from_its_first_sign_and_any_message_ends_it() {
        let (silence, began) = (Silence::new(Duration::from_secs(30)), Instant::now());
        let at = |seconds| began + Duration::from_secs(seconds);
        assert_eq!((silence.lasted(at(99)), silence.is_over(at(99))), (None, false), "no request was sent");
        silence.begin(at(100));
        silence.begin(at(110));
        assert_eq!(silence.lasted(at(120)), Some(Duration::from_secs(20)));
        assert!(!silence.is_over(at(129)) && silence.is_over(at(130)));
        silence.end();
        assert!(!silence.is_over(at(500)));
    }

    #[test]
    fn refusals_count_when_nothing_else_was_received_for_a_while() {
        let (silence, began) = (Silence::new(Duration::from_secs(30)), Instant::now());
        let refused = |millis| silence.is_refused_for_good(began + Duration::from_millis(millis));
        assert_eq!([0, 700, 1400, 1500].map(refused), [false, false, false, true]);
        silence.end();
        assert_eq!([1600, 2400].map(refused), [false; 2], "it has answered");
        silence.unreached(began);
        assert_eq!([2500, 3200].map(refused), [false; 2], "it was silent");
        assert_eq!([9000, 9900].map(refused), [false; 2], "long after the last one");
        let impatient = Silence::new(Duration::from_secs(1));
        let refused = |millis| impatient.is_refused_for_good(began + Duration::from_millis(millis));
        assert_eq!([0, 500].map(refused), [false, true], "before a silent host would be given up");
    }
}
