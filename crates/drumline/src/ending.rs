//! How a rank's program ends: an error is shown once, however many ranks know of it, and every rank leaves its words for its launcher.

use std::error::Error;
use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use drumline_comm::CommError;
use drumline_parallel::ParallelError;
use drumline_rendezvous::worker_env;
use drumline_torch::TorchError;

use crate::checkpoint::CheckpointError;
use crate::predictions::PredictionError;
use crate::run_error::RunError;
use crate::shared_failure::{SharedFailure, in_words};

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
    let mut causes = std::iter::successors(Some(error), |error| (*error).source());
    causes.find_map(known_teller).unwrap_or(Teller::Here)
}

fn known_teller(error: &(dyn Error + 'static)) -> Option<Teller> {
    if let Some(failure) = shared_failure(error) {
        return Some(teller_of(failure));
    }
    if let Some(CheckpointError::OnRankZero { .. }) = error.downcast_ref() {
        return Some(Teller::Rank(0));
    }
    // All ranks have agreed on it.
    if let Some(PredictionError::Fault(_)) = error.downcast_ref() {
        return Some(Teller::Rank(0));
    }
    comm_error(error).and_then(sees_another)
}

fn shared_failure<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a SharedFailure> {
    match error.downcast_ref() {
        Some(RunError::Failed(failure)) => Some(failure),
        _ => error.downcast_ref(),
    }
}

/// Errors that pass on a group's in its own words do not name it among their causes.
fn comm_error<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a CommError> {
    let own = error.downcast_ref();
    own.or_else(|| error.downcast_ref().and_then(RunError::comm_error))
        .or_else(|| error.downcast_ref().and_then(CheckpointError::comm_error))
        .or_else(|| error.downcast_ref().and_then(ParallelError::comm_error))
        .or_else(|| error.downcast_ref().and_then(TorchError::comm_error))
        .or_else(|| match error.downcast_ref()? {
            PredictionError::Comm(error) => Some(error),
            PredictionError::Fault(_) => None,
        })
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
    rank_in(|name| std::env::var(name).ok())
}

/// The first family of variables that has a rank speaks, as where ranks meet.
fn rank_in(env: impl Fn(&str) -> Option<String>) -> Option<usize> {
    let names =
        [worker_env::RANK, worker_env::OMPI_COMM_WORLD_RANK, worker_env::PMI_RANK, worker_env::SLURM_PROCID];
    let rank = names.iter().find_map(|name| env(name).filter(|rank| !rank.trim().is_empty()));
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
    fn a_rank_is_found_in_each_launchers_variables() {
        let rank = |pairs: &[(&str, &str)]| {
            rank_in(|name| pairs.iter().find(|pair| pair.0 == name).map(|pair| pair.1.to_owned()))
        };
        assert_eq!(rank(&[]), Some(0), "without a launcher");
        assert_eq!(rank(&[("SLURM_PROCID", "3")]), Some(3));
        assert_eq!(rank(&[("PMI_RANK", "2"), ("SLURM_PROCID", "0")]), Some(2));
        assert_eq!(rank(&[("OMPI_COMM_WORLD_RANK", "1"), ("SLURM_PROCID", "0")]), Some(1));
        assert_eq!(rank(&[("RANK", "4"), ("SLURM_PROCID", "0")]), Some(4));
        assert_eq!(rank(&[("RANK", ""), ("SLURM_PROCID", "5")]), Some(5));
        assert_eq!(rank(&[("RANK", "first")]), None);
    }

    #[test]
    fn each_error_has_one_teller() {
        let failed = SharedFailure::alike("no disk".into());
        assert_eq!(teller(&failed), Teller::Rank(0));
        assert_eq!(teller(&RunError::from(failed)), Teller::Rank(0));
        assert_eq!(teller(&called_off(2)), Teller::Rank(2));
        assert_eq!(teller(&lost(0)), Teller::Rank(1));
        assert_eq!(teller(&std::io::Error::other("no disk")), Teller::Here);
        assert_eq!(teller(&RunError::Unfit("no such step".into())), Teller::Here);
        assert_eq!(teller(&CheckpointError::OnRankZero { cause: "no disk".into() }), Teller::Rank(0));
    }

    #[test]
    fn a_groups_error_is_known_whoever_passes_it_on() {
        let torch = || TorchError::from(called_off(2));
        let parallel = || [ParallelError::from(called_off(2)), torch().into()];
        let checkpoint = || [CheckpointError::from(called_off(2)), torch().into()];
        let mut passed_on: Vec<Box<dyn Error>> = vec![
            Box::new(torch()),
            Box::new(PredictionError::from(called_off(2))),
            Box::new(RunError::from(called_off(2))),
            Box::new(RunError::from(torch())),
        ];
        passed_on.extend(parallel().map(|error| Box::new(error) as Box<dyn Error>));
        passed_on.extend(checkpoint().map(|error| Box::new(error) as Box<dyn Error>));
        passed_on.extend(parallel().map(|error| Box::new(RunError::from(error)) as Box<dyn Error>));
        passed_on.extend(checkpoint().map(|error| Box::new(RunError::from(error)) as Box<dyn Error>));
        for error in passed_on {
            assert_eq!(teller(&*error), Teller::Rank(2), "{error:?}");
            assert_eq!(error.to_string(), called_off(2).to_string(), "in its own words");
        }
    }
}
