//! Distribuuuu's schedule: a learning rate for each epoch, by a cosine or by steps, with linear warm-up.

use serde::{Deserialize, Serialize};

use super::{At, ScheduleError, cosine, ensure};

/// The keys of Distribuuuu's `OPTIM` in lower case, with its defaults. `BASE_LR` is the schedule's `base_lr`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Distribuuuu {
    /// How the learning rate falls.
    pub lr_policy: EpochCurve,
    /// Epochs of the training.
    pub max_epoch: u64,
    /// The end of the cosine, as a fraction of the base learning rate.
    pub min_lr: f64,
    /// The epochs at which step 0, 1, 2, … begin; the first is 0.
    pub steps: Vec<u64>,
    /// The factor of each step.
    pub lr_mult: f64,
    /// The start of the warm-up, as a fraction of the learning rate without it.
    pub warmup_factor: f64,
    /// Epochs of the warm-up.
    pub warmup_epochs: u64,
}

/// The shape of [`Distribuuuu`]'s schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EpochCurve {
    /// Half a cosine over all epochs.
    Cos,
    /// A factor at each epoch of `steps`.
    Steps,
}

impl Default for Distribuuuu {
    fn default() -> Self {
        Self {
            lr_policy: EpochCurve::Cos,
            max_epoch: 100,
            min_lr: 0.0,
            steps: Vec::new(),
            lr_mult: 0.1,
            warmup_factor: 0.1,
            warmup_epochs: 5,
        }
    }
}

impl Distribuuuu {
    pub(super) fn check(&self) -> Result<(), ScheduleError> {
        ensure(self.max_epoch > 0, "Distribuuuu", || "max_epoch is 0; expected at least 1".into())?;
        let begins = self.lr_policy == EpochCurve::Cos || self.steps.first() == Some(&0);
        ensure(begins, "Distribuuuu", || {
            format!("steps {:?} do not begin at epoch 0; try [0, 30, 60]", self.steps)
        })
    }

    /// The learning rate of an epoch; the same for all steps in it.
    pub fn lr(&self, base_lr: f64, at: At) -> f64 {
        let epoch = at.epoch.floor();
        self.curve(epoch) * base_lr * self.warmup(epoch)
    }

    fn curve(&self, epoch: f64) -> f64 {
        match self.lr_policy {
            EpochCurve::Cos => (1.0 - self.min_lr) * cosine(epoch / self.max_epoch as f64) + self.min_lr,
            EpochCurve::Steps => {
                let last = self.steps.iter().rposition(|step| epoch >= *step as f64);
                self.lr_mult.powf(last.unwrap_or(0) as f64)
            }
        }
    }

    fn warmup(&self, epoch: f64) -> f64 {
        if epoch >= self.warmup_epochs as f64 {
            return 1.0;
        }
        let done = epoch / self.warmup_epochs as f64;
        self.warmup_factor * (1.0 - done) + done
    }
}
