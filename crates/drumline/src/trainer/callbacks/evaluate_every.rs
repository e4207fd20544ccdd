//! Evaluation every so many steps.

use crate::trainer::callback::{Callback, CallbackResult};
use crate::trainer::settings::Every;
use crate::trainer::state::TrainState;

/// Evaluates after each n-th step, beside what the trainer's `validate_every` says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EvaluateEvery {
    every: Every,
}

impl EvaluateEvery {
    /// After this many steps.
    pub fn steps(steps: u64) -> Self {
        Self { every: Every::Steps(steps) }
    }
}

impl Callback for EvaluateEvery {
    fn on_train_begin(&mut self, _: &mut TrainState) -> CallbackResult {
        self.every.check("an evaluation")
    }

    fn on_batch_end(&mut self, state: &mut TrainState) -> CallbackResult {
        if self.every.is_at_step(state.step()) {
            state.request_validation();
        }
        Ok(())
    }
}
