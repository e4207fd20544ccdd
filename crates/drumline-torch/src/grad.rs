//! The gradient of a leaf: read, set, take.
//!
//! tch's `Tensor::grad` returns an undefined tensor if there is no gradient; here that is `None`.
#![allow(unsafe_code)]

use std::slice::{from_raw_parts, from_raw_parts_mut};

use tch::Tensor;
use torch_sys::C_tensor;

use crate::error::TorchError;
use crate::foreach::foreach_copy;
use crate::list::{Handles, List};
use crate::status::{Message, check};

unsafe extern "C" {
    fn drumline_grad_set(leaf: *mut C_tensor, grad: *mut C_tensor) -> Message;
    fn drumline_grads_are(leaves: List, grads: List, are: *mut bool) -> Message;
    fn drumline_grad_take(leaf: *mut C_tensor, grad: *mut *mut C_tensor) -> Message;
    fn drumline_grad_into(
        leaf: *mut C_tensor,
        place: *mut C_tensor,
        copy: unsafe extern "C" fn(*mut u8, *const u8, usize),
        had_one: *mut bool,
    ) -> Message;
    fn drumline_tensor_written(tensor: *mut C_tensor) -> Message;
    fn drumline_grad_get(leaf: *mut C_tensor, grad: *mut *mut C_tensor) -> Message;
}

/// The leaf's gradient, if it has one. It is the same memory, not a copy.
pub fn grad(leaf: &Tensor) -> Result<Option<Tensor>, TorchError> {
    let mut grad = std::ptr::null_mut();
    // SAFETY: both pointers are valid for the call; the result is null or a new handle that we own.
    unsafe {
        check(drumline_grad_get(leaf.as_ptr().cast_mut(), &mut grad), "cannot read a gradient")?;
        Ok((!grad.is_null()).then(|| Tensor::from_ptr(grad)))
    }
}

/// Reports to autograd that the tensor's memory was written without an operation of libtorch.
pub(crate) fn mark_written(tensor: &Tensor) -> Result<(), TorchError> {
    // SAFETY: the handle is valid for the call.
    let message = unsafe { drumline_tensor_written(tensor.as_ptr().cast_mut()) };
    check(message, "cannot report a write to autograd")
}

/// Makes `to` the leaf's gradient, without a copy. `None` makes the gradient undefined.
///
/// ```
/// use drumline_torch::{set_grad, take_grad};
/// use tch::{Kind, Tensor};
///
/// let weight = Tensor::ones([2], (Kind::Float, tch::Device::Cpu)).set_requires_grad(true);
/// set_grad(&weight, Some(&Tensor::from_slice(&[3f32, 4.0])))?;
/// assert_eq!(Vec::<f32>::try_from(weight.grad())?, [3.0, 4.0]);
/// assert!(take_grad(&weight)?.is_some());
/// assert!(!weight.grad().defined());
/// # Ok::<(), anyhow::Error>(())
/// ```
pub fn set_grad(leaf: &Tensor, to: Option<&Tensor>) -> Result<(), TorchError> {
    let grad = to.map_or(std::ptr::null_mut(), |grad| grad.as_ptr().cast_mut());
    // SAFETY: both handles are valid for the call.
    check(unsafe { drumline_grad_set(leaf.as_ptr().cast_mut(), grad) }, "cannot set a gradient")
}

/// Whether each leaf has exactly this gradient, the same tensor, or no gradient where there is `None`.
pub fn grads_are<'a>(
    leaves: impl IntoIterator<Item = &'a Tensor>,
    grads: &[Option<Tensor>],
) -> Result<bool, TorchError> {
    let (leaves, grads) =
        (Handles::of_each(leaves.into_iter().map(Some)), Handles::of_each(grads.iter().map(Option::as_ref)));
    if leaves.len() != grads.len() {
        return Ok(false);
    }
    let mut are = false;
    // SAFETY: the lists have the same length and are valid for the call, which writes one bool.
    check(unsafe { drumline_grads_are(leaves.list(), grads.list(), &mut are) }, "cannot compare gradients")?;
    Ok(are)
}

