//! Gradients within bounds.

use drumline_torch::{Named, TorchError, clip_grad_value};

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
    /// Clips, by a norm with `by_norm`; what that gives, the norm before.
    pub(in crate::trainer) fn apply<T>(
        &self,
        parameters: &[Named],
        by_norm: fn(&[Named], f64) -> Result<T, TorchError>,
    ) -> Result<Option<T>, TorchError> {
        match self.bound {
            Bound::Norm(max_norm) => by_norm(parameters, max_norm).map(Some),
            Bound::Value(max_value) => clip_grad_value(parameters, max_value).map(|()| None),
        }
    }
}

impl Callback for GradientClip {
    fn gradient_clip(&self) -> Option<GradientClip> {
        Some(*self)
    }
}
