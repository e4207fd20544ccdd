//! Injected faults in a training loop, from `drumline run --fault`.

use drumline_comm::ProcessGroup;
use drumline_rendezvous::fault::Faults;

use crate::comm::shared_failure::{LocalFailure, agree};
use crate::run_error::RunError;

/// The faults of this rank that have not happened yet.
#[derive(Debug, Default)]
pub(crate) struct InjectedFaults(Faults);

impl InjectedFaults {
    /// Reads this rank's faults from the environment. All ranks call it together. The group knows the rank in the job,
    /// which not every launcher puts into `RANK`.
    pub(crate) fn from_env(group: &ProcessGroup) -> Result<InjectedFaults, RunError> {
        let rank = group.members()[group.rank()];
        let faults = agree::<_, RunError>(group, Faults::for_rank(rank).map_err(LocalFailure::from))?;
        Ok(InjectedFaults(faults))
    }

    /// This rank is about to make this step, counted from 1 as in the log.
    pub(crate) fn at(&mut self, step: u64, group: &ProcessGroup) {
        for link in self.0.at(step) {
            group.inject(link);
        }
    }
}
