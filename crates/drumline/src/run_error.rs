//! Why work that all ranks do together ended before its time: one error for the trainer, the accelerator and `main_first`, so that whoever shows it
//! (`ending`) need not ask where it comes from.

use drumline_comm::CommError;
use drumline_parallel::ParallelError;
use drumline_torch::TorchError;

use crate::checkpoint::CheckpointError;
use crate::shared_failure::SharedFailure;

/// Work of all ranks that failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// Something went wrong on one rank or several: bad input, a callback, a batch, a checkpoint. All ranks know of it, with the same text, and the group can
    /// still be used. A trainer has saved the state after its last step where there is a `save_path`.
    #[error(transparent)]
    Failed(#[from] SharedFailure),
    /// A rank was lost, or ranks made different calls.
    #[error(transparent)]
    Comm(Box<CommError>),
    /// libtorch refused.
    #[error(transparent)]
    Torch(Box<TorchError>),
    /// Something was asked that cannot be done, on this rank.
    #[error("{0}")]
    Unfit(String),
}

impl RunError {
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

    /// Whether the other ranks know of it, and can still be talked to.
    pub(crate) fn is_agreed(&self) -> bool {
        matches!(self, Self::Failed(_))
    }
}

impl AsRef<dyn std::error::Error + Send + Sync> for RunError {
    fn as_ref(&self) -> &(dyn std::error::Error + Send + Sync + 'static) {
        self
    }
}

impl From<CommError> for RunError {
    fn from(error: CommError) -> Self {
        Self::Comm(Box::new(error))
    }
}

impl From<TorchError> for RunError {
    fn from(error: TorchError) -> Self {
        match error {
            TorchError::Comm(error) => Self::Comm(error),
            error => Self::Torch(Box::new(error)),
        }
    }
}

impl From<tch::TchError> for RunError {
    fn from(error: tch::TchError) -> Self {
        TorchError::from(error).into()
    }
}

impl From<ParallelError> for RunError {
    fn from(error: ParallelError) -> Self {
        match error {
            ParallelError::Comm(error) => Self::Comm(error),
            ParallelError::Torch(error) => error.into(),
            // All ranks have found out.
            ParallelError::OtherModel { .. } => SharedFailure::alike(error.to_string()).into(),
            error => Self::Unfit(error.to_string()),
        }
    }
}

/// What rank 0 ran into is known to all ranks.
impl From<CheckpointError> for RunError {
    fn from(error: CheckpointError) -> Self {
        match error {
            CheckpointError::Comm(error) => Self::Comm(error),
            CheckpointError::Torch(error) => (*error).into(),
            CheckpointError::OnRankZero { cause } => SharedFailure::alike(cause).into(),
            error => SharedFailure::alike(error.to_string()).into(),
        }
    }
}
