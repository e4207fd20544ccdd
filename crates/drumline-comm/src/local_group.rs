//! Ranks as threads of one process: for tests, for teaching, and for trying things out.
//!
//! They meet through a store in memory and then use the same shared memory, flags and algorithms as processes do.

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
    /// Runs `body` as `ranks` ranks with the default options; returns what each returned, or the first error.
    pub fn run<R: Send>(
        ranks: usize,
        body: impl Fn(ProcessGroup) -> Result<R, CommError> + Sync,
    ) -> Result<Vec<R>, CommError> {
        Self::run_with(ranks, &GroupOptions::default(), body)
    }

    /// Runs `body` as `ranks` ranks with the given options.
    ///
    /// A panic in one rank is a panic here, after the others have learnt of it and ended.
    pub fn run_with<R: Send>(
        ranks: usize,
        options: &GroupOptions,
        body: impl Fn(ProcessGroup) -> Result<R, CommError> + Sync,
    ) -> Result<Vec<R>, CommError> {
        Self::outcomes(ranks, options, body).into_iter().collect()
    }

    /// As [`run_with`](Self::run_with), with each rank's own outcome.
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
                    scope.spawn(move || body(ProcessGroup::new(member, options)?))
                })
                .collect();
            let join = |thread: std::thread::ScopedJoinHandle<'_, _>| {
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            threads.into_iter().map(join).collect()
        })
    }
}

fn member(rank: usize, ranks: usize, store: Arc<dyn Store>, key: JobKey) -> Member {
    Member::in_process(rank, ranks, store, key, Duration::from_secs(60))
}
