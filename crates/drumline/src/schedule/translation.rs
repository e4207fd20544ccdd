//! Schedules of translation models, by steps: NJUNMT's `noam` and `isqrt`.
//!
//! Steps are counted from 1 here: k is the number of the step that is about to be made.

use serde::{Deserialize, Serialize};

use super::{At, ScheduleError, ensure};

/// `Noam`, of the paper that introduced the Transformer: `base_lr · factor · d_model^-0.5 · min(k^-0.5, k · warmup_steps^-1.5)`.
///
/// It grows evenly over the warm-up and falls with the root of the steps afterwards. The paper's has a base of 1; NJUNMT's has a `factor` of 10, for a
/// learning rate of 0.1.
///
/// ```
/// use drumline::{At, LrPolicy, LrSchedule, Noam, Schedule};
///
/// let noam = Noam { d_model: 512, warmup_steps: 4000, factor: 1.0, min_lr: 0.0 };
/// let schedule = LrSchedule::new(1.0, LrPolicy::Noam(noam))?;
/// let peak = schedule.lr(At { epoch: 0.0, step: 3999 });
/// assert!((peak - 1.0 / (512f64 * 4000.0).sqrt()).abs() < 1e-12);
/// # Ok::<(), drumline::ScheduleError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Noam {
    /// The width of the model.
    pub d_model: u64,
    /// Steps of the warm-up.
    #[serde(default = "four_thousand")]
    pub warmup_steps: u64,
    /// What all is multiplied by.
    #[serde(default = "one")]
    pub factor: f64,
    /// It is never less.
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

/// `InverseSqrt`: from `init_lr` at the first step evenly to the base at the last of the warm-up, and from `decay_steps` on `base_lr · (decay_steps / k)^0.5`.
///
/// Between the two it stays. NJUNMT's `isqrt` stays for ever where no `decay_steps` are given; here it then falls from the end of the warm-up on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InverseSqrt {
    /// Steps of the warm-up; 1: there is none.
    #[serde(default = "one_step")]
    pub warmup_steps: u64,
    /// The last step before it falls; that of the warm-up, if it is not given.
    #[serde(default)]
    pub decay_steps: Option<u64>,
    /// The learning rate of the first step of a warm-up.
    #[serde(default = "tiny")]
    pub init_lr: f64,
    /// It is never less.
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
