//! The ways of data parallelism.
//!
//! - [`Ddp`]: one process per replica; gradients are averaged while backward still runs
//! - [`Compressed`], [`PowerSgd`], [`PostLocalSgd`]: hooks of `Ddp` that send less
//! - [`PeriodicAverager`], [`HierarchicalAverager`]: parameters that are averaged now and then, after steps of their own
//! - [`Uneven`]: ranks whose data ends earlier take part with nothing until all are done
//!
//! # Who divides the loss by what
//! A rank calls `backward` on the mean loss over its own batch. [`Ddp`] then averages the gradients over the ranks. With batches of one size that
//! is the gradient of the mean over all samples of all ranks: 1 rank with 64 samples, 2 with 32 and 4 with 16 make the same step.
#![forbid(unsafe_code)]

mod averaging;
mod ddp;
mod error;
mod hooks;
mod uneven;

/// The guide's examples compile, too.
#[cfg(doctest)]
mod guides {
    #[doc = include_str!("../../../docs/ddp-hooks.md")]
    mod ddp_hooks {}
}

pub use averaging::{AveragingLevel, HierarchicalAverager, PeriodicAverager};
pub use ddp::{AllReduce, CommHook, Ddp, DdpOptions, GradBucket};
pub use error::ParallelError;
pub use hooks::{Compressed, PostLocalSgd, PowerSgd, PowerSgdOptions, Traffic, subgroup};
pub use uneven::{Share, Turn, Uneven};
