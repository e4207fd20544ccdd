//! libtorch's two operations for loss scaling.
#![allow(unsafe_code)]

use tch::Tensor;
use torch_sys::C_tensor;

use crate::error::TorchError;
use crate::list::{Handles, List};
use crate::status::{Message, check};

unsafe extern "C" {
    fn drumline_amp_unscale(grads: List, found_inf: *mut C_tensor, inv_scale: *mut C_tensor) -> Message;
    fn drumline_amp_update_scale(
        scale: *mut C_tensor,
        growth_tracker: *mut C_tensor,
        found_inf: *mut C_tensor,
        growth: Growth,
    ) -> Message;
}

/// How a scale grows and shrinks. The layout is that of `Growth` in amp.cpp.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct Growth {
    pub(super) growth_factor: f64,
    pub(super) backoff_factor: f64,
    pub(super) growth_interval: i64,
}

/// Multiplies each gradient by `inv_scale`. `found_inf` becomes 1 if an element is infinite or NaN; otherwise it does
/// not change.
pub(super) fn unscale(grads: &[&Tensor], found_inf: &Tensor, inv_scale: &Tensor) -> Result<(), TorchError> {
    let grads = Handles::of(grads);
    let (found_inf, inv_scale) = (found_inf.as_ptr().cast_mut(), inv_scale.as_ptr().cast_mut());
    // SAFETY: all handles are valid for the call.
    check(unsafe { drumline_amp_unscale(grads.list(), found_inf, inv_scale) }, "cannot unscale gradients")
}

/// Updates the scale by PyTorch's rule, in one kernel.
pub(super) fn update_scale(
    scale: &Tensor,
    growth_tracker: &Tensor,
    found_inf: &Tensor,
    growth: Growth,
) -> Result<(), TorchError> {
    let [scale, growth_tracker, found_inf] =
        [scale, growth_tracker, found_inf].map(|tensor| tensor.as_ptr().cast_mut());
    // SAFETY: all handles are valid for the call.
    let message = unsafe { drumline_amp_update_scale(scale, growth_tracker, found_inf, growth) };
    check(message, "cannot update the loss scale")
}
