//! Work that rank 0 does first while the others wait, however long it takes.
//!
//! ```text
//!   rank 0   ├── work ───────────────────────┤
//!            ├─ heartbeat ── heartbeat ──────┼─ done, or its error ─▶ all ranks
//!   rank 1   (waits) ────────────────────────────────────────────▶ work: reads what rank 0 has written
//! ```
//! A call on a group has a deadline, but a download has none. So rank 0 sends a heartbeat each second while it works,
//! and so do the others when it is their turn. If a rank dies, the others get an error at once.

use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use drumline_comm::{CommError, ProcessGroup, ReduceOp};

use crate::comm::shared_failure::{agree, guarded};
use crate::data::loader::Cause;

/// The interval of heartbeats.
const HEARTBEAT: Duration = Duration::from_secs(1);

/// The interval of log lines.
const LOG_INTERVAL: Duration = Duration::from_secs(30);

const AT_WORK: u8 = 0;
const DONE: u8 = 1;

/// Whether this is rank 0, which writes and prints for all.
pub fn is_master(group: &ProcessGroup) -> bool {
    group.rank() == 0
}

/// An error of [`main_first`].
pub type MainFirstError = crate::run_error::RunError;

/// Runs `work` on rank 0, and then on all other ranks. Use it for downloads and preprocessing: rank 0 writes a cache,
/// which the others read. Ranks wait for each other without a timeout as long as all are alive. `what` names the work
/// in logs and errors. If it fails on a rank, all ranks get that error. `work` may not use the group.
///
/// ```
/// use drumline::main_first;
/// use drumline::comm::LocalGroup;
///
/// let folder = tempfile::tempdir()?;
/// let cache = folder.path().join("cache");
/// let made = LocalGroup::run(3, |group| {
///     let text = main_first(&group, "preparing the data", || {
///         if !cache.exists() {
///             std::fs::write(&cache, "prepared once")?; // only rank 0: the others come later
///         }
///         Ok(std::fs::read_to_string(&cache)?)
///     });
///     Ok(text.expect("nothing fails"))
/// })?;
/// assert_eq!(made, ["prepared once"; 3]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[track_caller]
pub fn main_first<T>(
    group: &ProcessGroup,
    what: &str,
    work: impl FnOnce() -> Result<T, Cause>,
) -> Result<T, MainFirstError> {
    let mut work = Some(work);
    let mut own = || guarded(work.take().expect("it is done once")).map_err(|failure| failure.within(what));
    let first = if is_master(group) {
        tracing::info!("{what}");
        Some(run_with_heartbeat(group, what, &mut own)?)
    } else {
        tracing::debug!("waiting for rank 0: {what}");
        wait_for_rank_zero(group)?;
        None
    };
    let first = agree::<_, MainFirstError>(group, first.transpose())?;
    let done = run_on_all(group, what, || first.map_or_else(own, Ok))?;
    agree(group, done)
}

/// On rank 0: runs the work while a thread sends heartbeats to the others.
pub(crate) fn run_with_heartbeat<T>(
    group: &ProcessGroup,
    what: &str,
    work: impl FnOnce() -> T,
) -> Result<T, CommError> {
    with_thread(group, work, |is_done| send_heartbeats(group, what, is_done))
}

/// On all ranks: runs the work, and waits until all ranks have finished theirs.
pub(crate) fn run_on_all<T>(
    group: &ProcessGroup,
    what: &str,
    work: impl FnOnce() -> T,
) -> Result<T, CommError> {
    with_thread(group, work, |is_done| exchange_heartbeats(group, what, is_done))
}

/// Runs work while a thread communicates with the others.
fn with_thread<T>(
    group: &ProcessGroup,
    work: impl FnOnce() -> T,
    talk: impl FnOnce(&Receiver<()>) -> Result<(), CommError> + Send,
) -> Result<T, CommError> {
    if group.size() == 1 {
        return Ok(work());
    }
    std::thread::scope(|scope| {
        let (done, is_done) = channel::<()>();
        let talk = scope.spawn(move || talk(&is_done));
        let result = work();
        drop(done);
        talk.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        Ok(result)
    })
}

