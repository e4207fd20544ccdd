//! Callbacks that end a training before the last epoch.

use std::time::Duration;

use serde_json::Value;

use crate::trainer::callback::{Callback, CallbackResult};
use crate::trainer::state::{Evaluation, TrainState};

/// Stops after several evaluations in a row without improvement. Evaluations that did not measure the metric do not
/// count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EarlyStop {
    patience: u64,
    waited: u64,
}

impl EarlyStop {
    /// Stops after `patience` evaluations without improvement.
    pub fn patience(patience: u64) -> Self {
        Self { patience, waited: 0 }
    }
}

impl Callback for EarlyStop {
    fn on_train_begin(&mut self, state: &mut TrainState) -> CallbackResult {
        if self.patience == 0 {
            return Err("patience is 0, expected at least 1 evaluation".into());
        }
        // A training that has stopped early is over: when its checkpoint is resumed, it must not train another epoch.
        if self.waited >= self.patience {
            state.request_early_stop(format!(
                "early stop: no better metric in {} evaluations before the checkpoint",
                self.waited
            ));
        }
        Ok(())
    }

    fn on_valid_end(&mut self, state: &mut TrainState, evaluation: &Evaluation) -> CallbackResult {
        if evaluation.metric(&evaluation.metric_key).is_none() {
            return Ok(());
        }
        self.waited = if evaluation.is_better { 0 } else { self.waited + 1 };
        if self.waited >= self.patience {
            let (key, waited) = (&evaluation.metric_key, self.waited);
            state.request_early_stop(format!("early stop: no better {key} in {waited} evaluations"));
        }
        Ok(())
    }

    fn state(&self) -> Value {
        self.waited.into()
    }

    fn load_state(&mut self, state: &Value) -> CallbackResult {
        self.waited =
            state.as_u64().ok_or_else(|| format!("expected a count of evaluations, got {state}"))?;
        Ok(())
    }
}

/// Stops, with a checkpoint, when the training has taken this long. The time before a resume does not count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TimeLimit {
    longest: Duration,
}

impl TimeLimit {
    /// Stops after this time. The current step is completed.
    pub fn new(longest: Duration) -> Self {
        Self { longest }
    }
}

impl Callback for TimeLimit {
    fn on_batch_end(&mut self, state: &mut TrainState) -> CallbackResult {
        // Clocks differ between ranks. One request is enough.
        if state.elapsed() >= self.longest {
            state.request_stop(format!("time limit: {:?}", self.longest));
        }
        Ok(())
    }
}
