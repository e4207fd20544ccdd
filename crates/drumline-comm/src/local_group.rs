//! Ranks as threads of one process: for tests, for teaching, and for experiments.
//!
//! They use a store in memory, and the same shared memory, flags and algorithms as processes do.

use std::sync::Arc;
use std::time::Duration;

use drumline_rendezvous::{JobKey, Member, MemoryStore, Store};

use crate::error::CommError;
use crate::group::ProcessGroup;
use crate::process::GroupOptions;

/// Runs a function as several ranks, each in a thread of its own.
///
/// ```
/// use drumline_comm::LocalGroup;
///
/// let greetings = LocalGroup::run(3, |group| {
///     let names = group.all_gather_object(&format!("rank {}", group.rank()))?;
///     Ok(names.join(", "))
/// })?;
/// assert_eq!(greetings, vec!["rank 0, rank 1, rank 2"; 3]);
/// # Ok::<(), drumline_comm::CommError>(())
/// ```
#[derive(Debug)]
pub struct LocalGroup;

impl LocalGroup {
    /// Runs `body` as `ranks` ranks with the options of the environment. Returns what each rank returned, or the error that
    /// caused the others.
    pub fn run<R: Send>(
        ranks: usize,
        body: impl Fn(ProcessGroup) -> Result<R, CommError> + Sync,
    ) -> Result<Vec<R>, CommError> {
        Self::run_with(ranks, &GroupOptions::from_env()?, body)
    }

    /// Runs `body` as `ranks` ranks with the given options.
    ///
    /// A panic in one rank becomes a panic here, after the other ranks have ended with an error.
    pub fn run_with<R: Send>(
        ranks: usize,
        options: &GroupOptions,
        body: impl Fn(ProcessGroup) -> Result<R, CommError> + Sync,
    ) -> Result<Vec<R>, CommError> {
        if ranks == 0 {
            return Err(CommError::invalid("a group has at least one rank, got 0"));
        }
        let (results, mut errors): (Vec<_>, Vec<_>) =
            Self::outcomes(ranks, options, body).into_iter().partition(Result::is_ok);
        // Errors that only follow from another rank's error come last.
        errors.sort_by_key(|error| {
            matches!(error, Err(CommError::PeerLeft { .. } | CommError::CalledOff { .. }))
        });
        errors.into_iter().take(1).chain(results).collect()
    }

    /// As [`run_with`](Self::run_with), but returns each rank's own outcome.
    pub fn outcomes<R: Send>(
        ranks: usize,
        options: &GroupOptions,
        body: impl Fn(ProcessGroup) -> Result<R, CommError> + Sync,
    ) -> Vec<Result<R, CommError>> {
        let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
        let key = JobKey::random();
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..ranks)
                .map(|rank| {
                    let member = member(rank, ranks, store.clone(), key.clone());
                    let (options, body) = (options.clone(), &body);
                    let thread = std::thread::Builder::new().name(format!("rank {rank}"));
                    thread.spawn_scoped(scope, move || body(ProcessGroup::new(member, options)?))
                })
                .collect();
            let join = |thread: std::io::Result<std::thread::ScopedJoinHandle<'_, _>>| match thread {
                Ok(thread) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
                Err(error) => Err(CommError::Init { cause: format!("cannot start a thread: {error}") }),
            };
            threads.into_iter().map(join).collect()
        })
    }
}

fn member(rank: usize, ranks: usize, store: Arc<dyn Store>, key: JobKey) -> Member {
    Member::in_process(rank, ranks, store, key, Duration::from_secs(60))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_is_the_cause_and_not_what_followed() {
        let error = LocalGroup::run(3, |group| match group.rank() {
            2 => Err(CommError::invalid("the cause")),
            _ => group.barrier(),
        });
        assert!(error.unwrap_err().to_string().starts_with("the cause"));
    }

    #[test]
    fn a_group_of_no_ranks_is_an_error() {
        assert!(LocalGroup::run(0, |_| Ok(())).unwrap_err().to_string().contains("at least one rank"));
    }
}
