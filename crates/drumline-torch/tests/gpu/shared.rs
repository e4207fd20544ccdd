//! What the tests share.

use std::sync::{Mutex, MutexGuard, PoisonError};

use drumline_torch::cuda;
use tch::{Device, Kind, Tensor};

pub(super) const GPU: Device = Device::Cuda(0);
pub(super) const FLOAT: (Kind, Device) = (Kind::Float, GPU);

/// Opens the GPU. One test at a time uses it, because memory peaks, generators and graphs belong to the process.
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

pub(super) fn channels_last(tensor: &Tensor) -> Tensor {
    tensor.permute([0, 2, 3, 1]).contiguous().permute([0, 3, 1, 2])
}

pub(super) fn leaf(tensor: &Tensor) -> Tensor {
    tensor.detach().copy().set_requires_grad(true)
}

/// How far two tensors are apart, relative to the second.
pub(super) fn off(found: &Tensor, expected: &Tensor) -> f64 {
    let (found, expected) = (found.to_kind(Kind::Double), expected.to_kind(Kind::Double));
    (&found - &expected).norm().double_value(&[]) / expected.norm().double_value(&[]).max(1e-9)
}
