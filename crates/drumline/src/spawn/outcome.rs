//! What a rank's function may return.

use std::fmt::Display;

/// The outcome of a rank: nothing, or a `Result` whose error can be displayed.
pub trait Outcome {
    /// What went wrong, in words.
    fn into_result(self) -> Result<(), String>;
}

impl Outcome for () {
    fn into_result(self) -> Result<(), String> {
        Ok(())
    }
}

impl<E: Display> Outcome for Result<(), E> {
    fn into_result(self) -> Result<(), String> {
        // Some errors tell their causes only when asked for the long form.
        self.map_err(|error| format!("{error:#}"))
    }
}
