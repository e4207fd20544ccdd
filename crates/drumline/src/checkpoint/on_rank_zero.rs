//! Work that rank 0 does for all while the others wait, however long it takes.
//!
//! ```text
//!   rank 0   ├── work, on a thread ──────────┤
//!            ├─ still at it ─ still at it ───┼─ done, and how ─▶ all ranks
//! ```
//! A call on a group has a deadline, a slow disk has none: so rank 0 says each second that it is still at it.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use drumline_comm::{CommError, ProcessGroup};

use super::error::CheckpointError;

/// How often the others hear that the work goes on.
const BEAT: Duration = Duration::from_secs(1);

const AT_WORK: u8 = 0;
const DONE: u8 = 1;

/// Runs `work` on rank 0. Its result is there only; its error is on all ranks, and the group can still be used.
#[track_caller]
pub(super) fn on_rank_zero<T: Send>(
    group: &ProcessGroup,
    work: impl FnOnce() -> Result<T, CheckpointError> + Send,
) -> Result<Option<T>, CheckpointError> {
    if group.size() == 1 {
        return work().map(Some);
    }
    if group.rank() != 0 {
        return wait(group).map(|()| None);
    }
    let result = at_work(group, work)?;
    let cause = result.as_ref().err().map(ToString::to_string);
    group.broadcast_object(Some(&cause), 0)?;
    result.map(Some)
}

/// Rank 0: runs the work and keeps the others informed until it is done.
fn at_work<T: Send>(group: &ProcessGroup, work: impl FnOnce() -> T + Send) -> Result<T, CommError> {
    std::thread::scope(|scope| {
        let (done, is_done) = channel::<()>();
        let worker = scope.spawn(move || {
            let _dropped_at_the_end = done;
            work()
        });
        while let Err(RecvTimeoutError::Timeout) = is_done.recv_timeout(BEAT) {
            group.broadcast(&mut [AT_WORK], 0)?;
        }
        let result = worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        group.broadcast(&mut [DONE], 0)?;
        Ok(result)
    })
}

/// The other ranks.
fn wait(group: &ProcessGroup) -> Result<(), CheckpointError> {
    let mut word = [AT_WORK];
    while word[0] == AT_WORK {
        group.broadcast(&mut word, 0)?;
    }
    match group.broadcast_object::<Option<String>>(None, 0)? {
        Some(cause) => Err(CheckpointError::OnRankZero { cause }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use drumline_comm::{GroupOptions, LocalGroup};

    fn slow(group: ProcessGroup) -> Result<Option<u32>, CommError> {
        let work = || {
            std::thread::sleep(Duration::from_secs(5));
            Ok(7)
        };
        Ok(on_rank_zero(&group, work).unwrap())
    }

    #[test]
    fn slow_work_outlasts_the_deadline_of_a_call() {
        let options = GroupOptions { timeout: Duration::from_secs(3), ..GroupOptions::default() };
        assert_eq!(LocalGroup::run_with(2, &options, slow).unwrap(), [Some(7), None]);
        // The control: one call that long is too late.
        let late = LocalGroup::run_with(2, &options, |group| {
            if group.rank() == 0 {
                std::thread::sleep(Duration::from_secs(5));
            }
            group.barrier()
        });
        assert!(late.unwrap_err().to_string().contains("timed out"));
    }

    #[test]
    fn an_error_reaches_all_and_the_group_goes_on() {
        let error = || CheckpointError::Tensor { name: "w".into(), cause: "of lead".into() };
        let said = LocalGroup::run(3, |group| {
            let said = on_rank_zero::<()>(&group, || Err(error())).unwrap_err().to_string();
            group.barrier()?;
            Ok(said)
        });
        let said = said.unwrap();
        assert_eq!(said[0], "cannot save tensor `w`: of lead");
        assert_eq!(said[1..], vec![format!("on rank 0: {}", said[0]); 2]);
    }
}
