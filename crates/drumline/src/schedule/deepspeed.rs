//! Schedules of DeepSpeed, with the keys of its configuration: logarithmic or linear warm-up, then linear or cosine
//! decay.
//!
//! DeepSpeed steps its scheduler after the optimizer: the learning rate of step 0 is set when the scheduler is created,
//! and that of step k (k > 0) comes from iteration k - 1. So the first two steps of a warm-up have the same learning
//! rate, here as well.

use serde::{Deserialize, Serialize};

use super::{At, ScheduleError, cosine, ensure};

/// How a warm-up rises.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WarmupType {
    /// By the logarithm of the iteration: fast at first.
    #[default]
    Log,
    /// By the same amount at each iteration.
    Linear,
}

/// The iteration of DeepSpeed's scheduler at this step; `None` at step 0.
fn iteration(at: At) -> Option<u64> {
    at.step.checked_sub(1)
}

/// The warm-up factor from 0 to 1; `None` after the warm-up.
fn rise(iteration: u64, num_steps: u64, kind: WarmupType) -> Option<f64> {
    // DeepSpeed's lower bound: the logarithm of 1 would divide by zero.
    let num_steps = num_steps.max(2);
    let (done, all) = (iteration as f64, num_steps as f64);
    (iteration < num_steps).then(|| match kind {
        WarmupType::Log => done.ln_1p() / all.ln(),
        WarmupType::Linear => done / all,
    })
}

fn check_steps(policy: &'static str, warmup_num_steps: u64) -> Result<(), ScheduleError> {
    ensure(warmup_num_steps > 0, policy, || "warmup_num_steps is 0; expected at least 1".into())
}

/// `WarmupLR`: rises from one learning rate to another, and stays there.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WarmupLr {
    /// The learning rate at the start.
    pub warmup_min_lr: f64,
    /// The learning rate at the end; `None` is the optimizer's.
    pub warmup_max_lr: Option<f64>,
    /// Steps of the warm-up, two at least.
    pub warmup_num_steps: u64,
    /// How it rises.
    pub warmup_type: WarmupType,
}

impl Default for WarmupLr {
    fn default() -> Self {
        Self { warmup_min_lr: 0.0, warmup_max_lr: None, warmup_num_steps: 1000, warmup_type: WarmupType::Log }
    }
}

impl WarmupLr {
    pub(super) fn check(&self) -> Result<(), ScheduleError> {
        check_steps("WarmupLR", self.warmup_num_steps)
    }

    /// The learning rate of the next step.
    pub fn lr(&self, base_lr: f64, at: At) -> f64 {
        let Some(iteration) = iteration(at) else { return self.warmup_min_lr };
        let rise = rise(iteration, self.warmup_num_steps, self.warmup_type).unwrap_or(1.0);
        self.warmup_min_lr + (self.warmup_max_lr.unwrap_or(base_lr) - self.warmup_min_lr) * rise
    }
}

/// `WarmupDecayLR`: rises as [`WarmupLr`], then falls linearly to `warmup_min_lr` at the last step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WarmupDecayLr {
    /// Steps of the training.
    pub total_num_steps: u64,
    /// The learning rate at the start and at the end.
    #[serde(default)]
    pub warmup_min_lr: f64,
    /// The learning rate after the warm-up.
    #[serde(default = "one_thousandth")]
    pub warmup_max_lr: f64,
    /// Steps of the warm-up, two at least.
    #[serde(default = "one_thousand")]
    pub warmup_num_steps: u64,
    /// How it rises.
    #[serde(default)]
    pub warmup_type: WarmupType,
}

impl WarmupDecayLr {
    pub(super) fn check(&self) -> Result<(), ScheduleError> {
        check_steps("WarmupDecayLR", self.warmup_num_steps)
    }

    /// The learning rate of the next step.
    pub fn lr(&self, at: At) -> f64 {
        let Some(iteration) = iteration(at) else { return self.warmup_min_lr };
        let part = rise(iteration, self.warmup_num_steps, self.warmup_type).unwrap_or_else(|| {
            let left = self.total_num_steps.saturating_sub(iteration) as f64;
            left / self.total_num_steps.saturating_sub(self.warmup_num_steps.max(2)).max(1) as f64
        });
        self.warmup_min_lr + (self.warmup_max_lr - self.warmup_min_lr) * part
    }
}

/// `WarmupCosineLR`: rises to the optimizer's learning rate, then falls by half a cosine. All values are fractions of
/// that learning rate.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WarmupCosineLr {
    /// Steps of the training.
    pub total_num_steps: u64,
    /// The fraction at the start.
    #[serde(default)]
    pub warmup_min_ratio: f64,
    /// Steps of the warm-up, two at least.
    #[serde(default = "one_thousand")]
    pub warmup_num_steps: u64,
    /// The fraction at the end, which stays.
    #[serde(default = "one_ten_thousandth")]
    pub cos_min_ratio: f64,
    /// How it rises.
    #[serde(default)]
    pub warmup_type: WarmupType,
}

impl WarmupCosineLr {
    pub(super) fn check(&self) -> Result<(), ScheduleError> {
        check_steps("WarmupCosineLR", self.warmup_num_steps)
    }

    /// The learning rate of the next step. That of step 0 is 0, as in DeepSpeed.
    pub fn lr(&self, base_lr: f64, at: At) -> f64 {
        let Some(iteration) = iteration(at) else { return 0.0 };
        if let Some(rise) = rise(iteration, self.warmup_num_steps, self.warmup_type) {
            return base_lr * (self.warmup_min_ratio + (1.0 - self.warmup_min_ratio) * rise);
        }
        let warmup = self.warmup_num_steps.max(2);
        let (done, all) = (iteration - warmup + 1, self.total_num_steps.saturating_sub(warmup).max(1));
        let fall = cosine((done as f64 / all as f64).min(1.0));
        base_lr * (self.cos_min_ratio + (1.0 - self.cos_min_ratio) * fall).max(0.0)
    }
}

/// `LRRangeTest`: rises linearly or in stairs, to find out which learning rate is too large.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LrRangeTest {
    /// The learning rate at the start.
    pub lr_range_test_min_lr: f64,
    /// Steps in which it grows by `lr_range_test_step_rate` times the first.
    pub lr_range_test_step_size: u64,
    /// How fast it grows.
    pub lr_range_test_step_rate: f64,
    /// Whether it grows in stairs.
    pub lr_range_test_staircase: bool,
}

impl Default for LrRangeTest {
    fn default() -> Self {
        Self {
            lr_range_test_min_lr: 1e-3,
            lr_range_test_step_size: 2000,
            lr_range_test_step_rate: 1.0,
            lr_range_test_staircase: false,
        }
    }
}

impl LrRangeTest {
    pub(super) fn check(&self) -> Result<(), ScheduleError> {
        ensure(self.lr_range_test_step_size > 0, "LRRangeTest", || {
            "lr_range_test_step_size is 0; expected at least 1".into()
        })
    }

    /// The learning rate of the next step.
    pub fn lr(&self, at: At) -> f64 {
        let exact = at.step as f64 / self.lr_range_test_step_size as f64;
        let interval = if self.lr_range_test_staircase { exact.floor() } else { exact };
        self.lr_range_test_min_lr * (1.0 + self.lr_range_test_step_rate * interval)
    }
}

fn one_thousand() -> u64 {
    1000
}

fn one_thousandth() -> f64 {
    1e-3
}

fn one_ten_thousandth() -> f64 {
    1e-4
}
