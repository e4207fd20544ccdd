//! The error type of the trainer.

/// Why a training failed, on all ranks.
pub type TrainerError = crate::run_error::RunError;
