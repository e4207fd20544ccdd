//! Why the second forward of a checkpoint failed. Backward passes these errors on as text.

use std::fmt;

use tch::{Device, Kind, Tensor};

/// A saved tensor without its elements.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Meta {
    size: Vec<i64>,
    /// `None` for a type that tch has no name for, such as that of the state of random numbers that attention saves.
    kind: Option<Kind>,
    device: Device,
}

impl Meta {
    pub(super) fn of(tensor: &Tensor) -> Self {
        Self { size: tensor.size(), kind: tensor.f_kind().ok(), device: tensor.device() }
    }
}

impl fmt::Display for Meta {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} of ", self.size)?;
        match self.kind {
            Some(kind) => write!(f, "{kind:?}")?,
            None => f.write_str("an unnamed type")?,
        }
        write!(f, " on {:?}", self.device)
    }
}

/// The second forward has done something else than the first.
#[derive(Debug, thiserror::Error)]
pub(super) enum CheckpointError {
    #[error(
        "the second forward of a checkpoint differs from the first: {operation} saved {got} as tensor {index}, \
         expected {expected}; {ADVICE}"
    )]
    Other { operation: String, index: usize, got: Box<Meta>, expected: Box<Meta> },
    #[error(
        "the second forward of a checkpoint differs from the first: {operation} saved {got} as tensor {count}, and the \
         first forward saved {count} in all; {ADVICE}"
    )]
    More { operation: String, count: usize, got: Meta },
    #[error(
        "the second forward of a checkpoint differs from the first: it saved {saved} tensors, expected {expected}; the \
         first that is missing is {missing}; {ADVICE}"
    )]
    Fewer { saved: usize, expected: usize, missing: Meta },
    #[error("the second forward of a checkpoint failed: {0}")]
    Failed(String),
    #[error(
        "backward needs a tensor of a checkpoint whose first forward has not ended; try backward after it"
    )]
    NotEnded,
    #[error("backward runs through the second forward of a checkpoint; try backward outside of the function")]
    NoBackward,
    #[error("the second forward of a checkpoint did not give tensor {index}")]
    Missing { index: usize },
}

/// What to try if the forwards differ.
const ADVICE: &str = "try a function that depends on its inputs alone";
