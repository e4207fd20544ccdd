//! How a rank ends.

use std::process::ExitCode;
use std::time::Duration;

use drumline::{Signal, worker_env};

/// A rank that ends makes launchers stop the others: rank 0 gets this long to say why.
const HEAD_START: Duration = Duration::from_millis(300);

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

/// The exit code where the command line is all there is to talk about: refused, or a question such as `--help`. All ranks have the same one; the first tells.
pub(super) fn answered(answer: &clap::Error) -> ExitCode {
    match std::env::var(worker_env::RANK) {
        Ok(rank) if rank.trim() != "0" => std::thread::sleep(HEAD_START),
        // A stderr that is gone ends nothing.
        _ => drop(answer.print()),
    }
    ExitCode::from(answer.exit_code() as u8)
}
