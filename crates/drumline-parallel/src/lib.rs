//! The ways of data parallelism.
//!
//! - [`Ddp`]: one process per replica; gradients are averaged while backward still runs
//! - [`DistributedOptimizer`]: gradients are reduced in `step`, after any number of backwards
//! - [`DataParallel`]: one process, a thread for each device
//! - [`SyncBatchNorm`]: batch normalisation over the batch of all ranks
//! - [`Compressed`], [`PowerSgd`], [`PostLocalSgd`]: hooks of `Ddp` that send less
//! - [`PeriodicAverager`], [`HierarchicalAverager`]: parameters that are averaged now and then, after steps of their own
//! - [`Uneven`]: ranks whose data ends earlier take part with nothing until all are done
//!
//! # Who divides the loss by what
//! A rank calls `backward` on the mean loss over its own batch. [`Ddp`] then averages the gradients over the ranks. With batches of one size that
//! is the gradient of the mean over all samples of all ranks: 1 rank with 64 samples, 2 with 32 and 4 with 16 make the same step.
#![forbid(unsafe_code)]

mod agreement;
mod arena;
mod averaging;
mod data_parallel;
mod ddp;
mod distributed_optimizer;
mod error;
mod hooks;
mod layout;
mod sync_batch_norm;
mod sync_group;
mod uneven;

/// The guide's examples compile, too.
#[cfg(doctest)]
mod guides {
    #[doc = include_str!("../../../docs/ddp-hooks.md")]
    mod ddp_hooks {}
}

pub use averaging::{AveragingLevel, HierarchicalAverager, PeriodicAverager};
pub use data_parallel::{DataParallel, StageBytes};
pub use ddp::{AllReduce, CommHook, Ddp, DdpObserver, DdpOptions, GradBucket, ReducedBucket};
pub use distributed_optimizer::{DistributedOptimizer, Divide, broadcast_optimizer_state};
pub use error::ParallelError;
pub use hooks::{Compressed, PostLocalSgd, PowerSgd, PowerSgdOptions, Traffic, subgroup};
pub use sync_batch_norm::SyncBatchNorm;
pub use sync_group::{SyncCall, SyncGroup};
pub use uneven::{Share, Turn, Uneven};

/// A group of the same ranks, whose calls cannot come between those that the program makes.
fn own_group(group: &drumline_comm::ProcessGroup) -> Result<drumline_comm::ProcessGroup, ParallelError> {
    let all: Vec<usize> = (0..group.size()).collect();
    let own = group.new_group(&all)?;
    own.ok_or_else(|| ParallelError::Unfit("a group of all ranks has this one".into()))
}
