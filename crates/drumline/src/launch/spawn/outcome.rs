//! What the function of a rank may return.

use std::fmt::Display;

/// What a rank's function returns: nothing, or a `Result` whose error can be displayed.
pub trait Outcome {
    /// The error, if there is one, with its causes.
    fn into_result(self) -> Result<(), WorkerError>;
}

/// The error that a rank's function has returned, as text: only text can leave the rank's process.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct WorkerError {
    message: String,
}

impl WorkerError {
    /// The error's text, with its causes.
    pub fn message(&self) -> &str {
        &self.message
    }
}

impl Outcome for () {
    fn into_result(self) -> Result<(), WorkerError> {
        Ok(())
    }
}

impl<E: Display> Outcome for Result<(), E> {
    fn into_result(self) -> Result<(), WorkerError> {
        // Errors of `anyhow` show their causes in the alternate form only.
        self.map_err(|error| WorkerError { message: format!("{error:#}") })
    }
}
