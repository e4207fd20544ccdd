//! The sums for the backward of batch normalisation, in one pass over the data.
#![allow(unsafe_code)]

use tch::Tensor;
use torch_sys::C_tensor;

use crate::error::TorchError;
use crate::status::{Message, check};

unsafe extern "C" {
    fn drumline_batch_norm_sums(
        grad: *mut C_tensor,
        input: *mut C_tensor,
        mean: *mut C_tensor,
        invstd: *mut C_tensor,
        by_weight: *mut *mut C_tensor,
        by_bias: *mut *mut C_tensor,
    ) -> Message;
}

/// Returns for each channel (dim 1) the sum of `grad * (input - mean) * invstd` and the sum of `grad`. They are the
/// gradients of weight and bias.
///
/// ```
/// use drumline_torch::batch_norm_sums;
/// use tch::Tensor;
///
/// let x = Tensor::from_slice2(&[[1f32, 2.0], [3.0, 6.0]]);
/// let grad = Tensor::from_slice2(&[[1f32, 1.0], [2.0, 3.0]]);
/// let (mean, invstd) = (Tensor::from_slice(&[2f32, 4.0]), Tensor::from_slice(&[1f32, 0.5]));
/// let (by_weight, by_bias) = batch_norm_sums(&grad, &x, &mean, &invstd)?;
/// assert_eq!(by_weight, Tensor::from_slice(&[1f32, 2.0]));
/// assert_eq!(by_bias, Tensor::from_slice(&[3f32, 4.0]));
/// # Ok::<(), drumline_torch::TorchError>(())
/// ```
pub fn batch_norm_sums(
    grad: &Tensor,
    input: &Tensor,
    mean: &Tensor,
    invstd: &Tensor,
) -> Result<(Tensor, Tensor), TorchError> {
    let [grad, input, mean, invstd] = [grad, input, mean, invstd].map(|tensor| tensor.as_ptr().cast_mut());
    let (mut by_weight, mut by_bias) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: all handles are valid for the call; the results are new handles that we own.
    unsafe {
        let message = drumline_batch_norm_sums(grad, input, mean, invstd, &mut by_weight, &mut by_bias);
        check(message, "cannot sum the gradients of a batch normalisation")?;
        Ok((Tensor::from_ptr(by_weight), Tensor::from_ptr(by_bias)))
    }
}
