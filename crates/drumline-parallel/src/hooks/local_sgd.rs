//! Post-local SGD: averages gradients over all ranks at first, later only over a subgroup.
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

/// The mean over all ranks for the first steps, then over a subgroup. Use it with an averager whose `warmup_steps` is
/// the same number; otherwise subgroups drift apart. Steps are counted from the creation of the hook; after a resume
/// from a checkpoint pass the remaining number of steps.
#[derive(Debug)]
pub struct PostLocalSgd {
    start_step: u64,
    subgroup: Option<ProcessGroup>,
    step: u64,
    between_all: Traffic,
}

impl PostLocalSgd {
    /// From step `start_step` on (counted from 0) gradients are averaged over `subgroup` only; see [`subgroup`].
    pub fn new(start_step: u64, subgroup: ProcessGroup) -> Self {
        Self { start_step, subgroup: Some(subgroup), step: 0, between_all: Traffic::default() }
    }

    /// From step `start_step` on every rank uses its own gradients.
    pub fn alone(start_step: u64) -> Self {
        Self { start_step, subgroup: None, step: 0, between_all: Traffic::default() }
    }

    /// Counts the bytes that are reduced over all ranks.
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

/// The group of `size` consecutive ranks that contains this rank. All ranks call it. With the number of ranks per node
/// (`LOCAL_WORLD_SIZE`) each group is a node.
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
        return Err(ParallelError::GroupSize { ranks: group.size(), size });
    }
    let color = u32::try_from(group.rank() / size).ok();
    let own = group.split(color, 0)?;
    own.ok_or(ParallelError::Internal { what: "there are more groups than fit in 32 bits" })
}
