//! A learning rate that falls when evaluations no longer get better.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::trainer::callback::{Callback, CallbackResult};
use crate::trainer::metric::LOSS;
use crate::trainer::state::{Evaluation, TrainState};

/// Multiplies the learning rate when the loss of more than `patience` evaluations in a row was not below the smallest so far, as NJUNMT's `loss`
/// schedule. Another count begins then; the smallest loss stays.
///
/// It sets the learning rate by itself, and does not go with [`Warmup`](super::Warmup) or [`LearningRate`](super::LearningRate), which set that of each step.
///
/// ```
/// use drumline::trainer::ReduceOnPlateau;
///
/// // Halved at the third evaluation in a row that is no better, down to 1e-5; the first ten do not count.
/// let schedule = ReduceOnPlateau::patience(2).scale(0.5).min_lr(1e-5).warmup(10);
/// # let _ = schedule;
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct ReduceOnPlateau {
    patience: u64,
    scale: f64,
    min_lr: f64,
    warmup: u64,
    every: u64,
    seen: Seen,
}

/// What it has seen so far.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
struct Seen {
    /// The smallest loss after the warm-up.
    best: Option<f64>,
    /// Evaluations in a row that were no better.
    bad: u64,
    /// All evaluations.
    evaluations: u64,
}

impl ReduceOnPlateau {
    /// So many evaluations that are no better are borne.
    pub fn patience(evaluations: u64) -> Self {
        Self { patience: evaluations, scale: 0.5, min_lr: 0.0, warmup: 0, every: 1, seen: Seen::default() }
    }

    /// What the learning rate is multiplied by; 0.5, if it is not said.
    #[must_use]
    pub fn scale(self, scale: f64) -> Self {
        Self { scale, ..self }
    }

    /// It is not reduced below this; 0, if it is not said.
    #[must_use]
    pub fn min_lr(self, min_lr: f64) -> Self {
        Self { min_lr, ..self }
    }

    /// So many evaluations at the beginning of the training do not count.
    #[must_use]
    pub fn warmup(self, evaluations: u64) -> Self {
        Self { warmup: evaluations, ..self }
    }

    /// Only evaluations after each n-th step count, where others are made for other reasons; all, if it is not said.
    #[must_use]
    pub fn every(self, steps: u64) -> Self {
        Self { every: steps.max(1), ..self }
    }

    /// The learning rate after an evaluation.
    fn after(&mut self, loss: f64, lr: f64) -> f64 {
        self.seen.evaluations += 1;
        if self.seen.evaluations <= self.warmup {
            return lr;
        }
        // A loss that is no number is no better than any.
        if loss < self.seen.best.unwrap_or(f64::INFINITY) {
            (self.seen.best, self.seen.bad) = (Some(loss), 0);
            return lr;
        }
        self.seen.bad += 1;
        if self.seen.bad <= self.patience {
            return lr;
        }
        self.seen.bad = 0;
        (lr * self.scale).max(self.min_lr.min(lr))
    }
}

impl Callback for ReduceOnPlateau {
    fn on_train_begin(&mut self, _state: &mut TrainState) -> CallbackResult {
        let Self { scale, min_lr, .. } = *self;
        if !(scale > 0.0 && scale < 1.0) {
            return Err(format!("scale is {scale}, expected a number between 0 and 1; try 0.5").into());
        }
        match min_lr >= 0.0 {
            true => Ok(()),
            false => Err(format!("min_lr is {min_lr}, expected 0 or more").into()),
        }
    }

    fn on_valid_end(&mut self, state: &mut TrainState, evaluation: &Evaluation) -> CallbackResult {
        if !evaluation.step.is_multiple_of(self.every) {
            return Ok(());
        }
        let (before, loss) = (state.lr(), evaluation.metric(LOSS).unwrap_or(f64::NAN));
        let lr = self.after(loss, before);
        if lr != before {
            tracing::info!("the loss is no longer getting smaller: learning rate {before} becomes {lr}");
            state.set_lr(lr);
        }
        Ok(())
    }

    fn state(&self) -> Value {
        serde_json::json!(self.seen)
    }

    fn load_state(&mut self, state: &Value) -> CallbackResult {
        self.seen = serde_json::from_value(state.clone())?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[derive(Deserialize)]
    struct Case {
        patience: u64,
        scale: f64,
        min_lr: f64,
        warmup: u64,
        base_lr: f64,
        loss: Vec<f64>,
        /// After each evaluation.
        lr: Vec<f64>,
    }

    #[test]
    fn learning_rates_are_as_expected_also_after_a_stop() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../bench/oracle/golden/plateau.json");
        let cases: Vec<Case> = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        assert!(cases.len() >= 4);
        for Case { patience, scale, min_lr, warmup, base_lr, loss, lr } in cases {
            let new = || ReduceOnPlateau::patience(patience).scale(scale).min_lr(min_lr).warmup(warmup);
            let (mut schedule, mut now) = (new(), base_lr);
            for (place, (loss, expected)) in loss.into_iter().zip(lr).enumerate() {
                let kept = schedule.state();
                schedule = new();
                schedule.load_state(&kept).unwrap();
                now = schedule.after(loss, now);
                let near = (now - expected).abs() <= 1e-6 * expected;
                assert!(near, "{schedule:?} after evaluation {place}: {now}, expected {expected}");
            }
        }
    }

    #[test]
    fn it_never_grows_and_no_number_is_no_better() {
        let mut schedule = ReduceOnPlateau::patience(0).min_lr(0.5);
        assert_eq!(schedule.after(1.0, 0.1), 0.1);
        assert_eq!(schedule.after(f64::NAN, 0.1), 0.1, "it was below the smallest from the beginning");
        assert_eq!(ReduceOnPlateau::patience(0).after(f64::NAN, 0.1), 0.05);
    }
}
