//! What can go wrong in data parallelism.

use drumline_comm::CommError;
use drumline_torch::TorchError;

/// An error of a data parallel model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ParallelError {
    /// libtorch, or a collective on tensors.
    #[error(transparent)]
    Torch(#[from] TorchError),
    /// A collective.
    #[error(transparent)]
    Comm(Box<CommError>),
    /// The ranks built different models.
    #[error(
        "rank {rank} has another model than rank 0: {difference}; try building it from the same configuration on all ranks"
    )]
    OtherModel {
        /// Who has another one.
        rank: usize,
        /// The first differences.
        difference: String,
    },
    /// PyTorch's "Expected to mark a variable ready only once".
    #[error(
        "the gradient of `{name}` was ready twice in one backward of rank {rank}, and its bucket may be reduced without the second part \
         (PyTorch: \"Expected to mark a variable ready only once\"); a backward inside a function's backward, such as of two checkpointed \
         segments that share a parameter, does that; try one backward of the sum of all losses, or `no_sync` around it"
    )]
    MarkedReadyTwice {
        /// Where.
        rank: usize,
        /// The parameter.
        name: String,
    },
    /// Something was asked that cannot be done.
    #[error("{0}")]
    Unfit(String),
}

impl ParallelError {
    /// Whether a new group may do better: nobody made a mistake, a process was lost.
    pub fn is_recoverable(&self) -> bool {
        self.comm_error().is_some_and(CommError::is_recoverable)
    }

    /// The error of a group, if it is one.
    pub fn comm_error(&self) -> Option<&CommError> {
        match self {
            Self::Comm(error) => Some(error),
            Self::Torch(error) => error.comm_error(),
            _ => None,
        }
    }
}

impl From<CommError> for ParallelError {
    fn from(error: CommError) -> Self {
        Self::Comm(Box::new(error))
    }
}

impl From<tch::TchError> for ParallelError {
    fn from(error: tch::TchError) -> Self {
        Self::Torch(error.into())
    }
}
