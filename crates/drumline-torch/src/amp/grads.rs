//! Gradients of a scaled loss, and what may be done with them: they are unscaled first, and only then clipped or stepped by.

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

/// Parameters have gradients of a scaled loss, larger by the scale: nothing can be done with them but [`unscale`](Self::unscale).
///
/// ```compile_fail,E0599
/// # use drumline_torch::{LossScaler, Optimizer, TorchError};
/// # use tch::Tensor;
/// fn clip_first(scaler: &mut LossScaler, loss: &Tensor) -> Result<(), TorchError> {
///     let scaled = scaler.backward(loss)?;
///     let _norm = scaled.clip_grad_norm(1.0)?; // there is no such method: the norm would be that of the scale
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
    /// Only a scaler makes one.
    pub(super) made_by_scaler: (),
}

impl ScaledGrads {
    /// These and those of another backward, which were added to them.
    pub fn and(self, _other: Self) -> Self {
        self
    }

    /// Divides the gradients of these parameters by the scale, and looks for infinite ones and NaN.
    pub fn unscale(self, scaler: &LossScaler, parameters: Vec<Named>) -> Result<Unscaled, TorchError> {
        let Self { made_by_scaler: () } = self;
        let mut grads = Vec::with_capacity(parameters.len());
        for Named { name, tensor } in &parameters {
            let Some(grad) = grad(tensor)? else { continue };
            if grad.kind() == Kind::Half {
                return Err(TorchError::Unfit(format!(
                    "the gradient of `{name}` is of kind Half, in which it would be lost when it is unscaled; \
                     try weights in Float, with autocast to Half"
                )));
            }
            grads.push(grad);
        }
        let found_inf = scaler.unscale(&grads.iter().collect::<Vec<_>>())?;
        Ok(Unscaled { parameters, found_inf })
    }
}

/// Gradients as those of the loss itself, unless they have overflowed.
#[derive(Debug)]
#[must_use = "a step moves the scale on"]
pub struct Unscaled {
    parameters: Vec<Named>,
    /// 1 if an element is infinite or NaN, 0 otherwise.
    found_inf: Tensor,
}

/// Whether a step was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StepMade {
    /// It was.
    Yes,
    /// Gradients had overflowed: nothing was changed but the scale.
    Skipped,
}

impl Unscaled {
    /// What one rank has found, all have: they step together or not at all. Every rank calls it.
    #[track_caller]
    pub fn agree(&mut self, group: &ProcessGroup) -> Result<(), TorchError> {
        if group.size() == 1 {
            return Ok(()); // On a GPU the call would need NCCL, for nothing.
        }
        group.all_reduce_tensor(&mut self.found_inf, ReduceOp::Max)
    }

    /// These and those of other parameters, of the same backward: the scale moves on once for all.
    pub fn and(mut self, mut other: Self) -> Result<Self, TorchError> {
        self.parameters.append(&mut other.parameters);
        let other = other.found_inf.f_to_device(self.found_inf.device())?;
        Ok(Self { found_inf: self.found_inf.f_maximum(&other)?, ..self })
    }

    /// What was found, on the device: 1 if an element is infinite or NaN, 0 otherwise.
    pub fn found_inf(&self) -> &Tensor {
        &self.found_inf
    }

    /// The same, read from the device.
    pub fn has_overflowed(&self) -> Result<bool, TorchError> {
        Ok(self.found_inf.f_double_value(&[])? > 0.0)
    }

    /// Those whose gradients they are.
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

    /// A step, unless gradients have overflowed; and the scale for the next one.
    pub fn step(
        self,
        scaler: &mut LossScaler,
        optimizer: &mut dyn Optimizer,
    ) -> Result<StepMade, TorchError> {
        let made = self.step_alone(optimizer)?;
        scaler.update(&self.found_inf)?;
        Ok(made)
    }

    /// A step, unless gradients have overflowed; the scale stays, for other optimizers of the same backward. [`update`](Self::update) moves it on.
    pub fn step_alone(&self, optimizer: &mut dyn Optimizer) -> Result<StepMade, TorchError> {
        if self.has_overflowed()? {
            return Ok(StepMade::Skipped);
        }
        optimizer.step()?;
        Ok(StepMade::Yes)
    }

    /// The same without a wait for the device, so that a graph can capture it: the kernels find out by themselves whether the step is made.
    pub fn step_on_device(
        self,
        scaler: &mut LossScaler,
        optimizer: &mut dyn Optimizer,
    ) -> Result<(), TorchError> {
        optimizer.step_with(StepTensors { found_inf: Some(&self.found_inf), ..StepTensors::default() })?;
        scaler.update(&self.found_inf)
    }

    /// Moves the scale on for the next step, without a wait for the device, and leaves it to the caller to make this one or to leave it out. Returns what
    /// was found and the new scale, on the device, where a captured graph fills them anew.
    pub fn update(self, scaler: &mut LossScaler) -> Result<(Tensor, Tensor), TorchError> {
        scaler.update(&self.found_inf)?;
        Ok((self.found_inf, scaler.at.scale.shallow_clone()))
    }
}
