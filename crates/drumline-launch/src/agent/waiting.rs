//! What is being waited for, so that it can be said when it takes long.

use std::time::{Duration, Instant};

/// What takes longer than this is told.
pub(super) const LONG_WAIT: Duration = Duration::from_secs(2);

/// What is being waited for, and what was said of it.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    what: Option<(String, Instant)>,
    said: Option<String>,
}

impl Waiting {
    /// From now on this is waited for; `None`: nothing.
    pub(super) fn is_for(&mut self, what: Option<String>) {
        if self.what.as_ref().map(|(what, _)| what) != what.as_ref() {
            self.what = what.map(|what| (what, Instant::now()));
        }
    }

    /// What should be said now: once, and not of short waits.
    pub(super) fn due(&mut self, now: Instant) -> Option<String> {
        let (what, since) = self.what.as_ref()?;
        let is_news = now.saturating_duration_since(*since) >= LONG_WAIT && self.said.as_ref() != Some(what);
        is_news.then(|| self.said.insert(what.clone()).clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_wait_is_told_once_and_a_short_one_not() {
        let mut waiting = Waiting::default();
        let later = Instant::now() + 2 * LONG_WAIT;
        assert_eq!(waiting.due(later), None);
        waiting.is_for(Some("one of two".into()));
        assert_eq!(waiting.due(Instant::now()), None);
        waiting.is_for(Some("one of two".into()));
        assert_eq!(waiting.due(later).as_deref(), Some("one of two"));
        assert_eq!(waiting.due(later), None);
        waiting.is_for(None);
        assert_eq!(waiting.due(later), None);
    }
}
