//! The device of a rank.

use drumline_comm::ProcessGroup;
use drumline_torch::TorchError;
use drumline_torch::cuda::{self, CudaError};
use tch::Device;

/// The name of a device: `cpu`, `cuda:0`.
pub(crate) fn name_of(device: Device) -> String {
    match device {
        Device::Cuda(index) => format!("cuda:{index}"),
        other => format!("{other:?}").to_lowercase(),
    }
}

/// This rank's GPU: the one with the number of its local rank, modulo the number of GPUs. The CPU if there is no GPU.
///
/// It opens the CUDA half of libtorch. That must happen before any other call needs it, as `tch::manual_seed` does:
/// call this at the beginning of the program.
///
/// ```
/// use drumline::local_device;
/// use drumline::comm::LocalGroup;
/// use drumline::tch::nn::VarStore;
///
/// LocalGroup::run(2, |group| {
///     let store = VarStore::new(local_device(&group));
///     assert!(store.device() == local_device(&group));
///     Ok(())
/// })?;
/// # Ok::<(), drumline::CommError>(())
/// ```
pub fn local_device(group: &ProcessGroup) -> Device {
    gpu_or_cpu(group.local_rank())
}

/// The GPU of a local rank, or the CPU if there is no GPU. If there is a GPU that cannot be used, the first rank of the
/// node logs why.
pub fn gpu_or_cpu(local_rank: usize) -> Device {
    match gpu(local_rank) {
        Ok(device) => device,
        Err(TorchError::Cuda(CudaError::NoDriver(_) | CudaError::NoDevice)) => Device::Cpu,
        Err(why) => {
            if local_rank == 0 {
                tracing::warn!("using the CPU although there is a GPU: {why}");
            }
            Device::Cpu
        }
    }
}

/// The GPU of a local rank, modulo the number of GPUs.
pub fn gpu(local_rank: usize) -> Result<Device, TorchError> {
    cuda::open()?;
    let device = local_rank % cuda::device_count()?.max(1);
    cuda::set_device(device)?;
    Ok(Device::Cuda(device))
}
