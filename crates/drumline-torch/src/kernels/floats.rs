//! Tensors as slices, and loops that are compiled for several instruction sets.
#![allow(unsafe_code)]

use half::bf16;
use tch::{Device, Kind, Tensor};

use crate::bytes::{bytes, bytes_mut};
use crate::error::TorchError;
use crate::fused::is_dense;

/// A type of elements for which any bits are a value.
pub(crate) trait Element: Copy {
    /// libtorch's name of it.
    const KIND: Kind;
}

macro_rules! elements_are {
    ($($element:ty = $kind:ident),+) => {$(
        impl Element for $element {
            const KIND: Kind = Kind::$kind;
        }
    )+};
}

elements_are!(f32 = Float, bf16 = BFloat16, i16 = Int16, u8 = Uint8);

/// The elements of a tensor in host memory that has no gaps, in the order of memory.
pub(crate) fn elements<T: Element>(tensor: &Tensor) -> Result<&[T], TorchError> {
    if check_elements::<T>(tensor)? == 0 {
        return Ok(&[]);
    }
    // SAFETY: there are that many elements without gaps, which live as long as the handle; libtorch aligns its memory.
    Ok(unsafe { std::slice::from_raw_parts(tensor.data_ptr().cast::<T>(), tensor.numel()) })
}

/// The same, for writing. While they are borrowed, nothing may use the memory through another handle.
pub(crate) fn elements_mut<T: Element>(tensor: &mut Tensor) -> Result<&mut [T], TorchError> {
    if check_elements::<T>(tensor)? == 0 {
        return Ok(&mut []);
    }
    // SAFETY: as above; the borrow is unique.
    Ok(unsafe { std::slice::from_raw_parts_mut(tensor.data_ptr().cast::<T>(), tensor.numel()) })
}

/// How many elements of this type a tensor has, if a slice can be made of them.
fn check_elements<T: Element>(tensor: &Tensor) -> Result<usize, TorchError> {
    let is_aligned = (tensor.data_ptr() as usize).is_multiple_of(align_of::<T>());
    if tensor.device() != Device::Cpu || tensor.kind() != T::KIND || !is_dense(tensor)? || !is_aligned {
        return Err(TorchError::Unsupported {
            operation: "use a tensor's memory in an optimizer",
            reason: "it is on a GPU, of another kind, or has gaps",
        });
    }
    Ok(tensor.numel())
}

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
