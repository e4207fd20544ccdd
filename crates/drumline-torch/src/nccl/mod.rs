//! NVIDIA's NCCL: collectives from GPU to GPU. The library is opened when it is first needed; nothing of it is linked.
//!
//! ```text
//!   a collective on a GPU's tensor ─▶ Communicator ─┬─▶ its stream: after the current one; the current one goes on after it
//!                                                   ├─▶ Announcer: do all ranks make this call? (beside, on a thread)
//!                                                   └─▶ Watcher: has it failed, is it late, is a rank gone? ─▶ abort
//! ```
//!
//! - `library`: what is used of NCCL, and where it is found
//! - `plan`: which of our types and reductions NCCL has
//! - `communicator`: one for each group of ranks; `calls`: what it can do
//! - `watcher`: the two threads that see to it that nothing hangs

mod calls;
mod communicator;
mod library;
mod plan;
mod watcher;

pub(crate) use calls::Span;
pub(crate) use communicator::Communicator;
pub(crate) use library::{Nccl, UniqueId, stand_in};
pub(crate) use plan::{Reduction, reduction};
pub(crate) use watcher::Parts;

/// NCCL's version as people write it, such as `2.28.9`; an error that says what is missing.
pub fn version() -> Result<String, crate::TorchError> {
    let version = Nccl::open()?.version()?;
    Ok(format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100))
}
