//! Learning rates over time: pure functions of where the training stands.
//!
//! ```text
//!   config or checkpoint ─▶ LrSchedule{base_lr, policy} ── lr(At{epoch, step}) ─▶ optimizer.set_lr
//! ```
//!
//! Nothing is counted here, so that a training that goes on from a checkpoint has the same learning rates as one that never stopped.
//!
//! - `distribuuuu`: by epochs, cosine or steps, with linear warm-up
//! - `pytorch`: `StepLR`, `MultiStepLR`, `CosineAnnealingLR`, `LinearLR`
//! - `deepspeed`: `WarmupLR`, `WarmupDecayLR`, `WarmupCosineLR`, `LRRangeTest`; `one_cycle`: `OneCycle`
//! - `translation`: `Noam`, `InverseSqrt`
//! - `policy`: one of them, as a configuration names it

mod deepspeed;
mod distribuuuu;
#[cfg(test)]
mod golden;
mod one_cycle;
mod policy;
mod pytorch;
mod translation;

pub use deepspeed::{LrRangeTest, WarmupCosineLr, WarmupDecayLr, WarmupLr, WarmupType};
pub use distribuuuu::{Distribuuuu, EpochCurve};
pub use one_cycle::OneCycle;
pub use policy::{LrPolicy, LrSchedule};
pub use pytorch::{CosineAnnealingLr, LinearLr, MultiStepLr, Per, StepLr};
pub use translation::{InverseSqrt, Noam};

/// Where a training stands when it asks for a learning rate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct At {
    /// Epochs done; within an epoch with its fraction.
    pub epoch: f64,
    /// Steps of the optimizer done.
    pub step: u64,
}

/// A learning rate over time.
///
/// Any function of [`At`] is one:
///
/// ```
/// use drumline::{At, Schedule};
///
/// let schedule = |at: At| 0.1 / (1.0 + at.epoch);
/// assert_eq!(schedule.lr(At { epoch: 1.0, step: 100 }), 0.05);
/// ```
pub trait Schedule {
    /// The learning rate of the next step.
    fn lr(&self, at: At) -> f64;
}

impl<F: Fn(At) -> f64> Schedule for F {
    fn lr(&self, at: At) -> f64 {
        self(at)
    }
}

/// A schedule whose settings make no sense.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{policy}: {what}")]
pub struct ScheduleError {
    /// Which schedule, by its name in configurations.
    pub policy: &'static str,
    /// What is wrong.
    pub what: String,
}

/// An error unless the condition holds.
fn ensure(holds: bool, policy: &'static str, what: impl FnOnce() -> String) -> Result<(), ScheduleError> {
    if holds { Ok(()) } else { Err(ScheduleError { policy, what: what() }) }
}

/// Half a cosine: 1 at 0, 0 at 1.
fn cosine(progress: f64) -> f64 {
    0.5 * (1.0 + (std::f64::consts::PI * progress).cos())
}
