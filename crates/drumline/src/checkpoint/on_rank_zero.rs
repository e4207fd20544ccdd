//! Work that rank 0 does for all while the others wait, however long it takes; see `main_first`.

use drumline_comm::ProcessGroup;

use super::error::CheckpointError;
use crate::main_first::{at_work, wait};

/// Runs `work` on rank 0. Its result is there only; its error is on all ranks, and the group can still be used.
#[track_caller]
pub(super) fn on_rank_zero<T>(
    group: &ProcessGroup,
    work: impl FnOnce() -> Result<T, CheckpointError>,
) -> Result<Option<T>, CheckpointError> {
    if group.size() == 1 {
        return work().map(Some);
    }
    if group.rank() != 0 {
        wait(group)?;
        return match group.broadcast_object::<Option<String>>(None, 0)? {
            Some(cause) => Err(CheckpointError::OnRankZero { cause }),
            None => Ok(None),
        };
    }
    let result = at_work(group, "a checkpoint", work)?;
    let cause = result.as_ref().err().map(ToString::to_string);
    group.broadcast_object(Some(&cause), 0)?;
    result.map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;
    use drumline_comm::{CommError, GroupOptions, LocalGroup};
    use std::time::Duration;

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
