//! One operation on each tensor of a list: libtorch's `_foreach_*`, in place and without autograd.
//!
//! On a GPU a list takes a few kernels instead of one or more for each tensor. On a CPU it is a loop.
#![allow(unsafe_code)]

use tch::Tensor;
use torch_sys::C_tensor;

use crate::error::TorchError;
use crate::list::{Handles, List};
use crate::status::{Message, check};

unsafe extern "C" {
    fn drumline_foreach_add_scalar(list: List, scalar: f64) -> Message;
    fn drumline_foreach_add(list: List, other: List, alpha: f64) -> Message;
    fn drumline_foreach_mul_scalar(list: List, scalar: f64) -> Message;
    fn drumline_foreach_mul_tensor(list: List, number: *mut C_tensor) -> Message;
    fn drumline_foreach_clamp(list: List, min: f64, max: f64) -> Message;
    fn drumline_foreach_copy(list: List, source: List) -> Message;
    fn drumline_foreach_lerp(list: List, end: List, weight: f64) -> Message;
    fn drumline_foreach_zero(list: List) -> Message;
    fn drumline_foreach_norm(list: List, ord: f64, norms: *mut *mut C_tensor) -> Message;
}

/// Adds `scalar` to each tensor.
pub fn foreach_add_scalar(list: &[&Tensor], scalar: f64) -> Result<(), TorchError> {
    let list = Handles::of(list);
    // SAFETY: the handles are valid for the call.
    check(unsafe { drumline_foreach_add_scalar(list.list(), scalar) }, "cannot add a number to tensors")
}

/// Adds `alpha` times the corresponding tensor of `other` to each tensor.
///
/// ```
/// use drumline_torch::foreach_add;
/// use tch::Tensor;
///
/// let (a, b) = (Tensor::from_slice(&[1f32, 2.0]), Tensor::from_slice(&[3f32]));
/// foreach_add(&[&a, &b], &[&Tensor::from_slice(&[10f32, 20.0]), &Tensor::from_slice(&[30f32])], 0.5)?;
/// assert_eq!(Vec::<f32>::try_from(&a)?, [6.0, 12.0]);
/// assert_eq!(Vec::<f32>::try_from(&b)?, [18.0]);
/// # Ok::<(), anyhow::Error>(())
/// ```
pub fn foreach_add(list: &[&Tensor], other: &[&Tensor], alpha: f64) -> Result<(), TorchError> {
    let (list, other) = (Handles::of(list), Handles::of(other));
    // SAFETY: the handles are valid for the call; libtorch compares the lengths.
    check(unsafe { drumline_foreach_add(list.list(), other.list(), alpha) }, "cannot add tensors to tensors")
}

/// Multiplies each tensor by `scalar`.
pub fn foreach_mul_scalar(list: &[&Tensor], scalar: f64) -> Result<(), TorchError> {
    let list = Handles::of(list);
    // SAFETY: the handles are valid for the call.
    check(unsafe { drumline_foreach_mul_scalar(list.list(), scalar) }, "cannot multiply tensors by a number")
}

/// Multiplies each tensor by a tensor of one element on the same device, without waiting for its value.
pub fn foreach_mul_tensor(list: &[&Tensor], number: &Tensor) -> Result<(), TorchError> {
    let list = Handles::of(list);
    // SAFETY: the handles are valid for the call.
    let message = unsafe { drumline_foreach_mul_tensor(list.list(), number.as_ptr().cast_mut()) };
    check(message, "cannot multiply tensors by a tensor")
}

/// Clamps the elements of each tensor to the range from `min` to `max`.
pub fn foreach_clamp(list: &[&Tensor], min: f64, max: f64) -> Result<(), TorchError> {
    let list = Handles::of(list);
    // SAFETY: the handles are valid for the call.
    check(unsafe { drumline_foreach_clamp(list.list(), min, max) }, "cannot clamp tensors")
}

/// Copies the corresponding tensor of `source` into each tensor. Strides, kinds and devices may differ.
pub fn foreach_copy(list: &[&Tensor], source: &[&Tensor]) -> Result<(), TorchError> {
    let (list, source) = (Handles::of(list), Handles::of(source));
    // SAFETY: the handles are valid for the call; libtorch compares the lengths.
    check(unsafe { drumline_foreach_copy(list.list(), source.list()) }, "cannot copy tensors over tensors")
}

