//! Groups of ranks, their collectives, and how ranks find each other.
//!
//! - [`ProcessGroup`]: collectives and messages over slices; [`TensorCollectives`] are the same over tensors
//! - [`Mesh`]: a group with named axes, for models that are divided in several ways
//! - [`init`], [`from_env`], [`Store`]: how ranks meet, and a key-value store that they share
//! - [`agree_on`], [`ensure_alike`]: a failure or a difference on one rank becomes the same error on all ranks
//! - [`Exchange`], [`WorkQueue`]: objects gathered on rank 0, and work that ranks take piece by piece

pub(crate) mod alike;
mod exchange;
pub(crate) mod shared_failure;
mod work_queue;

pub use crate::run_error::RunError;
pub use alike::ensure_alike;
pub use drumline_comm::{
    Axis, CommError, DType, Element, GroupOptions, HeapBuffer, LinkSecurity, LocalGroup, Mesh, MeshShape,
    MessageHandle, NoSuchAxis, P2p, ProcessGroup, ReduceOp, Scope, ShapeError, Source, Transport, Work, bf16,
    f16,
};
pub use drumline_rendezvous::{
    InitError, InitOptions, JobKey, Member, Store, StoreError, from_env, init, worker_env,
    world_size_from_env,
};
pub use drumline_torch::TensorCollectives;
pub use exchange::Exchange;
pub use shared_failure::{SharedFailure, agree_on};
pub use work_queue::WorkQueue;
