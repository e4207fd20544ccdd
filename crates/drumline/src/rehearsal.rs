//! Faults on purpose in a training loop: what `drumline run --fault` said, carried out when a step comes.

use drumline_comm::ProcessGroup;
use drumline_rendezvous::fault::Faults;

use crate::run_error::RunError;
use crate::shared_failure::{Trouble, agree};

/// The faults of this rank that are still to come.
#[derive(Debug, Default)]
pub(crate) struct Rehearsal(Faults);

impl Rehearsal {
    /// The faults in the environment that are this rank's; called by all ranks together. The group knows the rank in the
    /// job, which not every launcher puts into `RANK`.
    pub(crate) fn from_env(group: &ProcessGroup) -> Result<Rehearsal, RunError> {
        let rank = group.members()[group.rank()];
        let faults = agree::<_, RunError>(group, Faults::for_rank(rank).map_err(Trouble::from))?;
        Ok(Rehearsal(faults))
    }

    /// This rank comes to its step number `step`, counted from 1 as in the log.
    pub(crate) fn at(&mut self, step: u64, group: &ProcessGroup) {
        for link in self.0.at(step) {
            group.inject(link);
        }
    }
}
