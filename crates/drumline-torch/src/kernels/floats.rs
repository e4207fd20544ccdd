//! Tensors as slices of floats, and loops that are compiled for several instruction sets.
#![allow(unsafe_code)]

use tch::{Device, Kind, Tensor};

use crate::bytes::{bytes, bytes_mut};
use crate::error::TorchError;

/// Whether [`floats`] accepts the tensor once it is contiguous.
pub(super) fn has_floats(tensor: &Tensor) -> bool {
    tensor.device() == Device::Cpu
        && tensor.kind() == Kind::Float
        && !tensor.is_sparse()
        && !tensor.is_mkldnn()
}

/// The elements of a contiguous tensor of floats.
pub(super) fn floats(tensor: &Tensor) -> Result<&[f32], TorchError> {
    expect_floats(tensor)?;
    // SAFETY: libtorch aligns its memory for its elements, and any bit pattern is a float.
    let (before, floats, after) = unsafe { bytes(tensor)?.align_to::<f32>() };
    aligned(before, floats, after)
}

/// The same, for writing.
pub(super) fn floats_mut(tensor: &mut Tensor) -> Result<&mut [f32], TorchError> {
    expect_floats(tensor)?;
    // SAFETY: as above.
    let (before, floats, after) = unsafe { bytes_mut(tensor)?.align_to_mut::<f32>() };
    aligned(before, floats, after)
}

fn expect_floats(tensor: &Tensor) -> Result<(), TorchError> {
    match tensor.f_kind()? {
        Kind::Float => Ok(()),
        other => Err(TorchError::Kind {
            what: "a tensor".to_owned(),
            expected: "Float".to_owned(),
            got: format!("{other:?}"),
        }),
    }
}

fn aligned<F, B: AsRef<[u8]>>(before: B, floats: F, after: B) -> Result<F, TorchError> {
    match (before.as_ref().len(), after.as_ref().len()) {
        (0, 0) => Ok(floats),
        _ => Err(TorchError::Unsupported {
            operation: "use a tensor's memory as floats",
            reason: "it is not aligned",
        }),
    }
}

/// Compiles a function for several instruction sets, of which the best one is chosen at run time.
macro_rules! for_instruction_sets {
    ($($function:tt)*) => {
        #[multiversion::multiversion(targets(
            "x86_64+avx512f+avx512bw+avx512dq+avx512vl",
            "x86_64+avx2",
            "aarch64+neon"
        ))]
        $($function)*
    };
}
pub(super) use for_instruction_sets;
