//! Process groups and every collective on typed slices, over shared memory and TCP.
//!
//! ```text
//!   ProcessGroup ─▶ Call (fingerprint) ─▶ tiers ─┬─▶ shm::Node   ranks of this node: rounds, staging, symmetric heap
//!                       │                        └─▶ tcp::Team   other nodes: links, all in one loop
//!   Monitor ◀── store ──┘ deaths, aborts                 select: which algorithm, a pure function
//! ```
//!
//! A group guarantees: after a collective all ranks hold the same bits; if ranks make different calls, all of them get an error
//! that says who called what, and where; at the deadline the error names the silent rank; a dead rank is reported within a
//! second; nothing is left behind; and nobody takes part without the job's key.
//!
//! ```no_run
//! use drumline_comm::{ProcessGroup, ReduceOp};
//!
//! let group = ProcessGroup::from_env()?; // RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT; Slurm; MPI
//! let mut x = vec![group.rank() as f32; 1024];
//! group.all_reduce(&mut x, ReduceOp::Sum)?;
//! # Ok::<(), drumline_comm::CommError>(())
//! ```
//!
//! Read in this order: `group.rs`, `group/tiers.rs`, `shm/line.rs`, `shm/node.rs`, `shm/all_reduce.rs`, `tcp/fabric.rs`, `mesh.rs`.

mod call;
mod cores;
mod element;
mod error;
mod event_poster;
#[cfg(fuzzing)]
#[doc(hidden)]
pub mod fuzzing;
mod group;
mod hint;
mod local_group;
mod mesh;
mod monitor;
mod process;
mod reduce;
mod select;
mod shm;
mod slices;
mod tcp;

pub use call::{OngoingCall, Op, Subject, Trace, about, call_site, on_behalf_of};
pub use drumline_rendezvous::panic_text;
pub use element::{DType, Element, UnknownDType};
pub use error::{CommError, MissingRank, ProcessState};
pub use group::{
    CallCount, ExternalCall, GroupName, GroupStatus, MessageHandle, P2p, ProcessGroup, Scope, Source, Work,
};
pub use half::{bf16, f16};
pub use local_group::LocalGroup;
pub use mesh::{Axis, Mesh, MeshShape, NoSuchAxis, ShapeError};
pub use process::{GroupOptions, Transport, UnknownTransport};
pub use reduce::ReduceOp;
pub use shm::{FirstBytes, HeapBuffer, SharedBuffer, available_memory, copy_past_caches};
pub use tcp::{LinkSecurity, UnknownLinkSecurity};

// Compiles and runs the README's example.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
