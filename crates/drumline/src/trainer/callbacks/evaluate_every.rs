//! Evaluation after every n-th step.

use crate::trainer::callback::{Callback, CallbackResult};
use crate::trainer::settings::Every;
use crate::trainer::state::TrainState;

/// Evaluates after every n-th step, in addition to the trainer's `validate_every`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EvaluateEvery {
    every: Every,
}

impl EvaluateEvery {
    /// Evaluates after every `steps` steps.
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
