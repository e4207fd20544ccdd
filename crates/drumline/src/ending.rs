//! How a rank's program ends: an error is shown once, however many ranks know of it, and every rank leaves its words for its launcher.

use std::error::Error;
use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use drumline_comm::CommError;
use drumline_parallel::ParallelError;
use drumline_rendezvous::worker_env;
use drumline_torch::TorchError;

use crate::accelerator::AcceleratorError;
use crate::checkpoint::CheckpointError;
use crate::main_first::MainFirstError;
use crate::predictions::PredictionError;
use crate::shared_failure::{SharedFailure, in_words};
use crate::trainer::TrainerError;

/// A rank that ends makes launchers stop the others: who has something to tell gets this long before.
const HEAD_START: Duration = Duration::from_millis(300);

/// The exit code for an outcome, whose error is shown on stderr by one rank: by rank 0 where all ranks have agreed on it, by the rank that called the others
/// off, by the first of those that have lost another. Errors of this rank alone are always shown.
///
/// ```no_run
/// use std::process::ExitCode;
///
/// fn main() -> ExitCode {
///     drumline::exit_code(train())
/// }
///
/// fn train() -> anyhow::Result<()> {
///     let group = drumline::ProcessGroup::from_env()?;
///     // … DistTrainer::new(&group, …).train(…)?
///     # let _ = group;
///     Ok(())
/// }
/// ```
pub fn exit_code<E: AsRef<dyn Error + Send + Sync>>(outcome: Result<(), E>) -> ExitCode {
    let Err(error) = outcome else { return ExitCode::SUCCESS };
    let error = error.as_ref();
    // Whoever asked for the file looks for it; there is nobody to tell that it cannot be written.
    let _ = drumline_rendezvous::error_file::record_error(error);
    match teller(error) {
        Teller::Nobody => {}
        Teller::Rank(rank) if Some(rank) != own_rank() => std::thread::sleep(HEAD_START),
        // A stderr that is gone ends nothing.
        Teller::Rank(_) | Teller::Here => drop(writeln!(std::io::stderr(), "error: {}", in_words(error))),
    }
    ExitCode::FAILURE
}

/// Who shows an error.
#[derive(Debug, PartialEq, Eq)]
enum Teller {
    Here,
    Rank(usize),
    Nobody,
}

fn teller(error: &(dyn Error + 'static)) -> Teller {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if let Some(teller) = known_teller(error) {
            return teller;
        }
        cause = error.source();
    }
    Teller::Here
}

/// Errors that pass on what they hold do not show it among their causes, so they are looked into one by one.
fn known_teller(error: &(dyn Error + 'static)) -> Option<Teller> {
    if let Some(error) = error.downcast_ref::<TrainerError>() {
        return match error {
            TrainerError::Failed(failure) => Some(teller_of(failure)),
            TrainerError::Comm(error) => sees_another(error),
            TrainerError::Parallel(error) => known_teller(&**error),
            TrainerError::Checkpoint(error) => known_teller(&**error),
            TrainerError::Torch(error) => known_teller(&**error),
        };
    }
    if let Some(error) = error.downcast_ref::<AcceleratorError>() {
        return match error {
            AcceleratorError::Failed(failure) => Some(teller_of(failure)),
            AcceleratorError::Comm(error) => sees_another(error),
            AcceleratorError::Parallel(error) => known_teller(&**error),
            AcceleratorError::Torch(error) => known_teller(&**error),
            AcceleratorError::Unfit(_) => None,
        };
    }
    match (error.downcast_ref(), error.downcast_ref(), error.downcast_ref()) {
        (Some(ParallelError::Torch(error)), ..) => return known_teller(error),
        (Some(ParallelError::Comm(error)), ..) => return sees_another(error),
        (_, Some(CheckpointError::Torch(error)), _) => return known_teller(&**error),
        (_, Some(CheckpointError::Comm(error)), _) => return sees_another(error),
        // What rank 0 runs into, all ranks are told.
        (_, Some(_), _) => return Some(Teller::Rank(0)),
        (_, _, Some(MainFirstError::Failed(failure))) => return Some(teller_of(failure)),
        (_, _, Some(MainFirstError::Comm(error))) => return sees_another(error),
        _ => {}
    }
    if let Some(TorchError::Comm(error)) = error.downcast_ref() {
        return sees_another(error);
    }
    if let Some(PredictionError::Fault(_)) = error.downcast_ref() {
        return Some(Teller::Rank(0));
    }
    error.downcast_ref().map(teller_of).or_else(|| error.downcast_ref().and_then(sees_another))
}

fn teller_of(failure: &SharedFailure) -> Teller {
    failure.teller().map_or(Teller::Nobody, Teller::Rank)
}

/// Who tells of an error that another rank is the cause of.
fn sees_another(error: &CommError) -> Option<Teller> {
    match error {
        CommError::CalledOff { by, .. } => Some(Teller::Rank(*by)),
        CommError::PeerLost { rank, .. } | CommError::PeerLeft { rank, .. } => {
            Some(Teller::Rank(usize::from(*rank == 0)))
        }
        _ => None,
    }
}

/// As far as variables tell; a process without a launcher is the first.
pub(crate) fn own_rank() -> Option<usize> {
    let names =
        [worker_env::RANK, worker_env::OMPI_COMM_WORLD_RANK, worker_env::PMI_RANK, worker_env::SLURM_PROCID];
    let rank = names.iter().find_map(|name| std::env::var(name).ok());
    rank.map_or(Some(0), |rank| rank.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn called_off(by: usize) -> CommError {
        CommError::CalledOff { group: "world".into(), by, cause: "no disk".into(), recoverable: false }
    }

    fn lost(rank: usize) -> CommError {
        CommError::PeerLost { group: "world".into(), rank, host: "a".into(), pid: 7, how: "SIGKILL".into() }
    }

    #[test]
    fn each_error_has_one_teller() {
        let failed = SharedFailure::alike("no disk".into());
        assert_eq!(teller(&TrainerError::from(failed)), Teller::Rank(0));
        assert_eq!(teller(&called_off(2)), Teller::Rank(2));
        assert_eq!(teller(&TrainerError::from(called_off(2))), Teller::Rank(2));
        let parallel: ParallelError = called_off(2).into();
        assert_eq!(teller(&TrainerError::from(parallel)), Teller::Rank(2));
        let torch: TorchError = lost(2).into();
        assert_eq!(teller(&TrainerError::from(torch)), Teller::Rank(0));
        assert_eq!(teller(&CheckpointError::from(lost(0))), Teller::Rank(1));
        assert_eq!(teller(&MainFirstError::from(called_off(1))), Teller::Rank(1));
        assert_eq!(teller(&lost(0)), Teller::Rank(1));
        assert_eq!(teller(&std::io::Error::other("no disk")), Teller::Here);
    }
}
