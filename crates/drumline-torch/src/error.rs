//! What can go wrong on the libtorch side.

use drumline_comm::CommError;

use crate::cuda::{self, CudaError};

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
    /// No GPU can be used.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// A GPU has no room for a tensor; says who has the memory.
    #[error("{0}")]
    OutOfMemory(String),
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
        let message = without_frames(error.to_string());
        match cuda::out_of_memory(&message) {
            Some(told) => Self::OutOfMemory(told),
            None => Self::Refused { doing: "a tensor operation failed", message },
        }
    }
}

/// As PyTorch shows errors: without the frames of libtorch's own stack, unless they are asked for.
fn without_frames(mut text: String) -> String {
    let is_wanted = std::env::var_os("TORCH_SHOW_CPP_STACKTRACES").is_some_and(|value| value == "1");
    if let Some(end) = text.find("\nException raised from ").filter(|_| !is_wanted) {
        text.truncate(end);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_told_without_libtorchs_stack() {
        let told = TorchError::from(tch::Tensor::from(1f32).f_backward().unwrap_err()).to_string();
        assert!(told.ends_with("does not require grad and does not have a grad_fn"), "{told}");
    }
}
