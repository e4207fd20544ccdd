//! How ranks train one model together: the engine that the trainer and the accelerator drive, and [`Ddp`] for loops of
//! your own.
//!
//! - [`Engine`], [`EngineOptions`]: one step over all ranks, for any kind of parallelism
//! - [`Ddp`], [`DdpOptions`], and the communication hooks [`Compressed`], [`PowerSgd`], [`PostLocalSgd`]
//! - [`ShardOptions`]: ZeRO, in which ranks divide optimizer state, gradients and parameters by [`Stage`]
//! - [`pipeline`]: stages of layers on each rank, and micro-batches that travel through them
//! - [`tensor`], [`context`]: layers of which ranks have parts, and texts of which ranks have some places
//! - [`Offload`]: the optimizer's state in files, for models that are larger than memory
//! - [`DataParallel`]: several devices of one process
//! - [`SyncBatchNorm`]: batch norm over the batches of all ranks
//! - [`StepTrace`]: a trace of steps, with the reduction of each bucket beside backward

pub use crate::step_trace::{Recording, StepTrace};
pub use drumline_parallel::{
    Accumulation, Agreed, AllReduce, Alone, Brought, Clip, CommHook, Compressed, Count, Cut, DataParallel,
    Ddp, DdpOptions, Divide, DivideBy, Engine, EngineOptions, EngineSetup, Forwards, GradBucket, GradSync,
    ModelParallel, ModelParts, NotRecordable, Offload, ParallelError, Part, Place, Placed, PlacedBox,
    PostLocalSgd, PowerSgd, PowerSgdOptions, ReducedBucket, ReductionObserver, ShardOptions, Stack,
    StageBytes, SyncBatchNorm, SyncGroup, Traffic, Uneven, UnevenTurn, Whole, subgroup,
};
pub use drumline_parallel::{context, pipeline, tensor};
pub use drumline_plan::{NoSuchStage, Stage};
