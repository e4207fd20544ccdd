//! What can go wrong on the libtorch side.

use drumline_comm::CommError;

/// An error of libtorch, or of what was asked of it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TorchError {
    /// libtorch refused.
    #[error("{doing}: {message}")]
    Refused {
        /// What was tried.
        doing: &'static str,
        /// In libtorch's words.
        message: String,
    },
    /// A collective on a tensor failed.
    #[error(transparent)]
    Comm(Box<CommError>),
    /// A tensor that cannot be used for this.
    #[error("{0}")]
    Unfit(String),
}

impl TorchError {
    /// Whether a new group may do better: nobody made a mistake, a process was lost.
    pub fn is_recoverable(&self) -> bool {
        self.comm_error().is_some_and(CommError::is_recoverable)
    }

    /// The error of a group, if it is one.
    pub fn comm_error(&self) -> Option<&CommError> {
        match self {
            Self::Comm(error) => Some(error),
            _ => None,
        }
    }
}

impl From<CommError> for TorchError {
    fn from(error: CommError) -> Self {
        Self::Comm(Box::new(error))
    }
}

impl From<tch::TchError> for TorchError {
    fn from(error: tch::TchError) -> Self {
        Self::Refused { doing: "a tensor operation failed", message: error.to_string() }
    }
}
