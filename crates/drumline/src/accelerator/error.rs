//! What can go wrong in an accelerated loop.

use drumline_comm::CommError;
use drumline_parallel::ParallelError;
use drumline_torch::TorchError;

use crate::checkpoint::CheckpointError;
use crate::main_first::MainFirstError;
use crate::shared_failure::SharedFailure;

pub(super) type Result<T = ()> = std::result::Result<T, AcceleratorError>;

/// An error of an [`Accelerator`](super::Accelerator) or of what it has prepared.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AcceleratorError {
    /// Something went wrong on one rank or several, and all have been told.
    #[error(transparent)]
    Failed(#[from] SharedFailure),
    /// A rank was lost, or ranks made different calls.
    #[error(transparent)]
    Comm(Box<CommError>),
    /// The model cannot be trained by several ranks.
    #[error(transparent)]
    Parallel(Box<ParallelError>),
    /// libtorch refused.
    #[error(transparent)]
    Torch(Box<TorchError>),
    /// Something was asked that cannot be done.
    #[error("{0}")]
    Unfit(String),
}

impl AcceleratorError {
    /// Whether a new group may do better: nobody made a mistake, a process was lost.
    pub fn is_recoverable(&self) -> bool {
        match self {
            Self::Failed(_) | Self::Unfit(_) => false,
            Self::Comm(error) => error.is_recoverable(),
            Self::Parallel(error) => error.is_recoverable(),
            Self::Torch(error) => error.is_recoverable(),
        }
    }
}

impl AsRef<dyn std::error::Error + Send + Sync> for AcceleratorError {
    fn as_ref(&self) -> &(dyn std::error::Error + Send + Sync + 'static) {
        self
    }
}

impl From<CommError> for AcceleratorError {
    fn from(error: CommError) -> Self {
        Self::Comm(Box::new(error))
    }
}

impl From<ParallelError> for AcceleratorError {
    fn from(error: ParallelError) -> Self {
        match error {
            // All ranks have found out.
            ParallelError::OtherModel { .. } => SharedFailure::alike(error.to_string()).into(),
            error => Self::Parallel(Box::new(error)),
        }
    }
}

impl From<TorchError> for AcceleratorError {
    fn from(error: TorchError) -> Self {
        Self::Torch(Box::new(error))
    }
}

impl From<tch::TchError> for AcceleratorError {
    fn from(error: tch::TchError) -> Self {
        TorchError::from(error).into()
    }
}

impl From<MainFirstError> for AcceleratorError {
    fn from(error: MainFirstError) -> Self {
        match error {
            MainFirstError::Failed(failure) => Self::Failed(failure),
            MainFirstError::Comm(error) => Self::Comm(error),
        }
    }
}

/// What rank 0 ran into is known to all ranks.
impl From<CheckpointError> for AcceleratorError {
    fn from(error: CheckpointError) -> Self {
        match error {
            CheckpointError::Comm(error) => Self::Comm(error),
            CheckpointError::OnRankZero { cause } => SharedFailure::alike(cause).into(),
            error => SharedFailure::alike(error.to_string()).into(),
        }
    }
}
