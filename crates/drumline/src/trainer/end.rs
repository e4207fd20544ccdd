//! Why a training ends: all epochs are done, or something asks for it before.

use serde::{Deserialize, Serialize};

/// Why a training ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum End {
    /// All epochs are done.
    Finished,
    /// It is complete before its last epoch, because more steps would not help.
    EarlyStopped {
        /// The reason.
        reason: String,
    },
    /// It was asked to stop.
    Stopped {
        /// The reason.
        reason: String,
    },
}

impl End {
    /// Why it ended before its last epoch, if it did.
    pub fn stop_reason(&self) -> Option<&str> {
        match self {
            Self::Finished => None,
            Self::EarlyStopped { reason } | Self::Stopped { reason } => Some(reason),
        }
    }
}
