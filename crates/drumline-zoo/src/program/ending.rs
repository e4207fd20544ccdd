//! How a rank ends.

use std::process::ExitCode;

use drumline::Signal;

/// A signal ended a process that has no launcher to tell of it: no failure, but no end of the work either.
#[derive(Debug, thiserror::Error)]
#[error("stopped by signal {}", signal.as_raw())]
pub(super) struct Stopped {
    pub(super) signal: Signal,
}

/// The exit code of this rank.
pub(super) fn end(outcome: anyhow::Result<()>) -> ExitCode {
    match outcome.as_ref().err().and_then(|error| error.downcast_ref()) {
        // As shells tell of it; what there is to say has been said.
        Some(Stopped { signal }) => ExitCode::from(128u8.saturating_add(signal.as_raw() as u8)),
        None => drumline::exit_code(outcome),
    }
}
