//! Why a training ended before its time.

/// A training that failed. It did so on all ranks.
pub type TrainerError = crate::run_error::RunError;
