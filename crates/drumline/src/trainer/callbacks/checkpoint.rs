//! Checkpoints at intervals, and how many are kept.

use crate::trainer::callback::{Callback, CallbackResult};
use crate::trainer::settings::Every;
use crate::trainer::state::TrainState;

/// Saves checkpoints at intervals in the trainer's `save_path`. The best model and the final state are also saved
/// without it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Checkpoint {
    every: Every,
    keep_last: Option<usize>,
    keep_best: Option<usize>,
}

impl Checkpoint {
    /// Saves after this many steps or epochs.
    pub fn every(every: Every) -> Self {
        Self { every, keep_last: None, keep_best: None }
    }

    /// How many are kept, besides the best; default 2.
    #[must_use]
    pub fn keep_last(self, num: usize) -> Self {
        Self { keep_last: Some(num), ..self }
    }

    /// How many are kept as the best, like NJUNMT's `num_kept_best_model`; default 1. They are linked as `best`,
    /// `best-2`, …
    #[must_use]
    pub fn keep_best(self, num: usize) -> Self {
        Self { keep_best: Some(num), ..self }
    }
}

impl Callback for Checkpoint {
    fn on_train_begin(&mut self, state: &mut TrainState) -> CallbackResult {
        if !state.has_save_path() {
            return Err("there is no folder to save in; try .save_path(\"save\")".into());
        }
        self.every.check("a checkpoint")?;
        for (name, num) in [("keep_last", self.keep_last), ("keep_best", self.keep_best)] {
            if num == Some(0) {
                return Err(format!("{name} is 0, expected at least 1").into());
            }
        }
        if let Some(num) = self.keep_last {
            state.keep_last_checkpoints(num);
        }
        if let Some(num) = self.keep_best {
            state.keep_best_checkpoints(num);
        }
        Ok(())
    }

    fn on_batch_end(&mut self, state: &mut TrainState) -> CallbackResult {
        if self.every.is_at_step(state.step()) {
            state.request_checkpoint();
        }
        Ok(())
    }

    fn on_epoch_end(&mut self, state: &mut TrainState) -> CallbackResult {
        if self.every.is_at_epoch(state.epoch()) {
            state.request_checkpoint();
        }
        Ok(())
    }
}
