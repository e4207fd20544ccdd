//! What a start gave: times, or memory.

use std::time::Duration;

/// What one run gave; which of them depends on the subject.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct Figures {
    pub(crate) first_line: Option<Duration>,
    pub(crate) total: Option<Duration>,
    pub(crate) restart: Option<Duration>,
    pub(crate) pss: Option<u64>,
}

/// A kind of figure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    FirstLine,
    Total,
    Restart,
    Pss,
}

impl Kind {
    pub(crate) const ALL: [Self; 4] = [Self::FirstLine, Self::Total, Self::Restart, Self::Pss];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::FirstLine => "first line",
            Self::Total => "total",
            Self::Restart => "failure to first line",
            Self::Pss => "PSS",
        }
    }

    pub(crate) fn unit(self) -> &'static str {
        if self == Self::Pss { "MiB" } else { "ms" }
    }

    /// In its unit.
    pub(crate) fn of(self, figures: &Figures) -> Option<f64> {
        let milliseconds = |time: Duration| time.as_secs_f64() * 1e3;
        match self {
            Self::FirstLine => figures.first_line.map(milliseconds),
            Self::Total => figures.total.map(milliseconds),
            Self::Restart => figures.restart.map(milliseconds),
            Self::Pss => figures.pss.map(|bytes| bytes as f64 / f64::from(1 << 20)),
        }
    }
}
