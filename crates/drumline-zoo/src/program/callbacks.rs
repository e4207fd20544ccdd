//! What `drumline train` adds to the trainer.

use drumline::trainer::{Callback, CallbackResult, MasterCallback, PlainWords, TrainState};

use crate::config::Config;

/// Writes the resolved configuration, once nothing stands against the run: one that was refused leaves that of the run before alone.
pub(super) struct SaveConfig(pub(super) Config);

impl MasterCallback for SaveConfig {
    fn on_train_begin(&mut self, _: &TrainState) -> CallbackResult {
        Ok(self.0.save().map(drop)?)
    }
}

/// Ends the run when the loss is no number, before the weights are touched; found by every rank in the same numbers.
pub(super) struct FiniteLoss(pub(super) Config);

impl Callback for FiniteLoss {
    fn on_backward_end(&mut self, state: &mut TrainState) -> CallbackResult {
        if state.loss().is_finite() {
            return Ok(());
        }
        let kept = match state.saved_at() {
            Some(step) => {
                format!("the checkpoint after step {step} is kept in {}", self.0.run.out_dir.display())
            }
            None => "no checkpoint was written yet".to_owned(),
        };
        let (loss, lr, step, epoch) = (state.loss(), state.lr(), state.step() + 1, state.epoch() + 1);
        let (batch, batches) = (state.step_in_epoch() + 1, state.steps_per_epoch());
        Err(PlainWords(format!(
            "the loss is {loss} at step {step} (epoch {epoch}, batch {batch} of {batches}, lr {lr}); {kept}; \
             try a smaller OPTIM.BASE_LR or more OPTIM.WARMUP_EPOCHS"
        ))
        .into())
    }
}
