//! How a rank ends: what all know of is told by rank 0 alone, and every rank leaves its words for its launcher.

use std::process::ExitCode;
use std::time::Duration;

use drumline::checkpoint::CheckpointError;
use drumline::{CommError, PredictionError, worker_env};

use super::failure::{Shared, in_words};

/// A later rank that ends makes launchers stop the others: rank 0 gets this long to speak before.
const HEAD_START: Duration = Duration::from_millis(300);

/// The exit code of this rank.
pub(super) fn end(outcome: anyhow::Result<()>) -> ExitCode {
    let Err(error) = outcome else { return ExitCode::SUCCESS };
    // Whoever asked for the file looks for it; there is nobody to tell that it cannot be written.
    let _ = drumline::record_error(error.as_ref());
    if is_known_to_all(&error) && !is_first_rank() {
        std::thread::sleep(HEAD_START);
    } else {
        // A stderr that is gone ends nothing.
        use std::io::Write;
        let _ = writeln!(std::io::stderr(), "error: {}", in_words(&error));
    }
    if is_of_another_rank(&error) {
        std::thread::sleep(HEAD_START);
    }
    ExitCode::FAILURE
}

/// Whether all ranks end with this error, of which rank 0 tells.
fn is_known_to_all(error: &anyhow::Error) -> bool {
    let of_rank_zero =
        |cause: &CheckpointError| !matches!(cause, CheckpointError::Comm(_) | CheckpointError::Torch(_));
    error.is::<Shared>()
        || error.downcast_ref::<CheckpointError>().is_some_and(of_rank_zero)
        || matches!(error.downcast_ref(), Some(PredictionError::Fault(_)))
}

/// Whether another rank is the cause: it should be seen to end first.
fn is_of_another_rank(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| matches!(cause.downcast_ref(), Some(CommError::PeerLost { .. })))
}

/// As far as variables tell; a process without a launcher is the first.
fn is_first_rank() -> bool {
    let names =
        [worker_env::RANK, worker_env::OMPI_COMM_WORLD_RANK, worker_env::PMI_RANK, worker_env::SLURM_PROCID];
    let rank = names.iter().find_map(|name| std::env::var(name).ok());
    rank.is_none_or(|rank| rank.trim() == "0")
}
