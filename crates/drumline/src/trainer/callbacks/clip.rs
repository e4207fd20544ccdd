//! Gradients within bounds.

use drumline_torch::{Named, TorchError, clip_grad_norm, clip_grad_norm_on_device, clip_grad_value};
use tch::Tensor;

use crate::trainer::callback::Callback;

/// Clips the gradients of all ranks before each step: the same on all of them. The trainer does it before `on_backward_end`, in a CUDA graph with the
/// backward where there is one; the norm before that is a figure of the step, `grad_norm`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GradientClip {
    bound: Bound,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Bound {
    Norm(f64),
    Value(f64),
}

impl GradientClip {
    /// All gradients together have at most this norm. One that is no number ends the training before the weights are touched.
    pub fn norm(max_norm: f64) -> Self {
        Self { bound: Bound::Norm(max_norm) }
    }

    /// Each element is at most this far from zero.
    pub fn value(max_value: f64) -> Self {
        Self { bound: Bound::Value(max_value) }
    }
}

impl GradientClip {
    /// Clips; the norm before that, where it goes by it. One that is no number is an error that names the parameter.
    pub(in crate::trainer) fn apply(&self, parameters: &[Named]) -> Result<Option<f64>, TorchError> {
        Ok(match self.bound {
            Bound::Norm(max_norm) => Some(clip_grad_norm(parameters, max_norm)?),
            Bound::Value(max_value) => {
                clip_grad_value(parameters, max_value)?;
                None
            }
        })
    }

    /// The same without a wait for the device, so that it can be part of a graph. A norm that is no number leaves the gradients as they are.
    pub(in crate::trainer) fn apply_on_device(
        &self,
        parameters: &[Named],
    ) -> Result<Option<Tensor>, TorchError> {
        Ok(match self.bound {
            Bound::Norm(max_norm) => Some(clip_grad_norm_on_device(parameters, max_norm)?),
            Bound::Value(max_value) => {
                clip_grad_value(parameters, max_value)?;
                None
            }
        })
    }
}

impl Callback for GradientClip {
    fn gradient_clip(&self) -> Option<GradientClip> {
        Some(*self)
    }
}
