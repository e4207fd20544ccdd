//! Schedules of PyTorch, in closed form and under its names.
//!
//! PyTorch counts calls of `scheduler.step()`, which programs make once per epoch or once per step: [`Per`].

use serde::{Deserialize, Serialize};

use super::{At, ScheduleError, cosine, ensure};

/// What a schedule counts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Per {
    /// Whole epochs.
    #[default]
    Epoch,
    /// Steps of the optimizer.
    Step,
}

impl Per {
    fn count(self, at: At) -> f64 {
        match self {
            Self::Epoch => at.epoch.floor(),
            Self::Step => at.step as f64,
        }
    }
}

/// `StepLR`: multiplied by `gamma` every `step_size` counts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepLr {
    /// Counts between changes.
    pub step_size: u64,
    /// The factor of each change.
    #[serde(default = "one_tenth")]
    pub gamma: f64,
    /// What is counted.
    #[serde(default)]
    pub per: Per,
}

impl StepLr {
    pub(super) fn check(&self) -> Result<(), ScheduleError> {
        ensure(self.step_size > 0, "StepLR", || "step_size is 0; expected at least 1".into())
    }

    /// The learning rate of the next step.
    pub fn lr(&self, base_lr: f64, at: At) -> f64 {
        base_lr * self.gamma.powf((self.per.count(at) / self.step_size as f64).floor())
    }
}

/// `MultiStepLR`: multiplied by `gamma` at each milestone.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MultiStepLr {
    /// The counts at which the learning rate changes. One that is listed twice multiplies twice.
    pub milestones: Vec<u64>,
    /// The factor of each milestone.
    #[serde(default = "one_tenth")]
    pub gamma: f64,
    /// What is counted.
    #[serde(default)]
    pub per: Per,
}

impl MultiStepLr {
    /// The learning rate of the next step.
    pub fn lr(&self, base_lr: f64, at: At) -> f64 {
        let count = self.per.count(at);
        let passed = self.milestones.iter().filter(|milestone| count >= **milestone as f64).count();
        base_lr * self.gamma.powf(passed as f64)
    }
}

/// `CosineAnnealingLR`: falls by half a cosine to `eta_min` in `T_max` counts, then rises again, and so on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CosineAnnealingLr {
    /// Counts from the highest to the lowest learning rate.
    #[serde(rename = "T_max")]
    pub t_max: u64,
    /// The lowest learning rate.
    #[serde(default)]
    pub eta_min: f64,
    /// What is counted.
    #[serde(default)]
    pub per: Per,
}

impl CosineAnnealingLr {
    pub(super) fn check(&self) -> Result<(), ScheduleError> {
        ensure(self.t_max > 0, "CosineAnnealingLR", || "T_max is 0; expected at least 1".into())
    }

    /// The learning rate of the next step.
    pub fn lr(&self, base_lr: f64, at: At) -> f64 {
        self.eta_min + (base_lr - self.eta_min) * cosine(self.per.count(at) / self.t_max as f64)
    }
}

/// `LinearLR`: the factor goes from `start_factor` to `end_factor` in `total_iters` counts and stays there.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LinearLr {
    /// The factor at the start.
    pub start_factor: f64,
    /// The factor at the end.
    pub end_factor: f64,
    /// Counts from start to end.
    pub total_iters: u64,
    /// What is counted.
    pub per: Per,
}

impl Default for LinearLr {
    fn default() -> Self {
        Self { start_factor: 1.0 / 3.0, end_factor: 1.0, total_iters: 5, per: Per::Epoch }
    }
}

impl LinearLr {
    pub(super) fn check(&self) -> Result<(), ScheduleError> {
        ensure(self.total_iters > 0, "LinearLR", || "total_iters is 0; expected at least 1".into())
    }

    /// The learning rate of the next step.
    pub fn lr(&self, base_lr: f64, at: At) -> f64 {
        let done = (self.per.count(at) / self.total_iters as f64).min(1.0);
        base_lr * (self.start_factor + (self.end_factor - self.start_factor) * done)
    }
}

fn one_tenth() -> f64 {
    0.1
}
