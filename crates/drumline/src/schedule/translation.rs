//! Schedules of translation models, by steps: NJUNMT's `noam` and `isqrt`.
//!
//! Steps are counted from 1 here: k is the number of the next step.

use serde::{Deserialize, Serialize};

use super::{At, ScheduleError, ensure};

/// `Noam`, of the paper that introduced the Transformer: `base_lr · factor · d_model^-0.5 · min(k^-0.5, k ·
/// warmup_steps^-1.5)`.
///
/// It grows linearly in the warm-up, and then falls with the square root of the steps. The paper has a base of 1;
/// NJUNMT has a `factor` of 10, for a learning rate of 0.1.
///
/// ```
/// use drumline::schedule::{At, LrPolicy, LrSchedule, Noam, Schedule};
///
/// let noam = Noam { d_model: 512, warmup_steps: 4000, factor: 1.0, min_lr: 0.0 };
/// let schedule = LrSchedule::new(1.0, LrPolicy::Noam(noam))?;
/// let peak = schedule.lr(At { step: 3999, ..At::default() });
/// assert!((peak - 1.0 / (512f64 * 4000.0).sqrt()).abs() < 1e-12);
/// # Ok::<(), drumline::schedule::ScheduleError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Noam {
    /// The width of the model.
    pub d_model: u64,
    /// Steps of the warm-up.
    #[serde(default = "four_thousand")]
    pub warmup_steps: u64,
    /// A factor of the whole curve.
    #[serde(default = "one")]
    pub factor: f64,
    /// The lower bound of the learning rate.
    #[serde(default)]
    pub min_lr: f64,
}

impl Noam {
    pub(super) fn check(&self) -> Result<(), ScheduleError> {
        ensure(self.d_model > 0, "Noam", || "d_model is 0; expected the width of the model".into())?;
        ensure(self.warmup_steps > 0, "Noam", || "warmup_steps is 0; expected at least 1".into())?;
        let fits = self.factor.is_finite() && self.factor > 0.0;
        ensure(fits, "Noam", || format!("factor is {}; expected a number above 0", self.factor))
    }

    /// The learning rate of the next step.
    pub fn lr(&self, base_lr: f64, at: At) -> f64 {
        let (k, warmup) = ((at.step + 1) as f64, self.warmup_steps as f64);
        let curve = k.powf(-0.5).min(k * warmup.powf(-1.5));
        (base_lr * self.factor * (self.d_model as f64).powf(-0.5) * curve).max(self.min_lr)
    }
}

/// `InverseSqrt`: grows linearly from `init_lr` at the first step to the base at the end of the warm-up. After
/// `decay_steps` it is `base_lr · (decay_steps / k)^0.5`; in between it stays.
///
/// In NJUNMT's `isqrt` it stays forever without `decay_steps`. Here it then falls after the warm-up.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InverseSqrt {
    /// Steps of the warm-up; 1 for none.
    #[serde(default = "one_step")]
    pub warmup_steps: u64,
    /// The last step before it falls; default `warmup_steps`.
    #[serde(default)]
    pub decay_steps: Option<u64>,
    /// The learning rate of the first step of a warm-up.
    #[serde(default = "tiny")]
    pub init_lr: f64,
    /// The lower bound of the learning rate.
    #[serde(default)]
    pub min_lr: f64,
}

impl InverseSqrt {
    pub(super) fn check(&self) -> Result<(), ScheduleError> {
        let Self { warmup_steps: warmup, decay_steps, .. } = *self;
        ensure(warmup > 0, "InverseSqrt", || "warmup_steps is 0; expected at least 1".into())?;
        let decay = decay_steps.unwrap_or(warmup);
        ensure(decay >= warmup, "InverseSqrt", || {
            format!("decay_steps is {decay}, before the end of the warm-up; expected at least {warmup}")
        })
    }

    /// The learning rate of the next step.
    pub fn lr(&self, base_lr: f64, at: At) -> f64 {
        let (k, warmup) = (at.step + 1, self.warmup_steps);
        let decay = self.decay_steps.unwrap_or(warmup);
        let lr = match k {
            _ if k < warmup => self.init_lr + (base_lr - self.init_lr) * (k - 1) as f64 / (warmup - 1) as f64,
            _ if k <= decay => base_lr,
            _ => base_lr * (decay as f64 / k as f64).sqrt(),
        };
        lr.max(self.min_lr)
    }
}

fn four_thousand() -> u64 {
    4000
}

fn one() -> f64 {
    1.0
}

fn one_step() -> u64 {
    1
}

fn tiny() -> f64 {
    1e-7
}