/// Removes the leaf's gradient and returns it.
pub fn take_grad(leaf: &Tensor) -> Result<Option<Tensor>, TorchError> {
    let mut grad = std::ptr::null_mut();
    // SAFETY: as in `grad`.
    unsafe {
        check(drumline_grad_take(leaf.as_ptr().cast_mut(), &mut grad), "cannot take a gradient")?;
        Ok((!grad.is_null()).then(|| Tensor::from_ptr(grad)))
    }
}

/// Moves the leaf's gradient to `place`, a tensor of the same sizes, and makes that its gradient. Nothing is copied if
/// it is there already. Returns whether there was a gradient; if not, nothing changes.
pub fn move_grad(leaf: &Tensor, place: &Tensor) -> Result<bool, TorchError> {
    let mut had_one = false;
    let (leaf, place) = (leaf.as_ptr().cast_mut(), place.as_ptr().cast_mut());
    // SAFETY: both handles are valid for the call, which writes one bool.
    check(unsafe { drumline_grad_into(leaf, place, copy, &mut had_one) }, "cannot move a gradient")?;
    Ok(had_one)
}

/// Like [`move_grad`] for each leaf and its place; on a GPU in a few kernels on the current stream. A leaf without a
/// gradient does not change.
pub fn move_grads(leaves: &[&Tensor], places: &[&Tensor]) -> Result<(), TorchError> {
    let (mut held, mut to) = (Vec::new(), Vec::new());
    for (leaf, place) in leaves.iter().zip(places) {
        match grad(leaf)? {
            // A sparse gradient, or one that is already there.
            Some(gradient) if gradient.is_sparse() || gradient.data_ptr() == place.data_ptr() => {
                move_grad(leaf, place)?;
            }
            Some(gradient) => {
                held.push(gradient);
                to.push((*leaf, *place));
            }
            None => {}
        }
    }
    let places: Vec<&Tensor> = to.iter().map(|(_, place)| *place).collect();
    foreach_copy(&places, &held.iter().collect::<Vec<_>>())?;
    to.iter().try_for_each(|(leaf, place)| set_grad(leaf, Some(place)))
}

/// A gradient of at least this many bytes is written past the caches: later gradients would evict it before it is read.
const LARGE: usize = 64 << 10;

/// # Safety
/// Both pointers are valid for `bytes` bytes that do not overlap.
unsafe extern "C" fn copy(to: *mut u8, from: *const u8, bytes: usize) {
    if bytes == 0 {
        return; // Tensors without elements may have null pointers.
    }
    // SAFETY: the caller's promise.
    let (to, from) = unsafe { (from_raw_parts_mut(to, bytes), from_raw_parts(from, bytes)) };
    if bytes < LARGE { to.copy_from_slice(from) } else { drumline_comm::copy_past_caches(to, from) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::{Device, Kind};

    #[test]
    fn gradients_are_compared_as_tensors_and_not_by_value() {
        let ones = || Tensor::ones([2], (Kind::Float, Device::Cpu));
        let leaves = [ones().set_requires_grad(true), ones().set_requires_grad(true)];
        let gradient = ones();
        let are = |grads: &[Option<Tensor>]| grads_are(&leaves, grads).unwrap();
        assert!(are(&[None, None]) && !are(&[Some(ones()), None]));
        set_grad(&leaves[0], Some(&gradient)).unwrap();
        assert!(are(&[Some(gradient.shallow_clone()), None]));
        assert!(!are(&[Some(gradient.copy()), None]) && !are(&[None, None]) && !are(&[None]));
    }

    #[test]
    fn gradients_move_together_and_leaves_without_one_do_not_change() {
        let leaf = || Tensor::ones([2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let (a, b, without) = (leaf(), leaf(), leaf());
        (&a * 3 + &b * 5).sum(Kind::Float).backward();
        let flat = Tensor::zeros([3, 2], (Kind::Float, Device::Cpu));
        let places: Vec<Tensor> = (0..3).map(|row| flat.get(row)).collect();
        let (leaves, places): ([&Tensor; 3], Vec<&Tensor>) = ([&a, &b, &without], places.iter().collect());
        for _ in 0..2 {
            move_grads(&leaves, &places).unwrap();
            assert_eq!(Vec::<f32>::try_from(flat.view([-1])).unwrap(), [3.0, 3.0, 5.0, 5.0, 0.0, 0.0]);
            assert_eq!(a.grad().data_ptr(), places[0].data_ptr());
            assert!(grad(&without).unwrap().is_none());
        }
    }
}
