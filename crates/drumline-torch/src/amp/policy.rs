//! How a loss scale changes: it decreases after gradients that were not finite, and increases after many that were.

use tch::{Kind, Tensor};

use super::ffi::{Growth, update_scale};
use crate::error::TorchError;

/// The rule by which a loss is scaled.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ScalePolicy {
    /// As PyTorch's `GradScaler`.
    Dynamic(DynamicScale),
    /// As DeepSpeed's `fp16` with `loss_scale` 0.
    DeepSpeed(DeepSpeedScale),
    /// A constant scale.
    Static(f64),
}

impl Default for ScalePolicy {
    fn default() -> Self {
        Self::Dynamic(DynamicScale::default())
    }
}

/// PyTorch's rule, with its defaults.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DynamicScale {
    /// The initial scale.
    pub init_scale: f64,
    /// The scale is multiplied by this after `growth_interval` steps without overflow.
    pub growth_factor: f64,
    /// The scale is multiplied by this after an overflow.
    pub backoff_factor: f64,
    /// Consecutive steps without overflow before the scale grows.
    pub growth_interval: u32,
}

impl Default for DynamicScale {
    fn default() -> Self {
        Self { init_scale: 65536.0, growth_factor: 2.0, backoff_factor: 0.5, growth_interval: 2000 }
    }
}

/// DeepSpeed's rule: a factor of 2, and the scale decreases only after several overflows. The names and defaults are
/// those of `ds_config.json`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DeepSpeedScale {
    /// The initial scale is 2 to this power.
    pub initial_scale_power: u32,
    /// Consecutive steps without overflow before the scale grows. After an overflow, and at the beginning, DeepSpeed waits
    /// for one more.
    pub loss_scale_window: u32,
    /// The number of overflows after which the scale decreases.
    pub hysteresis: u32,
    /// Whether each step without overflow resets the count of overflows; otherwise only growth of the scale does.
    pub consecutive_hysteresis: bool,
    /// The minimum of the scale.
    pub min_loss_scale: f64,
}

impl Default for DeepSpeedScale {
    fn default() -> Self {
        Self {
            initial_scale_power: 16,
            loss_scale_window: 1000,
            hysteresis: 2,
            consecutive_hysteresis: false,
            min_loss_scale: 1.0,
        }
    }
}

/// DeepSpeed's scale is multiplied and divided by this.
const DEEPSPEED_FACTOR: f64 = 2.0;

/// Steps without overflow that DeepSpeed has counted after an overflow, and at the beginning.
const AFTER_OVERFLOW: i64 = -1;

/// The state of a scale: each field is a tensor of one element on the device.
#[derive(Debug)]
pub(super) struct Scale {
    pub(super) scale: Tensor,
    /// Steps without overflow since the scale last changed, or since the last overflow.
    pub(super) growth_tracker: Tensor,
    /// Overflows until the scale decreases, counted down to 1; only DeepSpeed's rule uses it.
    pub(super) hysteresis: Tensor,
}

impl ScalePolicy {
    pub(super) fn check(&self) -> Result<(), TorchError> {
        let holds = match self {
            Self::Static(scale) => scale.is_finite() && *scale > 0.0,
            Self::DeepSpeed(rule) => {
                let is_minimum = rule.min_loss_scale.is_finite() && rule.min_loss_scale > 0.0;
                let is_count = rule.loss_scale_window > 0 && rule.hysteresis > 0;
                is_minimum && is_count && rule.initial_scale_power < 128
            }
            Self::Dynamic(rule) => {
                let is_scale = rule.init_scale.is_finite() && rule.init_scale > 0.0;
                let is_backoff = rule.backoff_factor > 0.0 && rule.backoff_factor < 1.0;
                is_scale && is_backoff && rule.growth_factor > 1.0 && rule.growth_interval > 0
            }
        };
        if holds {
            return Ok(());
        }
        Err(TorchError::value(
            "the loss scale policy",
            format!("{self:?}"),
            "positive numbers, growth above 1 and backoff below 1; try ScalePolicy::default()",
        ))
    }

    pub(super) fn init_scale(&self) -> f64 {
        match self {
            Self::Dynamic(rule) => rule.init_scale,
            Self::DeepSpeed(rule) => 2f64.powi(rule.initial_scale_power as i32),
            Self::Static(scale) => *scale,
        }
    }

    pub(super) fn first_growth_tracker(&self) -> i64 {
        match self {
            Self::DeepSpeed(_) => AFTER_OVERFLOW,
            _ => 0,
        }
    }

    pub(super) fn hysteresis(&self) -> u32 {
        match self {
            Self::DeepSpeed(rule) => rule.hysteresis,
            _ => 1,
        }
    }

    /// Updates the scale after a step, without waiting for the device.
    pub(super) fn update(&self, at: &mut Scale, found_inf: &Tensor) -> Result<(), TorchError> {
        match self {
            Self::Static(_) => Ok(()),
            Self::DeepSpeed(rule) => rule.update(at, found_inf),
            Self::Dynamic(rule) => {
                let growth = Growth {
                    growth_factor: rule.growth_factor,
                    backoff_factor: rule.backoff_factor,
                    growth_interval: rule.growth_interval.into(),
                };
                update_scale(&at.scale, &at.growth_tracker, found_inf, growth)
            }
        }
    }
}

impl DeepSpeedScale {
    fn update(&self, at: &mut Scale, found_inf: &Tensor) -> Result<(), TorchError> {
        let overflow = found_inf.f_gt(0.0)?;
        let is_spent = at.hysteresis.f_le(1)?;
        let good = at.growth_tracker.f_add_scalar(1)?;
        let grows =
            good.f_ge(i64::from(self.loss_scale_window))?.f_logical_and(&overflow.f_logical_not()?)?;
        let shrinks = overflow.f_logical_and(&is_spent)?;

        let lower = at.scale.f_div_scalar(DEEPSPEED_FACTOR)?.f_clamp_min(self.min_loss_scale)?;
        let higher = at.scale.f_mul_scalar(DEEPSPEED_FACTOR)?.f_clamp_max(f64::from(f32::MAX))?;
        let scale = lower.f_where_self(&shrinks, &higher.f_where_self(&grows, &at.scale)?)?;

        let resets = overflow.f_logical_or(&grows)?;
        // DeepSpeed counts one step more after an overflow than after growth.
        let start = overflow.f_to_kind(good.f_kind()?)?.f_mul_scalar(AFTER_OVERFLOW)?;
        let tracker = start.f_where_self(&resets, &good)?;

        let full = at.hysteresis.f_full_like(i64::from(self.hysteresis))?;
        let refilled =
            if self.consecutive_hysteresis { full } else { full.f_where_self(&grows, &at.hysteresis)? };
        let one_less = at.hysteresis.f_sub_scalar(1)?.f_clamp_min(1)?;
        let hysteresis = one_less.f_where_self(&overflow, &refilled)?;

        at.scale.f_copy_(&scale)?;
        at.growth_tracker.f_copy_(&tracker.f_to_kind(Kind::Int)?)?;
        at.hysteresis.f_copy_(&hysteresis.f_to_kind(Kind::Int)?)?;
        Ok(())
    }
}
