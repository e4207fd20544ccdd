//! A schedule in configurations and checkpoints: its name and its settings, in the form of DeepSpeed's `scheduler`.

use serde::{Deserialize, Serialize};

use super::{
    At, CosineAnnealingLr, Distribuuuu, InverseSqrt, LinearLr, LrRangeTest, MultiStepLr, Noam, OneCycle,
    Schedule, ScheduleError, StepLr, WarmupCosineLr, WarmupDecayLr, WarmupLr, ensure,
};

/// A schedule with its settings.
///
/// ```
/// use drumline::schedule::LrPolicy;
///
/// let policy: LrPolicy = serde_json::from_str(r#"{"type": "WarmupLR", "params": {"warmup_num_steps": 100}}"#)?;
/// assert!(matches!(policy, LrPolicy::WarmupLr(warmup) if warmup.warmup_num_steps == 100));
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", content = "params")]
#[non_exhaustive]
pub enum LrPolicy {
    /// A constant learning rate.
    Constant,
    /// Distribuuuu's schedule, by epochs.
    Distribuuuu(Distribuuuu),
    /// PyTorch's `StepLR`.
    #[serde(rename = "StepLR")]
    StepLr(StepLr),
    /// PyTorch's `MultiStepLR`.
    #[serde(rename = "MultiStepLR")]
    MultiStepLr(MultiStepLr),
    /// PyTorch's `CosineAnnealingLR`.
    #[serde(rename = "CosineAnnealingLR")]
    CosineAnnealingLr(CosineAnnealingLr),
    /// PyTorch's `LinearLR`.
    #[serde(rename = "LinearLR")]
    LinearLr(LinearLr),
    /// DeepSpeed's `WarmupLR`.
    #[serde(rename = "WarmupLR")]
    WarmupLr(WarmupLr),
    /// DeepSpeed's `WarmupDecayLR`.
    #[serde(rename = "WarmupDecayLR")]
    WarmupDecayLr(WarmupDecayLr),
    /// DeepSpeed's `WarmupCosineLR`.
    #[serde(rename = "WarmupCosineLR")]
    WarmupCosineLr(WarmupCosineLr),
    /// DeepSpeed's `OneCycle`.
    OneCycle(OneCycle),
    /// DeepSpeed's `LRRangeTest`.
    #[serde(rename = "LRRangeTest")]
    LrRangeTest(LrRangeTest),
    /// The Transformer's schedule, by steps and the model's width.
    Noam(Noam),
    /// A learning rate that falls with the square root of the steps.
    InverseSqrt(InverseSqrt),
}

impl LrPolicy {
    fn check(&self) -> Result<(), ScheduleError> {
        match self {
            Self::Constant | Self::MultiStepLr(_) => Ok(()),
            Self::Distribuuuu(policy) => policy.check(),
            Self::StepLr(policy) => policy.check(),
            Self::CosineAnnealingLr(policy) => policy.check(),
            Self::LinearLr(policy) => policy.check(),
            Self::WarmupLr(policy) => policy.check(),
            Self::WarmupDecayLr(policy) => policy.check(),
            Self::WarmupCosineLr(policy) => policy.check(),
            Self::OneCycle(policy) => policy.check(),
            Self::LrRangeTest(policy) => policy.check(),
            Self::Noam(policy) => policy.check(),
            Self::InverseSqrt(policy) => policy.check(),
        }
    }

    fn lr(&self, base_lr: f64, at: At) -> f64 {
        match self {
            Self::Constant => base_lr,
            Self::Distribuuuu(policy) => policy.lr(base_lr, at),
            Self::StepLr(policy) => policy.lr(base_lr, at),
            Self::MultiStepLr(policy) => policy.lr(base_lr, at),
            Self::CosineAnnealingLr(policy) => policy.lr(base_lr, at),
            Self::LinearLr(policy) => policy.lr(base_lr, at),
            Self::WarmupLr(policy) => policy.lr(base_lr, at),
            Self::WarmupDecayLr(policy) => policy.lr(at),
            Self::WarmupCosineLr(policy) => policy.lr(base_lr, at),
            Self::OneCycle(policy) => policy.lr(at),
            Self::LrRangeTest(policy) => policy.lr(at),
            Self::Noam(policy) => policy.lr(base_lr, at),
            Self::InverseSqrt(policy) => policy.lr(base_lr, at),
        }
    }
}

impl LrPolicy {
    fn betas(&self, at: At) -> Option<(f64, f64)> {
        if let Self::OneCycle(policy) = self { policy.betas(at) } else { None }
    }
}

/// A schedule that was checked, with the optimizer's learning rate.
///
/// ```
/// use drumline::schedule::{At, Distribuuuu, LrPolicy, LrSchedule, Schedule};
///
/// let schedule = LrSchedule::new(0.2, LrPolicy::Distribuuuu(Distribuuuu::default()))?;
/// let lr = |epoch| schedule.lr(At { epoch, ..At::default() });
/// assert!((lr(0.0) - 0.02).abs() < 1e-12);
/// assert!((lr(50.0) - 0.1).abs() < 1e-12);
/// # Ok::<(), drumline::schedule::ScheduleError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Unchecked")]
pub struct LrSchedule {
    base_lr: f64,
    policy: LrPolicy,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Unchecked {
    base_lr: f64,
    policy: LrPolicy,
}

impl LrSchedule {
    /// Checks the settings.
    pub fn new(base_lr: f64, policy: LrPolicy) -> Result<Self, ScheduleError> {
        let fits = base_lr.is_finite() && base_lr >= 0.0;
        ensure(fits, "learning rate", || format!("{base_lr}; expected a number that is not negative"))?;
        policy.check()?;
        Ok(Self { base_lr, policy })
    }

    /// The policy.
    pub fn policy(&self) -> &LrPolicy {
        &self.policy
    }

    /// The learning rate that the policy starts from.
    pub fn base_lr(&self) -> f64 {
        self.base_lr
    }
}

impl Schedule for LrSchedule {
    fn lr(&self, at: At) -> f64 {
        self.policy.lr(self.base_lr, at)
    }

    fn betas(&self, at: At) -> Option<(f64, f64)> {
        self.policy.betas(at)
    }

    fn check(&self, total_steps: Option<u64>) -> Result<Option<String>, ScheduleError> {
        if let (LrPolicy::OneCycle(policy), Some(total)) = (&self.policy, total_steps) {
            policy.check_until(total)?;
        }
        Ok(None)
    }
}

impl TryFrom<Unchecked> for LrSchedule {
    type Error = ScheduleError;

    fn try_from(parts: Unchecked) -> Result<Self, ScheduleError> {
        Self::new(parts.base_lr, parts.policy)
    }
}
