//! How a rank reports its outcome and exits.

use std::process::ExitCode;
use std::time::Duration;

use drumline::comm::worker_env;

use crate::driver::Stopped;

/// When a rank exits, launchers stop the others. So the other ranks wait this long, while rank 0 prints.
const HEAD_START: Duration = Duration::from_millis(300);

/// Prints the error of a rank, if there is one, and returns its exit code.
pub(super) fn end(outcome: anyhow::Result<()>) -> ExitCode {
    match outcome.as_ref().err().and_then(|error| error.downcast_ref()) {
        // 128 + the signal's number, as shells do. There is nothing left to print.
        Some(Stopped { signal }) => ExitCode::from(128u8.saturating_add(signal.as_raw() as u8)),
        None => drumline::exit_code(outcome),
    }
}

/// The exit code after an error in the command line, or after output such as `--help`. All ranks have the same command
/// line; only rank 0 prints.
pub(super) fn answered(answer: &clap::Error) -> ExitCode {
    match std::env::var(worker_env::RANK) {
        Ok(rank) if rank.trim() != "0" => std::thread::sleep(HEAD_START),
        // A closed stderr is ignored.
        _ => drop(answer.print()),
    }
    ExitCode::from(answer.exit_code() as u8)
}
