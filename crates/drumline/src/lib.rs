//! Drumline: distributed deep-learning training. This is the crate that programs import.
//!
//! ```text
//!   drumline run, torchrun, srun, MPI ──┐
//!   spawn(n, f): this program, n times ─┴▶ rank ─▶ ProcessGroup ─▶ all_reduce, broadcast, send, …
//!                                            ├─▶ StopRequest: SIGTERM means "checkpoint, then stop"
//!                                            └─▶ checkpoint: the whole state of a run, saved and loaded
//! ```
//!
//! | module | what is in it |
//! |---|---|
//! | [`trainer`] | a complete training loop: [`DistTrainer`] |
//! | [`accelerator`] | a training loop of your own on many ranks: [`Accelerator`] |
//! | [`deepspeed`] | the same by a `ds_config.json`, with the methods of DeepSpeed's engine |
//! | [`engine`] | [`Ddp`], and other ways to train one model on many ranks |
//! | [`comm`] | [`ProcessGroup`] and its collectives, the store, the mesh |
//! | [`data`] | samplers, loaders, files of predictions |
//! | [`optim`], [`schedule`], [`metrics`] | optimizers, learning rate schedules, metrics over all ranks |
//! | [`config`] | `ds_config.json` of DeepSpeed, read unchanged |
//! | [`checkpoint`] | the whole state of a run, saved and loaded |
//! | [`launch`] | [`spawn()`], errors that are shown once, stop requests, fault injection |
//! | [`torch`] | settings of libtorch: devices, precision, determinism |
//! | [`prelude`] | what a training program usually needs |
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
#![warn(missing_docs)]

pub mod accelerator;
pub mod checkpoint;
pub mod comm;
pub mod config;
pub mod data;
pub mod deepspeed;
mod device;
pub mod engine;
mod injected_faults;
pub mod launch;
pub mod metrics;
pub mod optim;
pub mod prelude;
mod quiet;
mod run_error;
mod scaling;
pub mod schedule;
mod step_trace;
pub mod torch;
pub mod trainer;

/// Compiles and runs the example of the crate's README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod crate_readme {}

/// Compiles the examples of the guides.
#[cfg(doctest)]
mod guides {
    #[doc = include_str!("../../../docs/accelerator.md")]
    mod accelerator {}
    #[doc = include_str!("../../../docs/activation-checkpointing.md")]
    mod activation_checkpointing {}
    #[doc = include_str!("../../../docs/checkpoints.md")]
    mod checkpoints {}
    #[doc = include_str!("../../../docs/coming-from.md")]
    mod coming_from {}
    #[doc = include_str!("../../../docs/concepts.md")]
    mod concepts {}
    #[doc = include_str!("../../../docs/concepts.zh.md")]
    mod concepts_zh {}
    #[doc = include_str!("../../../docs/data-parallel.md")]
    mod data_parallel {}
    #[doc = include_str!("../../../docs/debugging.md")]
    mod debugging {}
    #[doc = include_str!("../../../docs/deepspeed-engine.md")]
    mod deepspeed_engine {}
    #[doc = include_str!("../../../docs/deepspeed.md")]
    mod deepspeed {}
    #[doc = include_str!("../../../docs/faults.md")]
    mod faults {}
    #[doc = include_str!("../../../docs/hangs.md")]
    mod hangs {}
    #[doc = include_str!("../../../docs/install.md")]
    mod install {}
    #[doc = include_str!("../../../docs/install.zh.md")]
    mod install_zh {}
    #[doc = include_str!("../../../docs/launching.md")]
    mod launching {}
    #[doc = include_str!("../../../docs/loading.md")]
    mod loading {}
    #[doc = include_str!("../../../docs/mixed-precision.md")]
    mod mixed_precision {}
    #[doc = include_str!("../../../docs/optimizers.md")]
    mod optimizers {}
    #[doc = include_str!("../../../README.md")]
    mod readme {}
    #[doc = include_str!("../../../README.zh.md")]
    mod readme_zh {}
    #[doc = include_str!("../../../docs/trainer.md")]
    mod trainer {}
    #[doc = include_str!("../../../docs/zero.md")]
    mod zero {}
    #[doc = include_str!("../../../docs/offload.md")]
    mod offload {}
}

pub use accelerator::Accelerator;
pub use comm::{CommError, ProcessGroup, ReduceOp};
pub use device::local_device;
pub use engine::{Ddp, DdpOptions};
pub use launch::ending::exit_code;
pub use launch::logging::{LogOptions, init_logging};
pub use launch::main_first::{is_master, main_first};
pub use launch::spawn::{SpawnError, Worker, spawn};
pub use launch::stop_request::StopRequest;
/// The `tch` crate, at the version that Drumline is built with.
pub use tch;
pub use trainer::DistTrainer;
