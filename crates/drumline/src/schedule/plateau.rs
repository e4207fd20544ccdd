//! A learning rate that falls when evaluations no longer improve.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{At, Evaluated, Schedule, ScheduleError, ensure};

/// Multiplies the learning rate when the loss of more than `patience` evaluations in a row was not below the smallest
/// so far, as NJUNMT's `loss` schedule. The count starts again then; the smallest loss stays.
///
/// ```
/// use drumline::schedule::ReduceOnPlateau;
///
/// // Halved at the third evaluation in a row that is no better, down to 1e-5. The first ten do not count.
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
    /// Evaluations in a row without improvement.
    bad: u64,
    /// All evaluations.
    evaluations: u64,
    /// The learning rate, after the first evaluation.
    #[serde(default)]
    lr: Option<f64>,
}

impl ReduceOnPlateau {
    /// Reduces the learning rate after more than this many evaluations without improvement.
    pub fn patience(evaluations: u64) -> Self {
        Self { patience: evaluations, scale: 0.5, min_lr: 0.0, warmup: 0, every: 1, seen: Seen::default() }
    }

    /// What the learning rate is multiplied by; default 0.5.
    #[must_use]
    pub fn scale(self, scale: f64) -> Self {
        Self { scale, ..self }
    }

    /// It is not reduced below this; default 0.
    #[must_use]
    pub fn min_lr(self, min_lr: f64) -> Self {
        Self { min_lr, ..self }
    }

    /// Ignores this many evaluations at the beginning of the training.
    #[must_use]
    pub fn warmup(self, evaluations: u64) -> Self {
        Self { warmup: evaluations, ..self }
    }

    /// Only evaluations after each n-th step count; by default all do.
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
        // NaN is not an improvement.
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

impl Schedule for ReduceOnPlateau {
    fn lr(&self, at: At) -> f64 {
        self.seen.lr.unwrap_or(at.base_lr)
    }

    fn check(&self, _: Option<u64>) -> Result<Option<String>, ScheduleError> {
        let Self { scale, min_lr, .. } = *self;
        ensure(scale > 0.0 && scale < 1.0, "ReduceOnPlateau", || {
            format!("scale is {scale}, expected a number between 0 and 1; try 0.5")
        })?;
        ensure(min_lr >= 0.0, "ReduceOnPlateau", || format!("min_lr is {min_lr}, expected 0 or more"))?;
        Ok(None)
    }

    fn evaluated(&mut self, evaluation: Evaluated) -> Option<f64> {
        if !evaluation.step.is_multiple_of(self.every) {
            return None;
        }
        let before = self.seen.lr.unwrap_or(evaluation.base_lr);
        let lr = self.after(evaluation.loss, before);
        self.seen.lr = Some(lr);
        let is_changed = lr != before;
        if is_changed {
            tracing::info!("the loss no longer falls: the learning rate changes from {before} to {lr}");
        }
        is_changed.then_some(lr)
    }

    fn state(&self) -> Value {
        serde_json::json!(self.seen)
    }

    fn load_state(&mut self, state: &Value, lr: f64) -> Result<(), serde_json::Error> {
        self.seen = serde_json::from_value(state.clone())?;
        // Older checkpoints, of when this was a callback, have the learning rate only in the optimizer.
        self.seen.lr.get_or_insert(lr);
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
    fn learning_rates_are_as_expected_also_after_a_resume() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../bench/oracle/golden/plateau.json");
        let cases: Vec<Case> = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        assert!(cases.len() >= 4);
        for Case { patience, scale, min_lr, warmup, base_lr, loss, lr } in cases {
            let new = || ReduceOnPlateau::patience(patience).scale(scale).min_lr(min_lr).warmup(warmup);
            let (mut schedule, mut now) = (new(), base_lr);
            for (place, (loss, expected)) in loss.into_iter().zip(lr).enumerate() {
                let saved = schedule.state();
                schedule = new();
                schedule.load_state(&saved, now).unwrap();
                now = schedule.after(loss, now);
                let near = (now - expected).abs() <= 1e-6 * expected;
                assert!(near, "{schedule:?} after evaluation {place}: {now}, expected {expected}");
            }
        }
    }

    #[test]
    fn it_never_grows_and_nan_is_no_improvement() {
        let mut schedule = ReduceOnPlateau::patience(0).min_lr(0.5);
        assert_eq!(schedule.after(1.0, 0.1), 0.1);
        assert_eq!(schedule.after(f64::NAN, 0.1), 0.1, "it was below the smallest from the beginning");
        assert_eq!(ReduceOnPlateau::patience(0).after(f64::NAN, 0.1), 0.05);
    }
}
