//! Who takes part in a contest.

use std::fmt;

/// One who is measured: its name in reports, and its kind, which tells the contest how to start it.
///
/// Where a contender has several good settings and none is best everywhere, each setting takes part on its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Contender<K> {
    pub(crate) name: &'static str,
    /// Empty where there is only one.
    pub(crate) setting: &'static str,
    pub(crate) kind: K,
}

impl<K> Contender<K> {
    pub(crate) const fn new(name: &'static str, kind: K) -> Self {
        Self { name, setting: "", kind }
    }
}

impl<K> fmt::Display for Contender<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, setting, .. } = self;
        if setting.is_empty() { f.write_str(name) } else { write!(f, "{name} ({setting})") }
    }
}
