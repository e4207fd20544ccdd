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
//! - `watcher`: the threads that see to it that nothing hangs

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

use tch::Device;

use crate::cuda::Stream;
use crate::error::TorchError;

/// An error if a call to other GPUs has failed, in any group that this process has: calls on a GPU's tensors are only queued, so what they have written since
/// is worth nothing, and none of them could say so. Told of all calls before the last wait for the GPU, such as the reading of a loss.
pub fn check() -> Result<(), TorchError> {
    Ok(watcher::check_all()?)
}

/// Waits until a GPU has done what the current stream has for it, and [`check`]s: before weights are saved, or used by anyone who would not notice. On a
/// CPU everything is done when its call returns.
///
/// ```
/// # use drumline_torch::nccl;
/// # use tch::{Device, nn};
/// let vs = nn::VarStore::new(Device::cuda_if_available());
/// nccl::settle(vs.device())?;
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("model.safetensors");
/// vs.save(path)?;
/// # Ok::<(), anyhow::Error>(())
/// ```
pub fn settle(device: Device) -> Result<(), TorchError> {
    if let Device::Cuda(gpu) = device {
        Stream::current(gpu)?.synchronize()?;
    }
    check()
}

/// NCCL's version as people write it, such as `2.28.9`; an error that says what is missing.
pub fn version() -> Result<String, TorchError> {
    let version = Nccl::open()?.version()?;
    Ok(format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100))
}
