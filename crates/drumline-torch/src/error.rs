//! What can go wrong on the libtorch side.

use std::fmt::Display;

use drumline_comm::{CommError, ReduceOp};
use tch::Device;

use crate::cuda::{CudaError, GpuOutOfMemory};
use crate::function::FunctionError;
use crate::optim::StateError;
use crate::recordable::NotRecordable;

/// An error of libtorch, of the GPU libraries, or of a call that does not suit its arguments.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TorchError {
    /// libtorch, CUDA or NCCL reported an error.
    #[error("{operation}: {message}")]
    Library {
        /// What failed, such as "cannot set a gradient".
        operation: &'static str,
        /// The text of the library.
        message: String,
    },
    /// A collective on a tensor failed.
    #[error(transparent)]
    Comm(Box<CommError>),
    /// No GPU can be used.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// A GPU has no room for a tensor.
    #[error(transparent)]
    OutOfMemory(Box<GpuOutOfMemory>),
    /// A tensor has the wrong shape.
    #[error("{what} has shape {got:?}; expected {expected}")]
    Shape {
        /// Which tensor.
        what: String,
        /// The shape that is needed, and what to try.
        expected: String,
        /// Its shape.
        got: Vec<i64>,
    },
    /// A tensor has the wrong kind of elements.
    #[error("{what} is of kind {got}; expected {expected}")]
    Kind {
        /// Which tensor.
        what: String,
        /// The kinds that are possible, and what to try.
        expected: String,
        /// Its kind.
        got: String,
    },
    /// A tensor is on the wrong device.
    #[error("{what} is on {got:?}; expected {expected}")]
    Device {
        /// Which tensor.
        what: String,
        /// The devices that are possible, and what to try.
        expected: String,
        /// Its device.
        got: Device,
    },
    /// A tensor's elements are not where they must be in memory.
    #[error("{what} has {problem} in memory (shape {shape:?}, strides {strides:?}); try {hint}")]
    Strides {
        /// Which tensor.
        what: String,
        /// What is wrong with its strides.
        problem: &'static str,
        /// Its shape.
        shape: Vec<i64>,
        /// Its strides.
        strides: Vec<i64>,
        /// What to try.
        hint: &'static str,
    },
    /// A setting or an argument has a value that cannot be used.
    #[error("{what} is {got}; expected {expected}")]
    Value {
        /// Which one.
        what: String,
        /// The values that are possible, and what to try.
        expected: String,
        /// Its value.
        got: String,
    },
    /// A reduction is not defined for the elements of a tensor.
    #[error("{op} is not defined for {kind}; try {hint}")]
    Reduction {
        /// The reduction.
        op: ReduceOp,
        /// PyTorch's name of the kind of the elements.
        kind: &'static str,
        /// What to try.
        hint: &'static str,
    },
    /// An operation cannot be done with this tensor.
    #[error("cannot {operation}: {reason}")]
    Unsupported {
        /// The operation.
        operation: &'static str,
        /// Why, and what to try.
        reason: &'static str,
    },
    /// The norm of gradients that are to be clipped is infinite or NaN.
    #[error(
        "the norm of the gradients is {total}{}, so they cannot be clipped; try a smaller learning rate",
        .parameter.as_ref().map_or_else(String::new, |(name, norm)| format!(" (that of `{name}` is {norm})"))
    )]
    NormNotFinite {
        /// The norm of all gradients together.
        total: f64,
        /// The first parameter whose gradient's norm is not finite, and that norm.
        parameter: Option<(String, f64)>,
    },
    /// A parameter occurs twice in an optimizer, and would make two steps in one.
    #[error("parameter `{name}` is given to the optimizer twice")]
    DuplicateParameter {
        /// The parameter.
        name: String,
    },
    /// An operation on one parameter failed.
    #[error("parameter `{name}`: {cause}")]
    Parameter {
        /// The parameter.
        name: String,
        /// Why.
        cause: Box<TorchError>,
    },
    /// A saved optimizer state cannot be loaded.
    #[error("cannot load the state of an optimizer: {0}")]
    OptimizerState(#[from] StateError),
    /// Work cannot be recorded in a CUDA graph.
    #[error("this cannot be recorded in a CUDA graph: {0}")]
    NotRecordable(#[from] NotRecordable),
    /// A CUDA graph with collectives outlives the process group that they belong to.
    #[error("a graph has calls to other ranks, and their group has ended; try dropping the graph first")]
    GraphOutlivesGroup,
    /// A thread could not be started.
    #[error("cannot start {what}: {cause}")]
    Thread {
        /// Which thread.
        what: &'static str,
        /// The error of the system.
        cause: std::io::Error,
    },
    /// The program's own code failed, such as the forward of an autograd function or a communication hook.
    #[error("{operation}: {cause}")]
    Custom {
        /// What failed, such as "forward failed".
        operation: &'static str,
        /// Its error.
        cause: FunctionError,
    },
    /// Something happened that this library rules out.
    #[error("internal error: {what}; please report it")]
    Internal {
        /// What happened.
        what: &'static str,
    },
}

impl TorchError {
    /// A [`Value`](Self::Value) error.
    pub fn value(what: impl Into<String>, got: impl Display, expected: impl Into<String>) -> Self {
        Self::Value { what: what.into(), got: got.to_string(), expected: expected.into() }
    }

    /// Whether forming a new group may help: a process was lost, and the program made no mistake.
    pub fn is_recoverable(&self) -> bool {
        self.comm_error().is_some_and(CommError::is_recoverable)
    }

    /// The error of the process group, if that is what failed.
    pub fn comm_error(&self) -> Option<&CommError> {
        match self {
            Self::Comm(error) => Some(error),
            Self::Parameter { cause, .. } => cause.comm_error(),
            _ => None,
        }
    }

    /// An error with libtorch's own text, which is the only form in which tch and the shim pass errors on.
    pub(crate) fn from_text(operation: &'static str, message: String) -> Self {
        match GpuOutOfMemory::parse(&message) {
            Some(error) => Self::OutOfMemory(Box::new(error)),
            None => Self::Library { operation, message },
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
        Self::from_text("a tensor operation failed", without_frames(error.to_string()))
    }
}

/// Removes libtorch's stack frames from a message, as PyTorch does by default.
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
    fn messages_do_not_contain_libtorchs_stack() {
        let text = TorchError::from(tch::Tensor::from(1f32).f_backward().unwrap_err()).to_string();
        assert!(text.ends_with("does not require grad and does not have a grad_fn"), "{text}");
    }
}
