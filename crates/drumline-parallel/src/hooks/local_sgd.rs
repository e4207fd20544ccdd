//! Post-local SGD: gradients of all ranks at first, later only those of a subgroup.
//!
//! ```text
//!   step   0 … start-1    start …
//!          all ranks      subgroup only, or none; an averager brings the parameters of the subgroups together
//! ```

use drumline_comm::{ProcessGroup, ReduceOp};
use drumline_torch::TorchError;

use super::Traffic;
use crate::ddp::{CommHook, GradBucket};
use crate::error::ParallelError;

/// The mean over all ranks for the first steps, then over a subgroup. To be used with an averager whose `warmup_steps` is the same
/// number, as subgroups drift apart otherwise. Steps are counted from the making of the hook; after a restart from a checkpoint, give it what is
/// left of them.
#[derive(Debug)]
pub struct PostLocalSgd {
    start_step: u64,
    subgroup: Option<ProcessGroup>,
    step: u64,
    between_all: Traffic,
}

impl PostLocalSgd {
    /// From the step `start_step` on (counted from 0) gradients stay inside `subgroup`; see [`subgroup`].
    pub fn new(start_step: u64, subgroup: ProcessGroup) -> Self {
        Self { start_step, subgroup: Some(subgroup), step: 0, between_all: Traffic::default() }
    }

    /// From then on every rank goes by its own gradients.
    pub fn alone(start_step: u64) -> Self {
        Self { start_step, subgroup: None, step: 0, between_all: Traffic::default() }
    }

    /// Counts what is reduced between all ranks.
    pub fn traffic(&self) -> Traffic {
        self.between_all.clone()
    }
}

impl CommHook for PostLocalSgd {
    fn reduce(&mut self, bucket: &GradBucket, group: &ProcessGroup) -> Result<(), TorchError> {
        let is_local = self.step >= self.start_step;
        self.between_all.add(bucket.num_bytes(), if is_local { 0 } else { bucket.num_bytes() });
        match &self.subgroup {
            _ if !is_local => bucket.all_reduce(group, ReduceOp::Avg)?,
            Some(subgroup) => bucket.all_reduce(subgroup, ReduceOp::Avg)?,
            None => {}
        }
        self.step += u64::from(bucket.is_last());
        Ok(())
    }
}

/// The group of this rank and its neighbours, `size` ranks one after the other; called by all ranks. With the number of ranks per node
/// (`LOCAL_WORLD_SIZE`) these are the nodes.
///
/// ```
/// use drumline_comm::{CommError, LocalGroup};
///
/// let groups = LocalGroup::run(4, |group| {
///     Ok(drumline_parallel::subgroup(&group, 2).expect("4 is 2 times 2").members().to_vec())
/// })?;
/// assert_eq!(groups, [[0, 1], [0, 1], [2, 3], [2, 3]]);
/// # Ok::<(), CommError>(())
/// ```
#[track_caller]
pub fn subgroup(group: &ProcessGroup, size: usize) -> Result<ProcessGroup, ParallelError> {
    if size == 0 || !group.size().is_multiple_of(size) {
        return Err(ParallelError::Unfit(format!(
            "{} ranks cannot be divided into groups of {size}; try a divisor of {0}",
            group.size()
        )));
    }
    let color = u32::try_from(group.rank() / size).ok();
    let own = group.split(color, 0)?;
    own.ok_or_else(|| ParallelError::Unfit("there are more groups than fit in 32 bits".into()))
}
