//! Announces what the agent waits for, when that takes long.

use std::time::{Duration, Instant};

/// A wait longer than this is announced.
pub(super) const LONG_WAIT: Duration = Duration::from_secs(2);

/// The current wait, and the last one that was announced.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    what: Option<(String, Instant)>,
    announced: Option<String>,
}

impl Waiting {
    /// Sets what the agent waits for now; `None` if for nothing.
    pub(super) fn set(&mut self, what: Option<String>) {
        if self.what.as_ref().map(|(what, _)| what) != what.as_ref() {
            self.what = what.map(|what| (what, Instant::now()));
        }
    }

    /// The notice to show now: each wait is announced once, and short waits are not.
    pub(super) fn due(&mut self, now: Instant) -> Option<String> {
        let (what, since) = self.what.as_ref()?;
        let is_news =
            now.saturating_duration_since(*since) >= LONG_WAIT && self.announced.as_ref() != Some(what);
        is_news.then(|| self.announced.insert(what.clone()).clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_wait_is_announced_once_and_a_short_one_is_not() {
        let mut waiting = Waiting::default();
        let later = Instant::now() + 2 * LONG_WAIT;
        assert_eq!(waiting.due(later), None);
        waiting.set(Some("one of two".into()));
        assert_eq!(waiting.due(Instant::now()), None);
        waiting.set(Some("one of two".into()));
        assert_eq!(waiting.due(later).as_deref(), Some("one of two"));
        assert_eq!(waiting.due(later), None);
        waiting.set(None);
        assert_eq!(waiting.due(later), None);
    }
}
