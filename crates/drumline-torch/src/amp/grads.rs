//! Gradients of a scaled loss. The types ensure that they are unscaled before they are clipped or used in a step.

use drumline_comm::{ProcessGroup, ReduceOp};
use tch::{Kind, Tensor};

use super::LossScaler;
use crate::clip::{clip_grad_norm_on_device, clip_grad_value};
use crate::collectives::TensorCollectives;
use crate::error::TorchError;
use crate::fused::StepTensors;
use crate::grad::grad;
use crate::named::Named;
use crate::optim::Optimizer;

/// The parameters have gradients of a scaled loss, which are too large by the scale. The only possible operation is
/// [`unscale`](Self::unscale).
///
/// ```compile_fail,E0599
/// # use drumline_torch::{LossScaler, Optimizer, TorchError};
/// # use tch::Tensor;
/// fn clip_first(scaler: &mut LossScaler, loss: &Tensor) -> Result<(), TorchError> {
///     let scaled = scaler.backward(loss)?;
///     let _norm = scaled.clip_grad_norm(1.0)?; // there is no such method: the norm would include the scale
///     Ok(())
/// }
/// ```
///
/// ```
/// # use drumline_torch::{LossScaler, Optimizer, TorchError};
/// # use tch::Tensor;
/// fn unscale_first(scaler: &mut LossScaler, optimizer: &mut dyn Optimizer, loss: &Tensor) -> Result<(), TorchError> {
///     let unscaled = scaler.backward(loss)?.unscale(scaler, optimizer.parameters())?;
///     let _norm = unscaled.clip_grad_norm(1.0)?;
///     unscaled.step(scaler, optimizer)?;
///     Ok(())
/// }
/// ```
#[derive(Debug)]
#[must_use = "gradients are too large by the loss scale until they are unscaled"]
pub struct ScaledGrads {
    /// Only a scaler can make this value.
    pub(super) made_by_scaler: (),
}

impl ScaledGrads {
    /// Combines them with those of another backward, which autograd has added to the same gradients.
    pub fn and(self, _other: Self) -> Self {
        self
    }

    /// Divides the gradients of these parameters by the scale, and looks for infinite values and NaN.
    pub fn unscale(self, scaler: &LossScaler, parameters: Vec<Named>) -> Result<Unscaled, TorchError> {
        let Self { made_by_scaler: () } = self;
        let mut grads = Vec::with_capacity(parameters.len());
        for Named { name, tensor } in &parameters {
            let Some(grad) = grad(tensor)? else { continue };
            if grad.kind() == Kind::Half {
                return Err(TorchError::Kind {
                    what: format!("the gradient of `{name}`"),
                    expected: "Float, because small values become 0 in Half when they are unscaled; \
                               try weights in Float, with autocast to Half"
                        .to_owned(),
                    got: "Half".to_owned(),
                });
            }
            grads.push(grad);
        }
        let found_inf = scaler.unscale(&grads.iter().collect::<Vec<_>>())?;
        Ok(Unscaled { parameters, found_inf })
    }
}

/// Gradients of the loss itself, unless they have overflowed.
#[derive(Debug)]
#[must_use = "a step updates the scale"]
pub struct Unscaled {
    parameters: Vec<Named>,
    /// 1 if an element is infinite or NaN, 0 otherwise.
    found_inf: Tensor,
}

/// Whether the optimizer made a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StepMade {
    /// It made a step.
    Yes,
    /// Gradients had overflowed: only the scale changed.
    Skipped,
}

impl Unscaled {
    /// Agrees on overflow with all ranks, so that they step together or not at all. Every rank calls it.
    #[track_caller]
    pub fn agree(&mut self, group: &ProcessGroup) -> Result<(), TorchError> {
        if group.size() == 1 {
            return Ok(()); // On a GPU the call would need NCCL.
        }
        group.all_reduce_tensor(&mut self.found_inf, ReduceOp::Max)
    }

    /// Combines them with those of other parameters of the same backward, so that the scale is updated once.
    pub fn and(mut self, mut other: Self) -> Result<Self, TorchError> {
        self.parameters.append(&mut other.parameters);
        let other = other.found_inf.f_to_device(self.found_inf.device())?;
        Ok(Self { found_inf: self.found_inf.f_maximum(&other)?, ..self })
    }

    /// A tensor on the device: 1 if an element is infinite or NaN, 0 otherwise.
    pub fn found_inf(&self) -> &Tensor {
        &self.found_inf
    }

    /// Whether an element is infinite or NaN; waits for the device.
    pub fn has_overflowed(&self) -> Result<bool, TorchError> {
        Ok(self.found_inf.f_double_value(&[])? > 0.0)
    }

    /// The parameters whose gradients were unscaled.
    pub fn parameters(&self) -> &[Named] {
        &self.parameters
    }

    /// See [`clip_grad_norm_on_device`].
    pub fn clip_grad_norm(&self, max_norm: f64) -> Result<Tensor, TorchError> {
        clip_grad_norm_on_device(&self.parameters, max_norm)
    }

    /// See [`clip_grad_value`].
    pub fn clip_grad_value(&self, max_value: f64) -> Result<(), TorchError> {
        clip_grad_value(&self.parameters, max_value)
    }

    /// Makes a step unless gradients have overflowed, and updates the scale.
    pub fn step(
        self,
        scaler: &mut LossScaler,
        optimizer: &mut dyn Optimizer,
    ) -> Result<StepMade, TorchError> {
        let made = self.step_alone(optimizer)?;
        scaler.update(&self.found_inf)?;
        Ok(made)
    }

    /// Makes a step unless gradients have overflowed. The scale does not change, so that other optimizers of the same
    /// backward can step; [`update`](Self::update) updates it.
    pub fn step_alone(&self, optimizer: &mut dyn Optimizer) -> Result<StepMade, TorchError> {
        if self.has_overflowed()? {
            return Ok(StepMade::Skipped);
        }
        optimizer.step()?;
        Ok(StepMade::Yes)
    }

    /// Like [`step`](Self::step), without waiting for the device, so that a graph can capture it: the kernels read
    /// `found_inf` and skip the step by themselves.
    pub fn step_on_device(
        self,
        scaler: &mut LossScaler,
        optimizer: &mut dyn Optimizer,
    ) -> Result<(), TorchError> {
        optimizer.step_with(StepTensors { found_inf: Some(&self.found_inf), ..StepTensors::default() })?;
        scaler.update(&self.found_inf)
    }

    /// Updates the scale without waiting for the device. The caller decides whether to make the step. Returns
    /// `found_inf` and the new scale as tensors on the device, which each replay of a captured graph refreshes.
    pub fn update(self, scaler: &mut LossScaler) -> Result<(Tensor, Tensor), TorchError> {
        scaler.update(&self.found_inf)?;
        Ok((self.found_inf, scaler.at.scale.shallow_clone()))
    }
}
