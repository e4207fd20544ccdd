//! Which device is a rank's own.

use drumline_comm::ProcessGroup;
use tch::{Cuda, Device};

/// A device as people write it: `cpu`, `cuda:0`.
pub(crate) fn name_of(device: Device) -> String {
    match device {
        Device::Cuda(index) => format!("cuda:{index}"),
        other => format!("{other:?}").to_lowercase(),
    }
}

/// This rank's GPU: the one of its local rank, counted from the first again where a rank sees fewer. The processor where there is none.
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
    match Cuda::is_available() {
        true => Device::Cuda(group.local_rank() % Cuda::device_count().max(1) as usize),
        false => Device::Cpu,
    }
}
