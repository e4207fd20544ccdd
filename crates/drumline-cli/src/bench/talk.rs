//! What is being measured right now, on one line of the terminal that is wiped before anything else is printed.
//!
//! ```text
//!   rank 0, started by us: says it on its stderr ─▶ ranks.rs shows the last line it said
//!   rank 0 of another job, or a launcher of ours: shows it
//! ```

use std::io::IsTerminal;

use super::ranks;

/// What a line for ranks.rs starts with.
pub(super) const MARK: &str = "measuring ";

/// How a rank talks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Talker {
    /// To whoever reads its stderr.
    Lines,
    /// To the terminal.
    Terminal,
    /// Not at all.
    Silent,
}

impl Talker {
    pub(super) fn of_rank(rank: usize) -> Self {
        match rank {
            0 if ranks::is_watched() => Self::Lines,
            0 if !ranks::is_one_of_ours() && std::io::stderr().is_terminal() => Self::Terminal,
            _ => Self::Silent,
        }
    }

    pub(super) fn say(self, what: &str) {
        match self {
            Self::Lines => eprintln!("{MARK}{what}"),
            Self::Terminal => eprint!("\r\x1b[K{MARK}{what}"),
            Self::Silent => {}
        }
    }

    pub(super) fn wipe(self) {
        if self == Self::Terminal {
            eprint!("\r\x1b[K");
        }
    }
}
