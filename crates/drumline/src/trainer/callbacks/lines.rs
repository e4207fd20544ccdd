//! Plain lines about the training, as long as nobody shows it in a better way.

use std::io::{Write, stdout};

use crate::trainer::callback::{CallbackResult, MasterCallback};
use crate::trainer::state::{Evaluation, TrainState};

/// A line every so many steps, and one for each evaluation.
pub(crate) struct Lines {
    every: u64,
}

impl Lines {
    pub(crate) fn new(every: u64) -> Self {
        Self { every }
    }
}

/// A stdout that is gone ends nothing.
fn say(line: &str) {
    let _ = writeln!(stdout(), "{line}");
}

impl MasterCallback for Lines {
    fn on_train_begin(&mut self, state: &TrainState) -> CallbackResult {
        if let Some(step) = state.resumed_at() {
            say(&format!("[resume] == after step {step}, epoch {} ==", state.epoch()));
        }
        Ok(())
    }

    fn on_step_end(&mut self, state: &TrainState) -> CallbackResult {
        if state.step().is_multiple_of(self.every) {
            let (step, steps) = (state.step_in_epoch(), state.steps_per_epoch());
            say(&format!(
                "   == step: [{step:3}/{steps}] [{}/{}] | loss: {:.4} | lr: {:.6} | {:.1} samples/s",
                state.epoch() + 1,
                state.n_epochs(),
                state.loss(),
                state.lr(),
                state.samples_per_s()
            ));
        }
        Ok(())
    }

    fn on_valid_end(&mut self, state: &TrainState, evaluation: &Evaluation) -> CallbackResult {
        let metrics = evaluation.metrics.iter().map(|(name, value)| format!(" | {name}: {value:.4}"));
        let best = state.best().map_or(String::new(), |best| format!(" | best: {:.4}", best.metric));
        let (epoch, epochs, metrics) = (state.epoch(), state.n_epochs(), metrics.collect::<String>());
        say(&format!("   == eval: [{epoch}/{epochs}]{metrics}{best} | {} samples", evaluation.samples));
        Ok(())
    }
}
