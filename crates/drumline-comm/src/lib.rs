//! Process groups and every collective on typed slices, over shared memory and TCP.
//!
//! ```text
//!   ProcessGroup ─▶ Call (fingerprint) ─▶ tiers ─┬─▶ shm::Node   ranks of this node: rounds, staging, symmetric heap
//!                       │                        └─▶ tcp::Team   other nodes: links, all in one loop
//!   Monitor ◀── store ──┘ deaths, aborts                 select: which algorithm, a pure function
//! ```
//!
//! What a group promises: all ranks hold the same bits after a collective; ranks that make different calls all learn who
//! called what, and where; a silent rank is named when the deadline passes; a dead one within a second; nothing is left
//! behind; and nobody takes part without the job's key.
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
mod speaker;
mod tcp;

pub use call::{Op, Trace, UnderWay, call_site, on_behalf_of};
pub use element::{DType, Element};
pub use error::{CommError, Silence};
pub use group::{Announced, GroupName, Letter, P2p, ProcessGroup, Scope, Source, Standing, Work};
pub use half::{bf16, f16};
pub use local_group::LocalGroup;
pub use mesh::{Axis, Mesh, MeshShape, NoSuchAxis, ShapeError};
pub use process::{GroupOptions, Transport};
pub use reduce::ReduceOp;
pub use shm::{HeapBuffer, copy_past_caches};
pub use tcp::LinkSecurity;
