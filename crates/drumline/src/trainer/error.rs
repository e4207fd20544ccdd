//! Why a training ended before its time, and who tells of it.

use drumline_comm::CommError;
use drumline_parallel::ParallelError;
use drumline_torch::TorchError;

use crate::checkpoint::CheckpointError;
use crate::shared_failure::SharedFailure;

/// A training that failed. It did so on all ranks.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrainerError {
    /// Something went wrong on one rank or several: bad input, a callback, a batch. All ranks have agreed on it, with the same text, and the state after
    /// the last step is saved where there is a `save_path`.
    #[error(transparent)]
    Failed(#[from] SharedFailure),
    /// A rank was lost, or ranks made different calls.
    #[error(transparent)]
    Comm(Box<CommError>),
    /// The model cannot be trained by several ranks.
    #[error(transparent)]
    Parallel(Box<ParallelError>),
    /// A checkpoint could not be saved or loaded.
    #[error(transparent)]
    Checkpoint(Box<CheckpointError>),
    /// libtorch refused.
    #[error(transparent)]
    Torch(Box<TorchError>),
}

impl TrainerError {
    /// Whether a new group may do better: nobody made a mistake, a process was lost.
    pub fn is_recoverable(&self) -> bool {
        match self {
            Self::Failed(_) => false,
            Self::Comm(error) => error.is_recoverable(),
            Self::Parallel(error) => error.is_recoverable(),
            Self::Checkpoint(error) => error.is_recoverable(),
            Self::Torch(error) => error.is_recoverable(),
        }
    }

    /// Whether the other ranks know of it, and can still be talked to.
    pub(super) fn is_agreed(&self) -> bool {
        matches!(self, Self::Failed(_))
    }
}

impl AsRef<dyn std::error::Error + Send + Sync> for TrainerError {
    fn as_ref(&self) -> &(dyn std::error::Error + Send + Sync + 'static) {
        self
    }
}

impl From<CommError> for TrainerError {
    fn from(error: CommError) -> Self {
        Self::Comm(Box::new(error))
    }
}

impl From<ParallelError> for TrainerError {
    fn from(error: ParallelError) -> Self {
        Self::Parallel(Box::new(error))
    }
}

impl From<CheckpointError> for TrainerError {
    fn from(error: CheckpointError) -> Self {
        Self::Checkpoint(Box::new(error))
    }
}

impl From<TorchError> for TrainerError {
    fn from(error: TorchError) -> Self {
        Self::Torch(Box::new(error))
    }
}
