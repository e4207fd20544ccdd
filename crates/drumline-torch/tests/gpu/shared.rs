//! What the tests share.

use std::sync::{Mutex, MutexGuard, PoisonError};

use drumline_torch::cuda;
use tch::{Device, Kind, Tensor};

pub(super) const GPU: Device = Device::Cuda(0);
pub(super) const FLOAT: (Kind, Device) = (Kind::Float, GPU);

/// Opens the GPU; one test at a time has it, as peaks, generators and graphs are the whole process's.
pub(super) fn gpu() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    cuda::open().unwrap();
    turn
}

/// Work of some milliseconds.
pub(super) fn long_work() -> Tensor {
    let a = Tensor::ones([4096, 4096], FLOAT);
    (0..20).fold(a.shallow_clone(), |product, _| product.matmul(&a) * 1e-4)
}

pub(super) fn values(tensor: &Tensor) -> Vec<f32> {
    Vec::try_from(tensor.to_device(Device::Cpu).to_kind(Kind::Float).view(-1)).unwrap()
}
