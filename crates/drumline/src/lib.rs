//! Drumline: distributed deep-learning training. This is the crate that programs import.
//!
//! ```text
//!   drumline run, torchrun, srun, MPI ──┐
//!   spawn(n, f): this program, n times ─┴▶ rank ─▶ ProcessGroup ─▶ all_reduce, broadcast, send, …
//!                                            ├─▶ StopRequest: SIGTERM means "checkpoint, then stop"
//!                                            └─▶ checkpoint: the whole state of a run, saved and loaded
//! ```
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

pub mod checkpoint;
mod spawn;
mod stop_request;

/// The guides' examples compile, too.
#[cfg(doctest)]
mod guides {
    #[doc = include_str!("../../../docs/checkpoints.md")]
    mod checkpoints {}
    #[doc = include_str!("../../../docs/debugging.md")]
    mod debugging {}
    #[doc = include_str!("../../../docs/launching.md")]
    mod launching {}
}

pub use drumline_comm::{
    CommError, DType, Element, GroupOptions, HeapBuffer, Letter, LocalGroup, P2p, ProcessGroup, ReduceOp,
    Scope, Source, Transport, Work, bf16, f16,
};
pub use drumline_launch::{Exit, Failure, FailureReport, LaunchError, Output, Signal};
pub use drumline_rendezvous::error_file::{install_panic_file, record_error};
pub use drumline_rendezvous::{InitError, InitOptions, JobKey, Member, Store, from_env, init, worker_env};
pub use spawn::{Outcome, Spawn, SpawnError, Worker, is_spawned, spawn};
pub use stop_request::StopRequest;
