//! Callbacks that `drumline train` adds to the trainer.

use std::path::PathBuf;

use drumline::trainer::{Callback, CallbackResult, MasterCallback, TrainState, UserError};

use crate::task::Task;

/// Writes the configuration, and the other files that the model needs, when training begins. All checks have passed by
/// then, so a run that was refused does not overwrite the files of an earlier run.
pub(super) struct SaveBeside<'t, T> {
    pub(super) task: &'t T,
    /// Whether the run is new. A resumed run keeps the files that it started with.
    pub(super) is_new: bool,
}

impl<T: Task> MasterCallback for SaveBeside<'_, T> {
    fn on_train_begin(&mut self, _: &TrainState) -> CallbackResult {
        self.task.save_beside(self.is_new)
    }
}

/// Requests an evaluation of the final model, also when evaluations run every N steps. The trainer skips the request if
/// it has already evaluated at this step.
pub(super) struct EvaluateLast;

impl EvaluateLast {
    fn ask(state: &mut TrainState) {
        // In the middle of an epoch, `on_epoch_end` follows and makes the request.
        if state.step_in_epoch() == 0 && state.step() >= state.total_steps() {
            state.request_validation();
        }
    }
}

impl Callback for EvaluateLast {
    /// A resumed run may have been stopped between its last step and the evaluation.
    fn on_train_begin(&mut self, state: &mut TrainState) -> CallbackResult {
        Self::ask(state);
        Ok(())
    }

    fn on_epoch_end(&mut self, state: &mut TrainState) -> CallbackResult {
        Self::ask(state);
        Ok(())
    }
}

/// Stops the run when the loss is NaN or infinite, before the optimizer updates the weights. Every rank sees the same
/// loss, so all ranks stop together.
pub(super) struct FiniteLoss {
    pub(super) folder: PathBuf,
    /// The settings to try.
    pub(super) nan_advice: &'static str,
}

impl Callback for FiniteLoss {
    fn on_backward_end(&mut self, state: &mut TrainState) -> CallbackResult {
        if state.loss().is_finite() {
            return Ok(());
        }
        let checkpoint = match state.saved_at() {
            Some(step) => {
                format!("the checkpoint after step {step} is kept in {}", self.folder.display())
            }
            None => "no checkpoint was written yet".to_owned(),
        };
        let (loss, lr, step, epoch) = (state.loss(), state.lr(), state.step() + 1, state.epoch() + 1);
        let (batch, batches) = (state.step_in_epoch() + 1, state.steps_per_epoch());
        Err(UserError(format!(
            "the loss is {loss} at step {step} (epoch {epoch}, batch {batch} of {batches}, lr {lr}); {checkpoint}; \
             try {}",
            self.nan_advice
        ))
        .into())
    }
}
