//! Learning rate schedules: pure functions of the progress of a training.
//!
//! ```text
//!   .schedule(Warmup::steps(100).then(…)) ── lr(At { epoch, step, … }) ─▶ the trainer sets the learning rate
//! ```
//!
//! Schedules count nothing themselves, so that a resumed training has the same learning rates as one that never
//! stopped. The one exception is [`ReduceOnPlateau`], which depends on evaluations and saves its state in checkpoints.
//!
//! - `warmup`: small learning rates first, then any other schedule
//! - `plateau`: a learning rate that falls when evaluations no longer improve
//! - `distribuuuu`: by epochs, cosine or steps, with linear warm-up
//! - `pytorch`: `StepLR`, `MultiStepLR`, `CosineAnnealingLR`, `LinearLR`
//! - `deepspeed`: `WarmupLR`, `WarmupDecayLR`, `WarmupCosineLR`, `LRRangeTest`; `one_cycle`: `OneCycle`
//! - `translation`: `Noam`, `InverseSqrt`
//! - `policy`: any of these, by its name in a configuration

mod deepspeed;
mod distribuuuu;
#[cfg(test)]
mod golden;
mod one_cycle;
mod plateau;
mod policy;
mod pytorch;
mod translation;
mod warmup;

pub use deepspeed::{LrRangeTest, WarmupCosineLr, WarmupDecayLr, WarmupLr, WarmupType};
pub use distribuuuu::{Distribuuuu, EpochCurve};
pub use one_cycle::OneCycle;
pub use plateau::ReduceOnPlateau;
pub use policy::{LrPolicy, LrSchedule};
pub use pytorch::{CosineAnnealingLr, LinearLr, MultiStepLr, Per, StepLr};
pub use translation::{InverseSqrt, Noam};
pub use warmup::{Warmup, WarmupThen};

use serde_json::Value;

/// The progress of a training, for the learning rate of its next step.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct At {
    /// Epochs done, including the fraction of the current one.
    pub epoch: f64,
    /// Steps of the optimizer done.
    pub step: u64,
    /// Steps of the whole training, if they are known.
    pub total_steps: Option<u64>,
    /// The optimizer's initial learning rate.
    pub base_lr: f64,
}

/// A learning rate over time.
///
/// Any function of [`At`] is one:
///
/// ```
/// use drumline::schedule::{At, Schedule};
///
/// let schedule = |at: At| at.base_lr / (1.0 + at.epoch);
/// assert_eq!(schedule.lr(At { epoch: 1.0, base_lr: 0.1, ..At::default() }), 0.05);
/// ```
pub trait Schedule {
    /// The learning rate of the next step.
    fn lr(&self, at: At) -> f64;

    /// The decay rates of the optimizer's running means at the next step, if this schedule sets them. An optimizer
    /// without running means keeps its momentum.
    fn betas(&self, at: At) -> Option<(f64, f64)> {
        let _ = at;
        None
    }

    /// Checks the settings before the first step of a training of `total_steps` steps. Returns a warning if they are
    /// valid but unlikely.
    fn check(&self, total_steps: Option<u64>) -> Result<Option<String>, ScheduleError> {
        let _ = total_steps;
        Ok(None)
    }

    /// Called after an evaluation. Returns the new learning rate if the evaluation has changed it.
    fn evaluated(&mut self, evaluation: Evaluated) -> Option<f64> {
        let _ = evaluation;
        None
    }

    /// The state to save in checkpoints.
    fn state(&self) -> Value {
        Value::Null
    }

    /// Loads what [`state`](Self::state) returned, and the learning rate of the checkpoint.
    fn load_state(&mut self, state: &Value, lr: f64) -> Result<(), serde_json::Error> {
        let _ = (state, lr);
        Ok(())
    }
}

impl Schedule for Box<dyn Schedule + '_> {
    fn lr(&self, at: At) -> f64 {
        (**self).lr(at)
    }

    fn betas(&self, at: At) -> Option<(f64, f64)> {
        (**self).betas(at)
    }

    fn check(&self, total_steps: Option<u64>) -> Result<Option<String>, ScheduleError> {
        (**self).check(total_steps)
    }

    fn evaluated(&mut self, evaluation: Evaluated) -> Option<f64> {
        (**self).evaluated(evaluation)
    }

    fn state(&self) -> Value {
        (**self).state()
    }

    fn load_state(&mut self, state: &Value, lr: f64) -> Result<(), serde_json::Error> {
        (**self).load_state(state, lr)
    }
}

/// The result of an evaluation, for a schedule.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Evaluated {
    /// The mean loss.
    pub loss: f64,
    /// Steps done.
    pub step: u64,
    /// The optimizer's initial learning rate.
    pub base_lr: f64,
}

impl<F: Fn(At) -> f64> Schedule for F {
    fn lr(&self, at: At) -> f64 {
        self(at)
    }
}

/// A schedule has invalid settings.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{policy}: {what}")]
pub struct ScheduleError {
    /// The schedule, by its name in configurations.
    pub policy: &'static str,
    /// What is wrong.
    pub what: String,
}

/// Returns an error unless the condition holds.
fn ensure(holds: bool, policy: &'static str, what: impl FnOnce() -> String) -> Result<(), ScheduleError> {
    if holds { Ok(()) } else { Err(ScheduleError { policy, what: what() }) }
}

/// Half a cosine: 1 at 0, 0 at 1.
fn cosine(progress: f64) -> f64 {
    0.5 * (1.0 + (std::f64::consts::PI * progress).cos())
}
