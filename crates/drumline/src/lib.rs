//! Drumline: distributed deep-learning training. This is the crate that programs import.
//!
//! ```text
//!   drumline run, torchrun, srun, MPI ──┐
//!   spawn(n, f): this program, n times ─┴▶ rank ─▶ ProcessGroup ─▶ all_reduce, broadcast, send, …
//!                                            ├─▶ StopRequest: SIGTERM means "checkpoint, then stop"
//!                                            └─▶ checkpoint: the whole state of a run, saved and loaded
//! ```
//!
//! For a training program: `DistributedSampler`, `EvalSampler` and `Loader` (which samples, and their batches, made ahead by
//! threads), `Metric` (exact over ranks), `PredictionWriter` (the predictions of all ranks in one file); or all of it at once: `DistTrainer`.
//! A loop of your own becomes one for many ranks by `Accelerator`.
//! For any program: `init_logging` (lines of the master), `main_first` (the master prepares, the others wait), `exit_code` (an error is told once).
//!
//! ```no_run
//! use drumline::ReduceOp;
//!
//! fn main() -> Result<(), drumline::SpawnError> {
//!     drumline::spawn(4, |worker| {
//!         let group = worker.group()?;
//!         let mut x = [worker.rank as f32];
//!         group.all_reduce(&mut x, ReduceOp::Sum)?;
//!         println!("rank {} of {}: {x:?}", worker.rank, worker.world_size);
//!         Ok::<(), drumline::CommError>(())
//!     })
//! }
//! ```
//!
//! Not here: the command `drumline` (`drumline-cli`).
#![forbid(unsafe_code)]

pub mod accelerator;
mod alike;
pub mod checkpoint;
mod device;
mod ending;
mod exchange;
mod loader;
mod logging;
mod main_first;
mod metrics;
mod predictions;
mod quiet;
mod rehearsal;
mod run_error;
mod sampler;
mod scaling;
mod schedule;
mod shared_failure;
mod spawn;
mod step_trace;
mod stop_request;
pub mod trainer;
mod work_queue;

/// The guides' examples compile, too.
#[cfg(doctest)]
mod guides {
    #[doc = include_str!("../../../docs/accelerator.md")]
    mod accelerator {}
    #[doc = include_str!("../../../docs/checkpoints.md")]
    mod checkpoints {}
    #[doc = include_str!("../../../docs/coming-from.md")]
    mod coming_from {}
    #[doc = include_str!("../../../docs/concepts.md")]
    mod concepts {}
    #[doc = include_str!("../../../docs/data-parallel.md")]
    mod data_parallel {}
    #[doc = include_str!("../../../docs/debugging.md")]
    mod debugging {}
    #[doc = include_str!("../../../docs/faults.md")]
    mod faults {}
    #[doc = include_str!("../../../docs/hangs.md")]
    mod hangs {}
    #[doc = include_str!("../../../docs/install.md")]
    mod install {}
    #[doc = include_str!("../../../docs/launching.md")]
    mod launching {}
    #[doc = include_str!("../../../docs/loading.md")]
    mod loading {}
    #[doc = include_str!("../../../docs/mixed-precision.md")]
    mod mixed_precision {}
    #[doc = include_str!("../../../docs/trainer.md")]
    mod trainer {}
}

pub use accelerator::{Accelerator, AcceleratorError};
pub use alike::ensure_alike;
pub use device::{gpu, gpu_or_cpu, local_device};
pub use drumline_comm::{
    CommError, DType, Element, GroupOptions, HeapBuffer, Letter, LocalGroup, P2p, ProcessGroup, ReduceOp,
    Scope, Source, Transport, Work, bf16, f16,
};
pub use drumline_launch::{Exit, Failure, FailureReport, LaunchError, Output, Signal, signal_name};
pub use drumline_parallel::{
    AllReduce, AveragingLevel, CommHook, Compressed, DataParallel, Ddp, DdpObserver, DdpOptions,
    DistributedOptimizer, Divide, GradBucket, HierarchicalAverager, ParallelError, PeriodicAverager,
    PostLocalSgd, PowerSgd, PowerSgdOptions, ReducedBucket, Share, StageBytes, SyncBatchNorm, SyncGroup,
    Traffic, Turn, Uneven, broadcast_optimizer_state, subgroup,
};
pub use drumline_rendezvous::error_file::{install_panic_file, record_error};
pub use drumline_rendezvous::fault::{FaultError, Faults, LinkFault};
pub use drumline_rendezvous::{
    InitError, InitOptions, JobKey, Member, Store, StoreError, from_env, init, worker_env,
};
pub use drumline_torch::{
    Adam, AdamOptions, AdamW, DeepSpeedScale, Determinism, DynamicScale, LIBTORCH, LossScaler, MasterWeights,
    Named, NormType, Optimizer, OptimizerState, ParameterGroup, ParameterGroups, RngState, ScalePolicy,
    ScaledGrads, ScalerState, Sgd, SgdOptions, StepMade, TensorCollectives, TorchError, Unscaled, autocast,
    buffers, channels_last, clip_grad_norm, clip_grad_value, flush_denormals, keep_freed_memory,
    libtorch_version, no_decay_on_norms, parameters, use_deterministic_algorithms, weights_channels_last,
    weights_in,
};
pub use ending::exit_code;
pub use exchange::Exchange;
pub use loader::{
    Cause, Dataset, Epoch, ImageBatch, Loader, LoaderError, LoaderOptions, MapDataset, Sample, SampleError,
    SampleRng,
};
pub use logging::{LogOptions, LoggingError, init_logging};
pub use main_first::{MainFirstError, is_master, main_first};
pub use metrics::{Average, F1, MeanLoss, Metric, Perplexity, SpanF1, TopK, reduce_metrics};
pub use predictions::{
    Cell, Prediction, PredictionError, PredictionFault, PredictionFormat, PredictionOptions, PredictionWriter,
};
pub use run_error::RunError;
pub use sampler::{
    DataId, DistributedSampler, EvalSampler, PlannedBatches, PlannedOptions, Sampler, SamplerError,
    SamplerOptions, SamplerPosition,
};
pub use schedule::{
    At, CosineAnnealingLr, Distribuuuu, EpochCurve, InverseSqrt, LinearLr, LrPolicy, LrRangeTest, LrSchedule,
    MultiStepLr, Noam, OneCycle, Per, Schedule, ScheduleError, StepLr, WarmupCosineLr, WarmupDecayLr,
    WarmupLr, WarmupType,
};
pub use shared_failure::{SharedFailure, agree_on};
pub use spawn::{Outcome, Spawn, SpawnError, Worker, is_spawned, spawn};
pub use step_trace::{Noting, StepTrace};
pub use stop_request::StopRequest;
/// The tensors and layers that all of this is made for, at the version that it is made for.
pub use tch;
pub use trainer::{DistTrainer, TrainerError};
pub use work_queue::WorkQueue;
