//! Work that the master does first while the others wait, however long it takes.
//!
//! ```text
//!   rank 0   ├── work ───────────────────────┤
//!            ├─ still at it ─ still at it ───┼─ done, and how ─▶ all ranks
//!   rank 1   (waits) ────────────────────────────────────────▶ work: reads what rank 0 has left
//! ```
//! A call on a group has a deadline, a download has none: so rank 0 says each second that it is still at it, and so do the others when it is their turn.
//! When one dies, the others learn of it at once, as always.

use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use drumline_comm::{CommError, ProcessGroup, ReduceOp};

use crate::loader::Cause;
use crate::shared_failure::{agree, guarded};

/// How often the others hear that the work goes on.
const BEAT: Duration = Duration::from_secs(1);

/// How often the master says so to people.
const WORD: Duration = Duration::from_secs(30);

const AT_WORK: u8 = 0;
const DONE: u8 = 1;

/// Whether this is rank 0, which writes and prints for all.
pub fn is_master(group: &ProcessGroup) -> bool {
    group.rank() == 0
}

/// Work that was to be done by the master first, and then by all, and failed.
pub type MainFirstError = crate::run_error::RunError;

/// Does `work` on the master, and when that is done on all other ranks: the master downloads, prepares, and leaves a cache, which the others read. They wait
/// without any timeout as long as the master lives, and it for them. `what` says what is done. Should it fail on a rank, all ranks get that error. Nothing in
/// `work` may use the group.
///
/// ```
/// use drumline::{LocalGroup, main_first};
///
/// let folder = tempfile::tempdir()?;
/// let cache = folder.path().join("cache");
/// let made = LocalGroup::run(3, |group| {
///     let words = main_first(&group, "preparing the data", || {
///         if !cache.exists() {
///             std::fs::write(&cache, "prepared once")?; // by rank 0: the others come later
///         }
///         Ok(std::fs::read_to_string(&cache)?)
///     });
///     Ok(words.expect("nothing fails"))
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
    let mut own = || guarded(work.take().expect("it is done once")).map_err(|trouble| trouble.within(what));
    let first = match is_master(group) {
        true => {
            tracing::info!("{what}");
            Some(at_work(group, what, &mut own)?)
        }
        false => {
            tracing::debug!("waiting for rank 0: {what}");
            wait(group)?;
            None
        }
    };
    let first = agree::<_, MainFirstError>(group, first.transpose())?;
    let done = all_at_work(group, what, || first.map_or_else(own, Ok))?;
    agree(group, done)
}

/// Rank 0: does the work while a thread keeps the others informed.
pub(crate) fn at_work<T>(group: &ProcessGroup, what: &str, work: impl FnOnce() -> T) -> Result<T, CommError> {
    beside(group, work, |is_done| beat(group, what, is_done))
}

/// All ranks: each does its work, and goes on when all have done theirs.
fn all_at_work<T>(group: &ProcessGroup, what: &str, work: impl FnOnce() -> T) -> Result<T, CommError> {
    beside(group, work, |is_done| beat_together(group, what, is_done))
}

/// Does work while a thread talks to the others.
fn beside<T>(
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

fn beat(group: &ProcessGroup, what: &str, is_done: &Receiver<()>) -> Result<(), CommError> {
    let mut words = Words::new();
    while let Err(RecvTimeoutError::Timeout) = is_done.recv_timeout(BEAT) {
        group.broadcast(&mut [AT_WORK], 0)?;
        words.say(|seconds| format!("{what}: for {seconds} s now; the other ranks wait"));
    }
    group.broadcast(&mut [DONE], 0)
}

/// Each rank says whether it is at work, until all have done theirs.
fn beat_together(group: &ProcessGroup, what: &str, is_done: &Receiver<()>) -> Result<(), CommError> {
    let mut words = Words::new();
    let mut word = [AT_WORK];
    while word[0] == AT_WORK {
        let is_at_work = is_done.recv_timeout(BEAT) == Err(RecvTimeoutError::Timeout);
        word = [if is_at_work { AT_WORK } else { DONE }];
        group.all_reduce(&mut word, ReduceOp::Min)?;
        words.say(|seconds| format!("{what}: the other ranks are at it for {seconds} s now"));
    }
    Ok(())
}

/// What is said to people now and then.
struct Words {
    begin: Instant,
    last: Instant,
}

impl Words {
    fn new() -> Self {
        let begin = Instant::now();
        Self { begin, last: begin }
    }

    fn say(&mut self, words: impl FnOnce(u64) -> String) {
        if self.last.elapsed() >= WORD {
            self.last = Instant::now();
            tracing::info!("{}", words(self.begin.elapsed().as_secs()));
        }
    }
}

/// The other ranks: wait until rank 0 has done its work.
pub(crate) fn wait(group: &ProcessGroup) -> Result<(), CommError> {
    let mut word = [AT_WORK];
    while word[0] == AT_WORK {
        group.broadcast(&mut word, 0)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use drumline_comm::{GroupOptions, LocalGroup};
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn slow_work_outlasts_the_deadline_of_a_call_and_comes_before_the_others() {
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
                "nobody goes on before all are done: {order:?}"
            );
        }
        // The control: one call that long is too late.
        let late = LocalGroup::run_with(2, &options, |group| {
            if is_master(&group) {
                std::thread::sleep(Duration::from_secs(5));
            }
            group.barrier()
        });
        assert!(late.unwrap_err().to_string().contains("timed out"));
    }

    #[test]
    fn what_fails_on_one_rank_is_told_to_all_and_the_group_goes_on() {
        for (culprit, panics) in [(0, false), (1, false), (0, true), (2, true)] {
            let others = AtomicUsize::new(0);
            let said = LocalGroup::run(3, |group| {
                let work = || match group.rank() == culprit {
                    true if panics => panic!("no disk"),
                    true => Err("no disk".into()),
                    false => Ok(others.fetch_add(1, Ordering::SeqCst)),
                };
                let said = main_first(&group, "looking", work).unwrap_err().to_string();
                group.barrier()?;
                Ok(said)
            });
            let words = if panics { "panicked: no disk" } else { "no disk" };
            assert_eq!(said.unwrap(), vec![format!("rank {culprit}: looking: {words}"); 3]);
            assert_eq!(
                others.into_inner(),
                if culprit == 0 { 0 } else { 2 },
                "no rank works after the master failed"
            );
        }
    }
}
