//! What `drumline train` adds to the trainer.

use std::path::PathBuf;

use drumline::trainer::{Callback, CallbackResult, MasterCallback, PlainWords, TrainState};

use crate::config::Run;

/// Writes the resolved configuration, once nothing stands against the run: one that was refused leaves that of the run before alone.
pub(super) struct SaveConfig {
    pub(super) run: Run,
    pub(super) yaml: String,
}

impl MasterCallback for SaveConfig {
    fn on_train_begin(&mut self, _: &TrainState) -> CallbackResult {
        Ok(self.run.save(&self.yaml).map(drop)?)
    }
}

/// Asks for an evaluation of the last model, also where it is evaluated every so many steps. One that was made at this step is not made again.
pub(super) struct EvaluateLast;

impl EvaluateLast {
    fn ask(state: &mut TrainState) {
        // Within an epoch that ends with this step its end asks.
        if state.step_in_epoch() == 0 && state.step() >= state.total_steps() {
            state.request_validation();
        }
    }
}

impl Callback for EvaluateLast {
    /// A run that was stopped meanwhile.
    fn on_train_begin(&mut self, state: &mut TrainState) -> CallbackResult {
        Self::ask(state);
        Ok(())
    }

    fn on_epoch_end(&mut self, state: &mut TrainState) -> CallbackResult {
        Self::ask(state);
        Ok(())
    }
}

/// Ends the run when the loss is no number, before the weights are touched; found by every rank in the same numbers.
pub(super) struct FiniteLoss {
    pub(super) out_dir: PathBuf,
    /// What to try.
    pub(super) calmer: &'static str,
}

impl Callback for FiniteLoss {
    fn on_backward_end(&mut self, state: &mut TrainState) -> CallbackResult {
        if state.loss().is_finite() {
            return Ok(());
        }
        let kept = match state.saved_at() {
            Some(step) => {
                format!("the checkpoint after step {step} is kept in {}", self.out_dir.display())
            }
            None => "no checkpoint was written yet".to_owned(),
        };
        let (loss, lr, step, epoch) = (state.loss(), state.lr(), state.step() + 1, state.epoch() + 1);
        let (batch, batches) = (state.step_in_epoch() + 1, state.steps_per_epoch());
        Err(PlainWords(format!(
            "the loss is {loss} at step {step} (epoch {epoch}, batch {batch} of {batches}, lr {lr}); {kept}; \
             try {}",
            self.calmer
        ))
        .into())
    }
}
