//! Progress: what is being measured, on one line of the terminal that is erased before anything else is printed.
//!
//! ```text
//!   rank 0, started by this command: prints lines to its stderr ─▶ ranks.rs shows the last one
//!   rank 0 of another job: writes to the terminal itself
//! ```

use std::io::IsTerminal;

use super::ranks;

/// The beginning of a line for ranks.rs.
pub(super) const PREFIX: &str = "measuring ";

/// How a rank shows its progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Progress {
    /// As lines on stderr, for the process that started it.
    Lines,
    /// On one line of the terminal.
    Terminal,
    /// Not at all.
    Hidden,
}

impl Progress {
    pub(super) fn of_rank(rank: usize) -> Self {
        match rank {
            0 if ranks::is_watched() => Self::Lines,
            0 if !ranks::is_one_of_ours() && std::io::stderr().is_terminal() => Self::Terminal,
            _ => Self::Hidden,
        }
    }

    pub(super) fn show(self, what: &str) {
        match self {
            Self::Lines => eprintln!("{PREFIX}{what}"),
            Self::Terminal => eprint!("\r\x1b[K{PREFIX}{what}"),
            Self::Hidden => {}
        }
    }

    pub(super) fn erase(self) {
        if self == Self::Terminal {
            eprint!("\r\x1b[K");
        }
    }
}
