//! Tensors over the symmetric heap, and tensors within tensors.
#![allow(unsafe_code)]

use std::ffi::c_void;

use drumline_comm::{Element, ProcessGroup};
use tch::Tensor;
use torch_sys::C_tensor;

use crate::error::TorchError;
use crate::status::{Closure, Message, check};

unsafe extern "C" {
    fn drumline_tensor_over(
        data: *mut c_void,
        sizes: *const i64,
        dims: usize,
        kind: i8,
        owner: Closure,
        out: *mut *mut C_tensor,
    ) -> Message;
    fn drumline_tensor_within(
        flat: *mut C_tensor,
        offset: i64,
        like: *mut C_tensor,
        out: *mut *mut C_tensor,
    ) -> Message;
}

/// A tensor of one dimension in the symmetric heap: the ranks of a node reduce it without copies.
///
/// The memory lives until the last tensor over it is gone, also after this.
#[derive(Debug)]
pub struct HeapTensor {
    tensor: Tensor,
}

// SAFETY: a handle of libtorch may be used on another thread; its count is atomic.
unsafe impl Sync for HeapTensor {}

impl HeapTensor {
    /// Zeros, made by all ranks of the group together.
    pub fn zeros<T: Element + tch::kind::Element>(
        group: &ProcessGroup,
        len: usize,
    ) -> Result<Self, TorchError> {
        let mut buffer = group.heap_alloc::<T>(len)?;
        let data = buffer.as_mut_ptr();
        // SAFETY: the memory has `len` elements and lives as long as the buffer, which the tensor keeps.
        let tensor = unsafe { tensor_over(data, &[len as i64], Closure::keeping(buffer)) }?;
        Ok(Self { tensor })
    }

    /// The tensor.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }
}

/// A tensor over a vector's memory, without a copy.
///
/// ```
/// let image = drumline_torch::tensor_from_vec(vec![1u8, 2, 3, 4, 5, 6], &[2, 3])?;
/// assert_eq!(image.size(), [2, 3]);
/// assert!(drumline_torch::tensor_from_vec(vec![1f32], &[2]).is_err());
/// # Ok::<(), drumline_torch::TorchError>(())
/// ```
pub fn tensor_from_vec<T: tch::kind::Element + Send + 'static>(
    mut elements: Vec<T>,
    sizes: &[i64],
) -> Result<Tensor, TorchError> {
    if sizes.iter().product::<i64>() != elements.len() as i64 || sizes.iter().any(|size| *size < 0) {
        return Err(TorchError::Unfit(format!(
            "{} elements do not make a tensor of {sizes:?}",
            elements.len()
        )));
    }
    let data = elements.as_mut_ptr();
    // SAFETY: the vector has that many elements, stays where it is, and is kept by the tensor.
    unsafe { tensor_over(data, sizes, Closure::keeping(elements)) }
}

/// # Safety
/// `data` holds the elements of `sizes`, and they live until `owner` is dropped.
unsafe fn tensor_over<T: tch::kind::Element>(
    data: *mut T,
    sizes: &[i64],
    owner: Closure,
) -> Result<Tensor, TorchError> {
    let (mut out, kind) = (std::ptr::null_mut(), T::KIND as i8);
    // SAFETY: passed on to the caller; what comes back is a new handle, ours.
    unsafe {
        let message = drumline_tensor_over(data.cast(), sizes.as_ptr(), sizes.len(), kind, owner, &mut out);
        check(message, "cannot make a tensor over memory")?;
        Ok(Tensor::from_ptr(out))
    }
}

/// A tensor of `like`'s sizes and strides within `flat`, from `offset` elements on: the same memory, but no view for autograd.
pub fn tensor_within(flat: &Tensor, offset: usize, like: &Tensor) -> Result<Tensor, TorchError> {
    let mut out = std::ptr::null_mut();
    // SAFETY: the handles are good for the call; libtorch checks that the tensor lies within the storage.
    unsafe {
        let (flat, like) = (flat.as_ptr().cast_mut(), like.as_ptr().cast_mut());
        check(
            drumline_tensor_within(flat, offset as i64, like, &mut out),
            "cannot make a tensor within another",
        )?;
        Ok(Tensor::from_ptr(out))
    }
}
