//! Kinds of parallelism, each an [`Engine`] for training loops, and wrappers for programs with their own loops.
//!
//! - [`Engine`]: what a training loop needs from a kind of parallelism; [`Agreed`]: what ranks agree on before a step
//! - [`Ddp`]: one process per replica; gradients are averaged while backward still runs
//! - [`ShardOptions`]: ZeRO, in which ranks divide optimizer state, gradients and parameters among them
//! - [`ModelParallel`]: ranks have parts of the model, along `pp` and `tp`, or of the same samples, along `cp`
//! - [`pipeline`]: stages of layers on each rank, and micro-batches that travel through them
//! - [`tensor`]: layers of which each rank of `tp` has a part, and activations that are cut along the sequence
//! - [`context`]: ring attention, for texts of which each rank of `cp` has some places
//! - [`Offload`]: the optimizer's state in files, for models that are larger than memory
//! - [`DistributedOptimizer`]: gradients are reduced in `step`, after any number of backwards
//! - [`DataParallel`]: one process with a thread for each device
//! - [`SyncBatchNorm`]: batch normalisation over the batch of all ranks
//! - [`Compressed`], [`PowerSgd`], [`PostLocalSgd`]: communication hooks of `Ddp` that send fewer bytes
//! - [`PeriodicAverager`], [`HierarchicalAverager`]: average parameters every few steps
//! - [`Uneven`]: ranks that run out of data contribute zeros until all ranks are done
//!
//! # How losses are averaged
//! A rank calls `backward` on the mean loss over its own batch. [`Ddp`] then averages the gradients over the ranks. If
//! all batches have the same size, that is the gradient of the mean over all samples of all ranks: 1 rank with 64
//! samples, 2 with 32 and 4 with 16 make the same step.
#![forbid(unsafe_code)]

mod agreement;
mod arena;
mod averaging;
pub mod context;
mod data_parallel;
mod ddp;
mod distributed_optimizer;
mod engine;
mod error;
mod hooks;
mod kinds;
mod lane;
mod layout;
mod observer;
mod offload;
pub mod pipeline;
mod progress;
mod queues;
mod reducer;
mod reduction;
mod same_model;
mod saved_grads;
mod shard;
mod sync_batch_norm;
mod sync_group;
mod synced;
pub mod tensor;

/// Compiles the examples of the README and of the guide.
#[cfg(doctest)]
mod guides {
    #[doc = include_str!("../README.md")]
    mod readme {}
    #[doc = include_str!("../../../docs/ddp-hooks.md")]
    mod ddp_hooks {}
    #[doc = include_str!("../../../docs/pipelines.md")]
    mod pipelines {}
    #[doc = include_str!("../../../docs/tensor-parallel.md")]
    mod tensor_parallel {}
}

pub use agreement::{Agreed, Brought, Count};
pub use averaging::{AveragingLevel, HierarchicalAverager, PeriodicAverager};
pub use data_parallel::{DataParallel, StageBytes};
pub use ddp::{AllReduce, CommHook, Ddp, DdpOptions, DivideBy, GradBucket, Uneven, UnevenTurn};
pub use distributed_optimizer::{DistributedOptimizer, Divide, broadcast_optimizer_state};
pub use engine::{
    Alone, Clip, Cut, Engine, EngineOptions, EngineSetup, Forwards, GradSync, ModelParallel, ModelParts,
    Part, Placed, PlacedBox, Stack, Whole,
};
pub use error::{NotRecordable, ParallelError};
pub use hooks::{Compressed, PostLocalSgd, PowerSgd, PowerSgdOptions, Traffic, subgroup};
pub use observer::{ReducedBucket, ReductionObserver};
pub use offload::{Offload, Place};
pub use shard::{Accumulation, ShardOptions};
pub use sync_batch_norm::SyncBatchNorm;
pub use sync_group::{SyncCall, SyncGroup};

/// A new group of the same ranks, whose calls cannot mix with those of the program.
fn own_group(group: &drumline_comm::ProcessGroup) -> Result<drumline_comm::ProcessGroup, ParallelError> {
    let all: Vec<usize> = (0..group.size()).collect();
    let own = group.new_group(&all)?;
    own.ok_or(ParallelError::Internal { what: "a group of all ranks does not contain this one" })
}
