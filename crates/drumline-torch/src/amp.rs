//! Loss scaling, for forward passes in float16: small gradients would become zero there, so the loss is multiplied before backward, and the
//! gradients are divided after it.
//!
//! ```text
//!   loss × scale ─ backward ─▶ ScaledGrads ─ unscale ─▶ Unscaled{found_inf} ─ clip, step ─▶ parameters, unless found_inf
//!                                                           │
//!   scale ◀─ grows after many good steps, shrinks after a bad one ◀┘                         policy
//! ```
//! Scale and `found_inf` stay on the device, so a captured graph has the whole of it. Only unscaled gradients can be clipped or stepped by.
//!
//! - `policy`: how the scale moves, as PyTorch's or as DeepSpeed's
//! - `grads`: what may be done with gradients, and when

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

/// Multiplies losses, divides gradients, and finds the scale at which nothing is lost.
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

/// What a scaler goes on from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ScalerState {
    /// The scale.
    pub scale: f64,
    /// Steps without overflow since it last moved.
    pub growth_tracker: i64,
    /// The overflow at which it goes down, by DeepSpeed's rule.
    pub hysteresis: i64,
}

impl LossScaler {
    /// Scales losses on `device` by a rule.
    pub fn new(policy: ScalePolicy, device: Device) -> Result<Self, TorchError> {
        policy.check()?;
        let count = |value: i64| Tensor::f_full([], value, (Kind::Int, device));
        Ok(Self {
            at: Scale {
                scale: Tensor::f_full([], policy.init_scale(), (Kind::Float, device))?,
                growth_tracker: count(0)?,
                hysteresis: count(policy.hysteresis().into())?,
            },
            policy,
        })
    }

    /// Backward from the loss times the scale.
    pub fn backward(&self, loss: &Tensor) -> Result<ScaledGrads, TorchError> {
        self.backward_with(loss, |scaled| Ok(scaled.f_backward()?))
    }

    /// The same by a backward of choice, such as that of `Ddp`.
    pub fn backward_with<E: From<TorchError>>(
        &self,
        loss: &Tensor,
        backward: impl FnOnce(&Tensor) -> Result<(), E>,
    ) -> Result<ScaledGrads, E> {
        let scaled = loss.f_mul(&self.at.scale).map_err(TorchError::from)?;
        backward(&scaled)?;
        Ok(self.received())
    }

    /// Gradients that other ranks' backwards have left here, where this one had no loss.
    pub fn received(&self) -> ScaledGrads {
        ScaledGrads { made_by_scaler: () }
    }

    /// The scale, read from the device.
    pub fn scale(&self) -> Result<f64, TorchError> {
        Ok(self.at.scale.f_double_value(&[])?)
    }

    /// What a later [`load_state`](Self::load_state) goes on from.
    pub fn state(&self) -> Result<ScalerState, TorchError> {
        Ok(ScalerState {
            scale: self.scale()?,
            growth_tracker: self.at.growth_tracker.f_int64_value(&[])?,
            hysteresis: self.at.hysteresis.f_int64_value(&[])?,
        })
    }

    /// Goes on from a saved state; a static scale stays as it was given.
    pub fn load_state(&mut self, state: &ScalerState) -> Result<(), TorchError> {
        if matches!(self.policy, ScalePolicy::Static(_)) {
            return Ok(());
        }
        if !(state.scale.is_finite() && state.scale >= 0.0) {
            return Err(TorchError::Unfit(format!(
                "the saved loss scale is {}; expected a number",
                state.scale
            )));
        }
        let _ = self.at.scale.f_fill_(state.scale)?;
        let _ = self.at.growth_tracker.f_fill_(state.growth_tracker)?;
        let _ = self.at.hysteresis.f_fill_(state.hysteresis)?;
        Ok(())
    }

    /// Divides the gradients by the scale; returns what was found.
    fn unscale(&self, grads: &[&Tensor]) -> Result<Tensor, TorchError> {
        // As PyTorch: the reciprocal of a scale far from 1 is exact in f64 only.
        let inv_scale = self.at.scale.f_to_kind(Kind::Double)?.f_reciprocal()?.f_to_kind(Kind::Float)?;
        // Each has its own: several optimizers may unscale before one of them steps.
        let found_inf = self.at.scale.f_zeros_like()?;
        ffi::unscale(grads, &found_inf, &inv_scale)?;
        Ok(found_inf)
    }

    fn update(&mut self, found_inf: &Tensor) -> Result<(), TorchError> {
        no_grad(|| self.policy.update(&mut self.at, found_inf))
    }
}
