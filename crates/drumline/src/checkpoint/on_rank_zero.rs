//! Work that rank 0 does for all ranks while the others wait, however long it takes; see `main_first`.

use drumline_comm::ProcessGroup;

use super::error::CheckpointError;
use crate::launch::main_first::{run_with_heartbeat, wait_for_rank_zero};

/// Runs `work` on rank 0. Only rank 0 gets the result. All ranks get an error, and the group can still be used.
#[track_caller]
pub(super) fn on_rank_zero<T>(
    group: &ProcessGroup,
    work: impl FnOnce() -> Result<T, CheckpointError>,
) -> Result<Option<T>, CheckpointError> {
    if group.size() == 1 {
        return work().map(Some);
    }
    if group.rank() != 0 {
        wait_for_rank_zero(group)?;
        return match group.broadcast_object::<Option<String>>(None, 0)? {
            Some(cause) => Err(CheckpointError::OnRankZero { cause }),
            None => Ok(None),
        };
    }
    let result = run_with_heartbeat(group, "a checkpoint", work)?;
    let cause = result.as_ref().err().map(ToString::to_string);
    group.broadcast_object(Some(&cause), 0)?;
    result.map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;
    use drumline_comm::{CommError, GroupOptions, LocalGroup};
    use std::time::Duration;

    fn slow(group: &ProcessGroup) -> Result<Option<u32>, CommError> {
        let work = || {
            std::thread::sleep(Duration::from_secs(5));
            Ok(7)
        };
        Ok(on_rank_zero(group, work).unwrap())
    }

    #[test]
    fn slow_work_outlasts_the_deadline_of_a_call() {
        let options = GroupOptions { timeout: Duration::from_secs(3), ..GroupOptions::default() };
        assert_eq!(LocalGroup::run_with(2, &options, |group| slow(&group)).unwrap(), [Some(7), None]);
        // The control: a single call that takes this long times out.
        let late = LocalGroup::run_with(2, &options, |group| {
            if group.rank() == 0 {
                std::thread::sleep(Duration::from_secs(5));
            }
            group.barrier()
        });
        assert!(late.unwrap_err().to_string().contains("timed out"));
    }

    #[test]
    fn all_ranks_get_the_error_and_the_group_still_works() {
        let error = || CheckpointError::Tensor { name: "w".into(), cause: "of lead".into() };
        let messages = LocalGroup::run(3, |group| {
            let message = on_rank_zero::<()>(&group, || Err(error())).unwrap_err().to_string();
            group.barrier()?;
            Ok(message)
        });
        let messages = messages.unwrap();
        assert_eq!(messages[0], "cannot save tensor `w`: of lead");
        assert_eq!(messages[1..], vec![format!("on rank 0: {}", messages[0]); 2]);
    }
}
