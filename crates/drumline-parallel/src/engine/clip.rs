//! Gradient clipping.

/// How gradients are clipped before the optimizer steps.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Clip {
    /// By the norm of all gradients together, as PyTorch's `clip_grad_norm_`. A norm that is infinite or NaN is an
    /// error.
    Norm(f64),
    /// By value: each element is at most this far from zero, as PyTorch's `clip_grad_value_`.
    Value(f64),
}
