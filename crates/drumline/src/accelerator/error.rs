//! The error type of the accelerator.

/// An error of an [`Accelerator`](super::Accelerator) or of what it has prepared.
pub type AcceleratorError = crate::run_error::RunError;

pub(super) type Result<T = ()> = std::result::Result<T, AcceleratorError>;
