//! DeepSpeed's `OneCycle`: a linear rise, a linear fall, then a slow decay.
//!
//! ```text
//!   cycle_max_lr      /\
//!                    /  \
//!   cycle_min_lr  __/    \___      the decay divides by 1 + decay_lr_rate * (steps since the cycle / decay_step_size)
//!                  first second
//! ```
//!
//! The momentum is cycled against the learning rate: it is the first beta of the optimizer, and lowest at the top. As in
//! DeepSpeed, the second beta is 0.99 then, whatever the optimizer's settings are, and the first step has the lowest
//! momentum.

use serde::{Deserialize, Serialize};

use super::{At, ScheduleError, ensure};

/// The keys of `OneCycle`, with DeepSpeed's defaults.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OneCycle {
    /// The learning rate at both ends of the cycle.
    pub cycle_min_lr: f64,
    /// The learning rate at its top.
    pub cycle_max_lr: f64,
    /// The speed of the decay after the cycle; 0 for none.
    #[serde(default)]
    pub decay_lr_rate: f64,
    /// Steps up.
    #[serde(default = "two_thousand")]
    pub cycle_first_step_size: u64,
    /// Steps down; by default as many as up.
    #[serde(default)]
    pub cycle_second_step_size: Option<u64>,
    /// Stairs on the way up; 0 for a line.
    #[serde(default)]
    pub cycle_first_stair_count: u64,
    /// Stairs on the way down; by default as many as up.
    #[serde(default)]
    pub cycle_second_stair_count: Option<u64>,
    /// Steps in which the decay grows by `decay_lr_rate`; 0 for no decay.
    #[serde(default)]
    pub decay_step_size: u64,
    /// Whether the momentum is cycled: the first beta of optimizers that have betas.
    #[serde(default = "yes")]
    pub cycle_momentum: bool,
    /// The momentum at the top.
    #[serde(default = "eight_tenths")]
    pub cycle_min_mom: f64,
    /// The momentum at both ends.
    #[serde(default = "nine_tenths")]
    pub cycle_max_mom: f64,
    /// The speed of the momentum's growth after the cycle; 0 for none.
    #[serde(default)]
    pub decay_mom_rate: f64,
}

/// The second beta while the first one is cycled.
const SECOND_BETA: f64 = 0.99;

impl OneCycle {
    pub(super) fn check(&self) -> Result<(), ScheduleError> {
        let halves = self.cycle_first_step_size > 0 && self.cycle_second_step_size != Some(0);
        ensure(halves, "OneCycle", || "half a cycle has 0 steps; expected at least 1".into())?;
        let momenta = [self.cycle_min_mom, self.cycle_max_mom];
        ensure(momenta.iter().all(|mom| (0.0..1.0).contains(mom)), "OneCycle", || {
            format!("cycle_min_mom and cycle_max_mom are {momenta:?}; expected 0 to below 1")
        })
    }

    /// An error if the momentum is no beta any more before the end of a training.
    pub(super) fn check_until(&self, total_steps: u64) -> Result<(), ScheduleError> {
        let last = self.momentum(total_steps.saturating_sub(1));
        ensure(!self.cycle_momentum || (0.0..1.0).contains(&last), "OneCycle", || {
            format!(
                "after the cycle the momentum grows to {last} in step {total_steps}; expected 0 to below 1; \
                 try a smaller decay_mom_rate, or 0"
            )
        })
    }

    /// The learning rate of the next step.
    pub fn lr(&self, at: At) -> f64 {
        let total = self.cycle_first_step_size + self.second_step_size();
        if at.step <= total {
            let height = self.cycle_max_lr - self.cycle_min_lr;
            return self.cycle_min_lr + height * self.height(at.step % total);
        }
        if self.decay_step_size == 0 {
            return self.cycle_min_lr;
        }
        let intervals = (at.step - total) as f64 / self.decay_step_size as f64;
        self.cycle_min_lr / (1.0 + self.decay_lr_rate * intervals)
    }

    /// The betas of the next step; `None` if the momentum is not cycled.
    pub fn betas(&self, at: At) -> Option<(f64, f64)> {
        self.cycle_momentum.then(|| (self.momentum(at.step), SECOND_BETA))
    }

    fn momentum(&self, step: u64) -> f64 {
        let total = self.cycle_first_step_size + self.second_step_size();
        if step == 0 {
            return self.cycle_min_mom;
        }
        if step <= total {
            let height = self.cycle_max_mom - self.cycle_min_mom;
            return self.cycle_max_mom - height * self.height(step % total);
        }
        if self.decay_step_size == 0 {
            return self.cycle_max_mom;
        }
        let intervals = (step - total) as f64 / self.decay_step_size as f64;
        self.cycle_max_mom * (1.0 + self.decay_mom_rate * intervals)
    }

    fn second_step_size(&self) -> u64 {
        self.cycle_second_step_size.unwrap_or(self.cycle_first_step_size)
    }

    /// From 0 to 1 and back, by lines or stairs.
    fn height(&self, step: u64) -> f64 {
        let (first, second) = (self.cycle_first_step_size, self.second_step_size());
        let (done, all, stairs) = if step <= first {
            (step, first, self.cycle_first_stair_count)
        } else {
            let stairs = self.cycle_second_stair_count.unwrap_or(self.cycle_first_stair_count);
            (first + second - step, second, stairs)
        };
        if stairs == 0 {
            return done as f64 / all as f64;
        }
        (done * stairs / all) as f64 / stairs as f64
    }
}

fn two_thousand() -> u64 {
    2000
}

fn yes() -> bool {
    true
}

fn eight_tenths() -> f64 {
    0.8
}

fn nine_tenths() -> f64 {
    0.9
}

#[cfg(test)]
mod tests {
    use crate::schedule::{LrPolicy, LrSchedule, Schedule};

    use super::*;

    #[test]
    fn a_momentum_that_grows_too_far_is_an_error_before_training() {
        let keys = r#"{"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 5,
            "decay_step_size": 1, "decay_mom_rate": 0.01}"#;
        let cycle: OneCycle = serde_json::from_str(keys).unwrap();
        let checked = |cycle: &OneCycle, total_steps| {
            let schedule = LrSchedule::new(0.1, LrPolicy::OneCycle(cycle.clone())).unwrap();
            schedule.check(total_steps)
        };
        // 0.9 × (1 + 0.01 × steps after the tenth) reaches 1 in the twelfth step after it.
        assert_eq!((checked(&cycle, Some(22)), checked(&cycle, None)), (Ok(None), Ok(None)));
        let error = checked(&cycle, Some(23)).unwrap_err().to_string();
        assert!(
            error.contains("in step 23") && error.ends_with("try a smaller decay_mom_rate, or 0"),
            "{error}"
        );
        let constant = OneCycle { cycle_momentum: false, ..cycle };
        assert_eq!(checked(&constant, Some(1000)), Ok(None));
    }
}
