//! Which device is a rank's own.

use drumline_comm::ProcessGroup;
use drumline_torch::TorchError;
use drumline_torch::cuda::{self, CudaError};
use tch::Device;

/// A device as people write it: `cpu`, `cuda:0`.
pub(crate) fn name_of(device: Device) -> String {
    match device {
        Device::Cuda(index) => format!("cuda:{index}"),
        other => format!("{other:?}").to_lowercase(),
    }
}

/// This rank's GPU: the one of its local rank, counted from the first again where a rank sees fewer. The processor where there is none.
///
/// It opens the CUDA half of libtorch, which must happen before anything else asks for it, as `tch::manual_seed` does: make it
/// one of the first things that a program does.
///
/// ```
/// use drumline::{LocalGroup, local_device};
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

/// The GPU of a local rank. The processor where there is none; where there is one that cannot be used, the first rank of the
/// node says why.
pub fn gpu_or_cpu(local_rank: usize) -> Device {
    match gpu(local_rank) {
        Ok(device) => device,
        Err(TorchError::Cuda(CudaError::NoDriver(_) | CudaError::NoDevice)) => Device::Cpu,
        Err(why) => {
            if local_rank == 0 {
                tracing::warn!("on the processor, although there is a GPU: {why}");
            }
            Device::Cpu
        }
    }
}

/// The GPU of a local rank, counted from the first again where there are fewer.
pub fn gpu(local_rank: usize) -> Result<Device, TorchError> {
    cuda::open()?;
    let device = local_rank % cuda::device_count()?.max(1);
    cuda::set_device(device)?;
    Ok(Device::Cuda(device))
}
