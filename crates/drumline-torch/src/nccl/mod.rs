//! NVIDIA's NCCL: collectives between GPUs. The library is opened when it is first needed, and is not linked.
//!
//! ```text
//!   a collective on a GPU's tensor ─▶ Communicator ─┬─▶ its stream: waits for the current stream, which then waits for it
//!                                                   ├─▶ Announcer: do all ranks make this call? (on another thread)
//!                                                   └─▶ Watcher: has it failed, is it late, is a rank lost? ─▶ abort
//! ```
//!
//! - `library`: the functions of NCCL, and where the library is found
//! - `plan`: which of our types and reductions NCCL supports
//! - `shared_gpu`: NCCL between ranks that share a GPU
//! - `communicator`: one for each process group; `calls`: its calls
//! - `watcher`: the threads that detect hangs

mod calls;
mod communicator;
mod library;
mod plan;
mod shared_gpu;
mod watcher;

pub(crate) use calls::Span;
pub(crate) use communicator::Communicator;
pub(crate) use library::{Nccl, UniqueId, stand_in};
pub(crate) use plan::{Reduction, reduction};
pub(crate) use shared_gpu::SharedGpu;
pub(crate) use watcher::{Parts, Watched, enlist};

use tch::Device;

use crate::cuda::Stream;
use crate::error::TorchError;

/// Returns an error if an NCCL call has failed in any group of this process. Calls on GPU tensors are asynchronous and
/// cannot return such an error; their results are invalid then. It covers all calls before the last wait for the GPU,
/// such as reading a loss.
pub fn check() -> Result<(), TorchError> {
    Ok(watcher::check_all()?)
}

/// Waits for the current stream of a GPU, and [`check`]s. Call it before weights are saved or sent elsewhere. On a CPU
/// there is nothing to wait for.
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

/// NCCL's version, such as `2.28.9`. An error if NCCL cannot be opened.
pub fn version() -> Result<String, TorchError> {
    let version = Nccl::open()?.version()?;
    Ok(format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100))
}
