//! Gradients within bounds.

use drumline_torch::{clip_grad_norm, clip_grad_value};

use crate::trainer::callback::{Callback, CallbackResult};
use crate::trainer::state::TrainState;

/// Clips the gradients of all ranks before each step: the same on all of them.
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

impl Callback for GradientClip {
    fn on_backward_end(&mut self, state: &mut TrainState) -> CallbackResult {
        if state.has_overflowed() {
            return Ok(()); // There is no norm, and no step.
        }
        match self.bound {
            Bound::Norm(max_norm) => drop(clip_grad_norm(state.parameters(), max_norm)?),
            Bound::Value(max_value) => clip_grad_value(state.parameters(), max_value)?,
        }
        Ok(())
    }
}