/// Interpolates each tensor towards the corresponding tensor of `end` by `weight`: a running average.
pub fn foreach_lerp(list: &[&Tensor], end: &[&Tensor], weight: f64) -> Result<(), TorchError> {
    let (list, end) = (Handles::of(list), Handles::of(end));
    // SAFETY: the handles are valid for the call; libtorch compares the lengths.
    check(unsafe { drumline_foreach_lerp(list.list(), end.list(), weight) }, "cannot interpolate tensors")
}

/// Fills each tensor with zeros.
pub fn foreach_zero(list: &[&Tensor]) -> Result<(), TorchError> {
    let list = Handles::of(list);
    // SAFETY: the handles are valid for the call.
    check(unsafe { drumline_foreach_zero(list.list()) }, "cannot fill tensors with zeros")
}

/// The norm of each tensor, as tensors without dimensions. `ord` is usually 2 or infinity.
pub fn foreach_norm(list: &[&Tensor], ord: f64) -> Result<Vec<Tensor>, TorchError> {
    let mut norms = vec![std::ptr::null_mut(); list.len()];
    let list = Handles::of(list);
    // SAFETY: the handles are valid for the call, and there is room for a handle for each.
    check(unsafe { drumline_foreach_norm(list.list(), ord, norms.as_mut_ptr()) }, "cannot take norms")?;
    // SAFETY: each is a new handle that we own.
    Ok(norms.into_iter().map(|norm| unsafe { Tensor::from_ptr(norm) }).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> [Tensor; 2] {
        [Tensor::from_slice(&[3f32, -4.0]), Tensor::from_slice(&[0f32, 5.0, 12.0]).view([3, 1])]
    }

    fn values(list: [&Tensor; 2]) -> Vec<f32> {
        list.iter().flat_map(|tensor| Vec::<f32>::try_from(tensor.flatten(0, -1)).unwrap()).collect()
    }

    #[test]
    fn each_operation_changes_each_tensor() {
        let [a, b] = &pair();
        let list = [a, b];
        let norms = |ord| -> Vec<f64> {
            foreach_norm(&list, ord).unwrap().iter().map(|norm| norm.double_value(&[])).collect()
        };
        assert_eq!(norms(2.0), [5.0, 13.0]);
        assert_eq!(norms(f64::INFINITY), [4.0, 12.0]);
        foreach_clamp(&list, -1.0, 6.0).unwrap();
        assert_eq!(values(list), [3.0, -1.0, 0.0, 5.0, 6.0]);
        foreach_mul_scalar(&list, 2.0).unwrap();
        foreach_add_scalar(&list, 1.0).unwrap();
        assert_eq!(values(list), [7.0, -1.0, 1.0, 11.0, 13.0]);
        foreach_mul_tensor(&list, &Tensor::from(0.5f32)).unwrap();
        foreach_mul_tensor(&list, &Tensor::from(2f32)).unwrap();
        assert_eq!(values(list), [7.0, -1.0, 1.0, 11.0, 13.0]);
        let [c, d] = &pair();
        foreach_lerp(&list, &[c, d], 0.5).unwrap();
        assert_eq!(values(list), [5.0, -2.5, 0.5, 8.0, 12.5]);
        foreach_copy(&list, &[c, d]).unwrap();
        assert_eq!(values(list), [3.0, -4.0, 0.0, 5.0, 12.0]);
        foreach_zero(&list).unwrap();
        assert_eq!(values(list), [0.0; 5]);
    }

    #[test]
    fn empty_lists_are_valid_and_unequal_lengths_are_errors() {
        assert!(foreach_norm(&[], 2.0).unwrap().is_empty());
        foreach_mul_scalar(&[], 2.0).unwrap();
        let [a, b] = &pair();
        let error = foreach_add(&[a, b], &[a], 1.0).unwrap_err().to_string();
        assert!(error.starts_with("cannot add tensors to tensors: "), "{error}");
    }

    #[test]
    fn autograd_does_not_record_changes_of_leaves() {
        let [a, b] = pair().map(|tensor| tensor.set_requires_grad(true));
        foreach_mul_scalar(&[&a, &b], 2.0).unwrap();
        assert!(a.is_leaf() && a.requires_grad());
        assert_eq!(values([&a, &b]), [6.0, -8.0, 0.0, 10.0, 24.0]);
    }
}
