//! The end of a rank's program: an error is shown once, however many ranks have it, and every rank records its error
//! for the launcher.

use std::error::Error;
use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use drumline_comm::CommError;
use drumline_parallel::ParallelError;
use drumline_rendezvous::worker_env;
use drumline_torch::TorchError;

use crate::checkpoint::CheckpointError;
use crate::comm::shared_failure::{SharedFailure, with_causes};
use crate::data::PredictionError;
use crate::run_error::RunError;

/// When a rank ends, launchers stop the others. The rank that shows the error gets this long before.
const HEAD_START: Duration = Duration::from_millis(300);

/// Returns the exit code for an outcome, and shows its error on stderr. Only one rank shows an error that several have:
/// rank 0 if all ranks have agreed on it, the rank that aborted the others, or the first of those that have lost
/// another. Errors of this rank alone are always shown.
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
    // The launcher asked for this file. There is nobody to report to if it cannot be written.
    let _ = drumline_rendezvous::error_file::record_error(error);
    match reporter(error) {
        Reporter::Nobody => {}
        Reporter::Rank(rank) if Some(rank) != own_rank() => std::thread::sleep(HEAD_START),
        // A closed stderr is no reason to fail.
        Reporter::Rank(_) | Reporter::Here => {
            drop(writeln!(std::io::stderr(), "error: {}", with_causes(error)))
        }
    }
    ExitCode::FAILURE
}

/// The rank that shows an error.
#[derive(Debug, PartialEq, Eq)]
enum Reporter {
    Here,
    Rank(usize),
    Nobody,
}

fn reporter(error: &(dyn Error + 'static)) -> Reporter {
    let mut causes = std::iter::successors(Some(error), |error| (*error).source());
    causes.find_map(known_reporter).unwrap_or(Reporter::Here)
}

fn known_reporter(error: &(dyn Error + 'static)) -> Option<Reporter> {
    if let Some(failure) = shared_failure(error) {
        return Some(shared_reporter(failure));
    }
    if let Some(CheckpointError::OnRankZero { .. }) = error.downcast_ref() {
        return Some(Reporter::Rank(0));
    }
    // All ranks have this error.
    if let Some(PredictionError::Fault(_)) = error.downcast_ref() {
        return Some(Reporter::Rank(0));
    }
    comm_error(error).and_then(reporter_for_lost_peer)
}

fn shared_failure<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a SharedFailure> {
    match error.downcast_ref() {
        Some(RunError::Failed(failure)) => Some(failure),
        _ => error.downcast_ref(),
    }
}

/// Errors that wrap a group's error transparently do not have it among their sources.
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

fn shared_reporter(failure: &SharedFailure) -> Reporter {
    failure.reporting_rank().map_or(Reporter::Nobody, Reporter::Rank)
}

/// The rank that shows an error that another rank has caused.
fn reporter_for_lost_peer(error: &CommError) -> Option<Reporter> {
    match error {
        CommError::CalledOff { by, .. } => Some(Reporter::Rank(*by)),
        CommError::PeerLost { rank, .. } | CommError::PeerLeft { rank, .. } => {
            Some(Reporter::Rank(usize::from(*rank == 0)))
        }
        _ => None,
    }
}

/// This rank, according to the environment. A process without a launcher is rank 0.
pub(crate) fn own_rank() -> Option<usize> {
    rank_in(|name| std::env::var(name).ok())
}

/// The first of these variables that is set counts, as in joining a job.
fn rank_in(env: impl Fn(&str) -> Option<String>) -> Option<usize> {
    let names =
        [worker_env::RANK, worker_env::OMPI_COMM_WORLD_RANK, worker_env::PMI_RANK, worker_env::SLURM_PROCID];
    let rank = names.iter().find_map(|name| env(name).filter(|rank| !rank.trim().is_empty()));
    rank.map_or(Some(0), |rank| rank.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run_error::UsageError;

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
    fn each_error_has_one_reporter() {
        let failed = SharedFailure::on_all_ranks("no disk".into());
        assert_eq!(reporter(&failed), Reporter::Rank(0));
        assert_eq!(reporter(&RunError::from(failed)), Reporter::Rank(0));
        assert_eq!(reporter(&called_off(2)), Reporter::Rank(2));
        assert_eq!(reporter(&lost(0)), Reporter::Rank(1));
        assert_eq!(reporter(&std::io::Error::other("no disk")), Reporter::Here);
        assert_eq!(reporter(&RunError::from(UsageError::StepWithoutBackward)), Reporter::Here);
        assert_eq!(reporter(&CheckpointError::OnRankZero { cause: "no disk".into() }), Reporter::Rank(0));
    }

    #[test]
    fn a_groups_error_is_found_inside_of_other_errors() {
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
            assert_eq!(reporter(&*error), Reporter::Rank(2), "{error:?}");
            assert_eq!(error.to_string(), called_off(2).to_string(), "the text is unchanged");
        }
    }
}
