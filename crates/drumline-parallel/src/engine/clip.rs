//! Gradient clipping.

use drumline_torch::{Named, clip_grad_norm, clip_grad_norm_on_device, clip_grad_value};
use tch::Tensor;

use super::Result;

/// How gradients are clipped before the optimizer steps.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Clip {
    /// By the norm of all gradients together, as PyTorch's `clip_grad_norm_`. A norm that is infinite or NaN is an
    /// error.
    Norm(f64),
    /// By value: each element is at most this far from zero, as PyTorch's `clip_grad_value_`.
    Value(f64),
}

impl Clip {
    /// Clips gradients that are not sharded.
    pub(super) fn apply(self, parameters: &[Named]) -> Result<Option<f64>> {
        match self {
            Self::Norm(max_norm) => Ok(Some(clip_grad_norm(parameters, max_norm)?)),
            Self::Value(max_value) => Ok(clip_grad_value(parameters, max_value).map(|()| None)?),
        }
    }

    /// The same, with a norm that stays on the device.
    pub(super) fn apply_on_device(self, parameters: &[Named]) -> Result<Option<Tensor>> {
        match self {
            Self::Norm(max_norm) => Ok(Some(clip_grad_norm_on_device(parameters, max_norm)?)),
            Self::Value(max_value) => Ok(clip_grad_value(parameters, max_value).map(|()| None)?),
        }
    }
}
