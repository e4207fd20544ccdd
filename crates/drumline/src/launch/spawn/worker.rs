//! The rank's side: runs the function, and turns its result into an exit code and a note.

use std::ffi::OsString;
use std::panic::{AssertUnwindSafe, catch_unwind};

use drumline_comm::{CommError, ProcessGroup};
use drumline_rendezvous::{PanicReport, error_file, worker_env};

use super::error::WorkerEnvError;
use super::notes::NotePad;
use super::{Outcome, SpawnError};

/// The exit code of a rank whose function returned an error.
const FAILED: i32 = 1;
/// The exit code of a Rust program that panics.
const PANICKED: i32 = 101;

/// A spawned rank, in its own process.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Worker {
    /// The rank, counted from 0.
    pub rank: usize,
    /// The number of ranks.
    pub world_size: usize,
    /// The rank among those of this machine, counted from 0.
    pub local_rank: usize,
    /// The number of ranks on this machine.
    pub local_world_size: usize,
}

impl Worker {
    /// Joins the group of all ranks. Each rank must call it.
    pub fn group(&self) -> Result<ProcessGroup, CommError> {
        ProcessGroup::from_env()
    }

    /// Reads the variables of the launcher. Without `LOCAL_…` all ranks are assumed to be on this machine.
    pub(super) fn from_env(env: impl Fn(&str) -> Option<OsString>) -> Result<Self, WorkerEnvError> {
        let number = |name: &'static str| match env(name).map(|value| value.to_str().map(str::parse)) {
            None => Ok(None),
            Some(Some(Ok(number))) => Ok(Some(number)),
            Some(_) => Err(WorkerEnvError::NotANumber { name }),
        };
        let needed = |name: &'static str| number(name)?.ok_or(WorkerEnvError::NotSet { name });
        let (rank, world_size) = (needed(worker_env::RANK)?, needed(worker_env::WORLD_SIZE)?);
        let local_rank = number(worker_env::LOCAL_RANK)?.unwrap_or(rank);
        let local_world_size = number(worker_env::LOCAL_WORLD_SIZE)?.unwrap_or(world_size);
        Ok(Self { rank, world_size, local_rank, local_world_size })
    }
}

/// Runs the function, and ends the process with its result.
pub(super) fn run<T: Outcome>(worker: Worker, notes: &NotePad, f: impl FnOnce(Worker) -> T) -> ! {
    let rank = worker.rank;
    note_panics(rank, notes);
    let code = match catch_unwind(AssertUnwindSafe(|| f(worker).into_result())) {
        Ok(Ok(())) => 0,
        Ok(Err(error)) => {
            notes.failed(rank, error.message(), error.message());
            FAILED
        }
        Err(_noted) => PANICKED,
    };
    std::process::exit(code)
}

/// Runs the function in a process that a launcher has started, and records its error for the launcher.
pub(super) fn run_in_place<T: Outcome>(
    worker: Worker,
    f: impl FnOnce(Worker) -> T,
) -> Result<(), SpawnError> {
    let rank = worker.rank;
    error_file::install_panic_file();
    let outcome = f(worker).into_result().map_err(|error| SpawnError::InPlace { rank, error });
    // The caller gets the error. The file only helps the launcher to report it.
    outcome.inspect_err(|error| drop(error_file::record_error(error)))
}

/// From now on each panic is noted, and then passed to the previous hook.
fn note_panics(rank: usize, notes: &NotePad) {
    let (before, notes) = (std::panic::take_hook(), notes.try_clone());
    std::panic::set_hook(Box::new(move |info| {
        if let Ok(notes) = &notes {
            let PanicReport { message, place, backtrace } = PanicReport::new(info);
            let message = format!("panicked at {place}: {message}");
            notes.failed(rank, &message, &format!("{message}{backtrace}"));
        }
        before(info);
    }));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_is_read_from_the_environment() {
        let read = |pairs: &[(&str, &str)]| {
            let pairs: Vec<_> = pairs.iter().map(|(n, v)| (n.to_string(), OsString::from(v))).collect();
            Worker::from_env(|name| pairs.iter().find(|(n, _)| n == name).map(|(_, value)| value.clone()))
        };
        let bare = read(&[("RANK", "1"), ("WORLD_SIZE", "2")]).unwrap();
        assert_eq!(bare, Worker { rank: 1, world_size: 2, local_rank: 1, local_world_size: 2 });
        assert_eq!(read(&[("RANK", "1")]), Err(WorkerEnvError::NotSet { name: "WORLD_SIZE" }));
        assert_eq!(
            read(&[("RANK", "x"), ("WORLD_SIZE", "2")]),
            Err(WorkerEnvError::NotANumber { name: "RANK" })
        );
    }
}
