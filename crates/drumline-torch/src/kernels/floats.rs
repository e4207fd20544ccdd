//! Tensors as slices of floats, and loops that are compiled for every instruction set worth telling apart.
#![allow(unsafe_code)]

use tch::{Device, Kind, Tensor};

use crate::bytes::{bytes, bytes_mut};
use crate::error::TorchError;

/// Whether [`floats`] has them, after `contiguous`.
pub(super) fn has_floats(tensor: &Tensor) -> bool {
    tensor.device() == Device::Cpu
        && tensor.kind() == Kind::Float
        && !tensor.is_sparse()
        && !tensor.is_mkldnn()
}

/// The elements of a contiguous tensor of floats.
pub(super) fn floats(tensor: &Tensor) -> Result<&[f32], TorchError> {
    expect_floats(tensor)?;
    // SAFETY: libtorch aligns its memory for its elements, and all bit patterns are floats.
    let (before, floats, after) = unsafe { bytes(tensor)?.align_to::<f32>() };
    whole(before, floats, after)
}

/// The same, to be written to.
pub(super) fn floats_mut(tensor: &mut Tensor) -> Result<&mut [f32], TorchError> {
    expect_floats(tensor)?;
    // SAFETY: as above.
    let (before, floats, after) = unsafe { bytes_mut(tensor)?.align_to_mut::<f32>() };
    whole(before, floats, after)
}

fn expect_floats(tensor: &Tensor) -> Result<(), TorchError> {
    match tensor.f_kind()? {
        Kind::Float => Ok(()),
        other => Err(TorchError::Unfit(format!("expected a tensor of kind Float, got {other:?}"))),
    }
}

fn whole<F, B: AsRef<[u8]>>(before: B, floats: F, after: B) -> Result<F, TorchError> {
    match (before.as_ref().len(), after.as_ref().len()) {
        (0, 0) => Ok(floats),
        _ => Err(TorchError::Unfit("a tensor of floats is not aligned".into())),
    }
}

/// Compiles a function for every instruction set worth telling apart.
macro_rules! for_processors {
    ($($function:tt)*) => {
        #[multiversion::multiversion(targets(
            "x86_64+avx512f+avx512bw+avx512dq+avx512vl",
            "x86_64+avx2",
            "aarch64+neon"
        ))]
        $($function)*
    };
}
pub(super) use for_processors;
