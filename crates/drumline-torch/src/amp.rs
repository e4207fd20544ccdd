//! Loss scaling for forward passes in float16, where small gradients would underflow to zero. The loss is multiplied by
//! a scale before backward, and the gradients are divided by it afterwards.
//!
//! ```text
//!   loss × scale ─ backward ─▶ ScaledGrads ─ unscale ─▶ Unscaled{found_inf} ─ clip, step ─▶ parameters, unless found_inf
//!                                                           │
//!   scale ◀─ grows after many good steps, shrinks after a bad one ◀┘                         policy
//! ```
//! Scale and `found_inf` stay on the device, so that a captured graph contains all of this. The types ensure that
//! gradients are unscaled before they are clipped or used in a step.
//!
//! - `policy`: how the scale changes: as PyTorch's or as DeepSpeed's
//! - `grads`: scaled and unscaled gradients

mod ffi;
#[cfg(test)]
mod golden;
mod grads;
mod policy;
#[cfg(test)]
mod tests;

use tch::{Device, Kind, Tensor, no_grad};

use crate::error::TorchError;
use policy::Scale;

pub use grads::{ScaledGrads, StepMade, Unscaled};
pub use policy::{DeepSpeedScale, DynamicScale, ScalePolicy};

/// Multiplies losses, divides gradients, and adapts the scale, as PyTorch's `GradScaler`.
///
/// ```
/// use drumline_torch::{LossScaler, Optimizer, ScalePolicy, Sgd, SgdOptions, StepMade, autocast, parameters};
/// use tch::nn::{self, Module};
/// use tch::{Device, Kind, Tensor};
///
/// let vs = nn::VarStore::new(Device::Cpu);
/// let line = nn::linear(vs.root(), 2, 1, Default::default());
/// let mut optimizer = Sgd::new(parameters(&vs), SgdOptions { lr: 0.1, ..Default::default() })?;
/// let mut scaler = LossScaler::new(ScalePolicy::default(), Device::Cpu)?;
/// let x = Tensor::ones([4, 2], (Kind::Float, Device::Cpu));
/// // The gradient of the bias is 1, and times 65536 more than float16 holds: the first step is skipped.
/// for (made, scale) in [(StepMade::Skipped, 32768.0), (StepMade::Yes, 32768.0)] {
///     let loss = autocast(Device::Cpu, Kind::Half, || line.forward(&x))?.to_kind(Kind::Float).mean(Kind::Float);
///     optimizer.zero_grad()?;
///     let unscaled = scaler.backward(&loss)?.unscale(&scaler, optimizer.parameters())?;
///     let _norm = unscaled.clip_grad_norm(1.0)?;
///     assert_eq!((unscaled.step(&mut scaler, &mut optimizer)?, scaler.scale()?), (made, scale));
/// }
/// # Ok::<(), anyhow::Error>(())
/// ```
#[derive(Debug)]
pub struct LossScaler {
    policy: ScalePolicy,
    at: Scale,
}

/// The saved state of a scaler.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ScalerState {
    /// The scale.
    pub scale: f64,
    /// Steps without overflow since the scale last changed.
    pub growth_tracker: i64,
    /// Overflows until the scale decreases, by DeepSpeed's rule.
    pub hysteresis: i64,
}

impl LossScaler {
    /// Scales losses on `device` by a policy.
    pub fn new(policy: ScalePolicy, device: Device) -> Result<Self, TorchError> {
        policy.check()?;
        let count = |value: i64| Tensor::f_full([], value, (Kind::Int, device));
        Ok(Self {
            at: Scale {
                scale: Tensor::f_full([], policy.init_scale(), (Kind::Float, device))?,
                growth_tracker: count(policy.first_growth_tracker())?,
                hysteresis: count(policy.hysteresis().into())?,
            },
            policy,
        })
    }

    /// Runs backward from the loss times the scale.
    pub fn backward(&self, loss: &Tensor) -> Result<ScaledGrads, TorchError> {
        self.backward_with(loss, |scaled| Ok(scaled.f_backward()?))
    }

    /// The same with a custom backward, such as that of `Ddp`.
    pub fn backward_with<E: From<TorchError>>(
        &self,
        loss: &Tensor,
        backward: impl FnOnce(&Tensor) -> Result<(), E>,
    ) -> Result<ScaledGrads, E> {
        let scaled = loss.f_mul(&self.at.scale).map_err(TorchError::from)?;
        backward(&scaled)?;
        Ok(self.received())
    }

    /// The gradients that a rank without a loss has received by reduction.
    pub fn received(&self) -> ScaledGrads {
        ScaledGrads { made_by_scaler: () }
    }

    /// The scale, read from the device.
    pub fn scale(&self) -> Result<f64, TorchError> {
        Ok(self.at.scale.f_double_value(&[])?)
    }

    /// The state for a later [`load_state`](Self::load_state).
    pub fn state(&self) -> Result<ScalerState, TorchError> {
        Ok(ScalerState {
            scale: self.scale()?,
            growth_tracker: self.at.growth_tracker.f_int64_value(&[])?,
            hysteresis: self.at.hysteresis.f_int64_value(&[])?,
        })
    }

    /// Resumes from a saved state. A static scale does not change.
    pub fn load_state(&mut self, state: &ScalerState) -> Result<(), TorchError> {
        if matches!(self.policy, ScalePolicy::Static(_)) {
            return Ok(());
        }
        if !(state.scale.is_finite() && state.scale >= 0.0) {
            return Err(TorchError::value(
                "the saved loss scale",
                state.scale,
                "a number that is not negative",
            ));
        }
        let _ = self.at.scale.f_fill_(state.scale)?;
        let _ = self.at.growth_tracker.f_fill_(state.growth_tracker)?;
        let _ = self.at.hysteresis.f_fill_(state.hysteresis)?;
        Ok(())
    }

    /// Divides the gradients by the scale; returns `found_inf`.
    fn unscale(&self, grads: &[&Tensor]) -> Result<Tensor, TorchError> {
        // As PyTorch does: the reciprocal of a scale far from 1 is exact only in f64.
        let inv_scale = self.at.scale.f_to_kind(Kind::Double)?.f_reciprocal()?.f_to_kind(Kind::Float)?;
        // Each call has its own tensor: several optimizers may unscale before one of them steps.
        let found_inf = self.at.scale.f_zeros_like()?;
        ffi::unscale(grads, &found_inf, &inv_scale)?;
        Ok(found_inf)
    }

    fn update(&mut self, found_inf: &Tensor) -> Result<(), TorchError> {
        no_grad(|| self.policy.update(&mut self.at, found_inf))
    }
}