fn send_heartbeats(group: &ProcessGroup, what: &str, is_done: &Receiver<()>) -> Result<(), CommError> {
    let mut progress = ProgressLog::new();
    while let Err(RecvTimeoutError::Timeout) = is_done.recv_timeout(HEARTBEAT) {
        group.broadcast(&mut [AT_WORK], 0)?;
        progress.log(|seconds| format!("{what}: running for {seconds} s; the other ranks wait"));
    }
    group.broadcast(&mut [DONE], 0)
}

/// Ranks exchange heartbeats until all have finished.
fn exchange_heartbeats(group: &ProcessGroup, what: &str, is_done: &Receiver<()>) -> Result<(), CommError> {
    let mut progress = ProgressLog::new();
    let mut signal = [AT_WORK];
    while signal[0] == AT_WORK {
        let is_at_work = is_done.recv_timeout(HEARTBEAT) == Err(RecvTimeoutError::Timeout);
        signal = [if is_at_work { AT_WORK } else { DONE }];
        group.all_reduce(&mut signal, ReduceOp::Min)?;
        progress.log(|seconds| format!("{what}: waiting for other ranks for {seconds} s"));
    }
    Ok(())
}

/// Logs now and then that the work is still running.
struct ProgressLog {
    begin: Instant,
    last: Instant,
}

impl ProgressLog {
    fn new() -> Self {
        let begin = Instant::now();
        Self { begin, last: begin }
    }

    fn log(&mut self, progress: impl FnOnce(u64) -> String) {
        if self.last.elapsed() >= LOG_INTERVAL {
            self.last = Instant::now();
            tracing::info!("{}", progress(self.begin.elapsed().as_secs()));
        }
    }
}

/// On the other ranks: waits until rank 0 has finished.
pub(crate) fn wait_for_rank_zero(group: &ProcessGroup) -> Result<(), CommError> {
    let mut signal = [AT_WORK];
    while signal[0] == AT_WORK {
        group.broadcast(&mut signal, 0)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use drumline_comm::{GroupOptions, LocalGroup};
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn work_may_take_longer_than_a_deadline_and_rank_0_is_first() {
        let options = GroupOptions { timeout: Duration::from_secs(3), ..GroupOptions::default() };
        for slow in [0, 1] {
            let turns = AtomicUsize::new(0);
            let order = LocalGroup::run_with(3, &options, |group| {
                let work = || {
                    if group.rank() == slow {
                        std::thread::sleep(Duration::from_secs(5));
                    }
                    Ok(turns.fetch_add(1, Ordering::SeqCst))
                };
                let turn = main_first(&group, "sleeping", work).unwrap();
                Ok((turn, turns.load(Ordering::SeqCst)))
            });
            let order = order.unwrap();
            assert_eq!(order[0].0, 0);
            assert!(
                order.iter().all(|(_, done)| *done == 3),
                "no rank continues before all are done: {order:?}"
            );
        }
        // The control: a single call that takes this long times out.
        let late = LocalGroup::run_with(2, &options, |group| {
            if is_master(&group) {
                std::thread::sleep(Duration::from_secs(5));
            }
            group.barrier()
        });
        assert!(late.unwrap_err().to_string().contains("timed out"));
    }

    #[test]
    fn all_ranks_get_the_error_of_one_and_the_group_still_works() {
        for (culprit, panics) in [(0, false), (1, false), (0, true), (2, true)] {
            let others = AtomicUsize::new(0);
            let messages = LocalGroup::run(3, |group| {
                let work = || {
                    if group.rank() != culprit {
                        return Ok(others.fetch_add(1, Ordering::SeqCst));
                    }
                    assert!(!panics, "no disk");
                    Err("no disk".into())
                };
                let message = main_first(&group, "looking", work).unwrap_err().to_string();
                group.barrier()?;
                Ok(message)
            });
            let expected = if panics { "panicked: no disk" } else { "no disk" };
            assert_eq!(messages.unwrap(), vec![format!("rank {culprit}: looking: {expected}"); 3]);
            assert_eq!(
                others.into_inner(),
                if culprit == 0 { 0 } else { 2 },
                "no other rank works after rank 0 has failed"
            );
        }
    }
}
