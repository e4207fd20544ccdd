//! Optimizers on fused kernels, with PyTorch's numbers and savable state: [`Sgd`], [`Adagrad`], [`Adam`], [`AdamW`], and
//! with less state or for large batches [`Lion`], [`Adafactor`] and [`Lamb`].
//!
//! ```text
//!   ParameterGroup{lr_factor, weight_decay} ─▶ batches of one rate, device and kind ─▶ one fused call a batch and step
//!   OptimizerState{"conv1.weight.momentum_buffer", …} ◀─ state(), load_state() ─▶ checkpoints
//! ```
//!
//! - `groups`: parameter groups with their own learning rate and weight decay
//! - `trained`: the parameters in batches, with their state
//! - `state`: saving and loading, with all checks first
//! - `sgd`, `adagrad`, `adam`, `lion`, `lamb`, `adafactor`: the steps; `moments`: how Adam keeps its running means
//! - `work`: the tensors of one parameter in a step of our own kernels
//! - `master`: f32 master weights of 16-bit parameters, around any of them; `halves`: split ones
//! - `division`: parameters of which each rank steps some rows
//!
//! Not here: learning rate schedules, which call `set_lr`, and the reduction of gradients over ranks.

mod adafactor;
mod adagrad;
mod adam;
mod boxed;
mod division;
#[cfg(test)]
mod golden;
mod groups;
mod halves;
mod lamb;
mod lion;
mod master;
mod moments;
mod sgd;
mod state;
#[cfg(test)]
mod tests;
mod trained;
mod work;

pub use adafactor::{Adafactor, AdafactorOptions, StepSize};
pub use adagrad::{Adagrad, AdagradOptions};
pub use adam::{Adam, AdamFamily, AdamOptions, AdamW};
pub use division::{Division, OwnRows};
pub use groups::{ParameterGroup, ParameterGroups, no_decay_on_norms};
pub use lamb::{BiasCorrection, Lamb, LambOptions};
pub use lion::{Lion, LionOptions};
pub use master::{MasterKind, MasterWeights};
pub use moments::Moments;
pub use sgd::{Sgd, SgdOptions};
pub use state::{OptimizerState, StateError};

use tch::Tensor;

use crate::error::TorchError;
use crate::fused::StepTensors;
use crate::named::Named;

/// A 16-bit parameter whose f32 copy the optimizer trains.
#[derive(Debug)]
pub struct CopiedParameter<'a> {
    /// The name of the copy among the optimizer's parameters.
    pub name: &'a str,
    /// The parameter.
    pub parameter: &'a Tensor,
    /// Its gradient, of the parameter's kind.
    pub grad: Tensor,
    /// If master weights are split: the low halves. The optimizer then trains the parameter itself, as the high half.
    pub low: Option<&'a Tensor>,
}

/// Updates parameters by their gradients.
///
/// ```
/// use drumline_torch::{Optimizer, Sgd, SgdOptions, parameters};
/// use tch::nn::{self, Module};
/// use tch::{Device, Kind, Tensor};
///
/// let vs = nn::VarStore::new(Device::Cpu);
/// let line = nn::linear(vs.root(), 1, 1, Default::default());
/// let mut optimizer = Sgd::new(parameters(&vs), SgdOptions { lr: 0.1, momentum: 0.5, ..Default::default() })?;
/// let (x, y) = (Tensor::from_slice(&[0f32, 1.0]).view([2, 1]), Tensor::from_slice(&[1f32, 3.0]).view([2, 1]));
/// for _ in 0..200 {
///     let loss = line.forward(&x).mse_loss(&y, tch::Reduction::Mean);
///     optimizer.zero_grad()?;
///     loss.backward();
///     optimizer.step()?;
/// }
/// assert!((line.ws.double_value(&[0, 0]) - 2.0).abs() < 1e-3);
/// # Ok::<(), anyhow::Error>(())
/// ```
pub trait Optimizer: Send {
    /// Updates each parameter that has a gradient. Parameters without a gradient, and their state, do not change.
    fn step(&mut self) -> Result<(), TorchError> {
        self.step_with(StepTensors::default())
    }

    /// A step that reads from tensors on the device whether it is skipped, and by what gradients are divided.
    fn step_with(&mut self, tensors: StepTensors<'_>) -> Result<(), TorchError>;

    /// Steps f32 copies by 16-bit gradients, and rounds the results into the 16-bit parameters, in one pass. Other
    /// parameters make a normal step. Returns false if that is not possible; then no parameter has changed.
    fn step_copies(
        &mut self,
        copies: &[CopiedParameter<'_>],
        tensors: StepTensors<'_>,
    ) -> Result<bool, TorchError> {
        let _ = (copies, tensors);
        Ok(false)
    }

    /// Keeps the learning rate in tensors on the parameters' devices from now on, so that [`set_lr`](Self::set_lr)
    /// works for a captured graph.
    fn keep_lr_on_device(&mut self) -> Result<(), TorchError>;

    /// Refreshes the master copies from parameters that were changed since the last step, if the optimizer keeps
    /// copies. A step does so by itself, but a step in a CUDA graph cannot: call this before the launch.
    fn refresh_master_weights(&mut self) -> Result<(), TorchError> {
        Ok(())
    }

    /// Makes the gradients undefined, as PyTorch's `zero_grad(set_to_none=True)`.
    fn zero_grad(&mut self) -> Result<(), TorchError>;

    /// The learning rate of groups whose factor is 1.
    fn lr(&self) -> f64;

    /// Sets the learning rate; each group multiplies it by its factor.
    fn set_lr(&mut self, lr: f64);

    /// Sets the decay rates of both running means, for schedules that cycle the momentum. Returns false if the optimizer
    /// has none; then nothing changes. If they are not at least 0 and less than 1, returns an error and changes nothing. A
    /// captured graph keeps those with which it was recorded.
    fn set_betas(&mut self, beta1: f64, beta2: f64) -> Result<bool, TorchError> {
        let _ = (beta1, beta2);
        Ok(false)
    }

    /// The parameters, group by group.
    fn parameters(&self) -> Vec<Named>;

    /// Steps other tensors from now on: `replaced` returns what takes the place of a parameter, such as the rows that this
    /// rank owns, or `None` if nothing does here. Called before the first step, and before a state is loaded.
    fn replace_parameters(
        &mut self,
        replaced: &mut dyn FnMut(&Named) -> Option<Tensor>,
    ) -> Result<(), TorchError> {
        let _ = replaced;
        Err(TorchError::Unsupported {
            operation: "step a part of the parameters on each rank",
            reason: "the optimizer does not implement `replace_parameters`; try one of this library's, or ZeRO stage 0",
        })
    }

    /// Steps only the rows that this rank has from now on, as [`replace_parameters`](Self::replace_parameters). An
    /// optimizer whose step depends on more than one element uses the group of ranks for sums over all rows. By default
    /// it does not.
    fn divide(&mut self, division: &Division<'_>) -> Result<(), TorchError> {
        self.replace_parameters(&mut |named| (division.rows)(named).map(|rows| rows.tensor))
    }

    /// What of a step depends on the whole of a parameter, if each of its elements is not stepped by itself. Then a rank
    /// that has a part of the parameter cannot step it. Rows by [`divide`](Self::divide) are no such parts.
    fn needs_whole_tensors(&self) -> Option<&'static str> {
        None
    }

    /// Steps tensors in other memory in the place of some parameters from now on: `twins` returns those, which have the
    /// parameter's shape, kind and layout. Whoever calls it copies gradients to the twin before a step, and its values to
    /// the parameter after it. [`parameters`](Self::parameters) still returns the parameter. Called before the first step,
    /// and before a state is loaded.
    fn step_twins(&mut self, twins: &mut dyn FnMut(&Named) -> Option<Tensor>) -> Result<(), TorchError> {
        let _ = twins;
        Err(TorchError::Unsupported {
            operation: "step parameters in host memory",
            reason: "the optimizer does not implement `step_twins`; try one of this library's, or no offload",
        })
    }

    /// While it is on, steps look at twins alone: other parameters may be in use, and their gradients incomplete. An
    /// optimizer that implements [`step_twins`](Self::step_twins) implements this, too: by default it is an error, which is
    /// returned before training.
    fn limit_to_twins(&mut self, is_on: bool) -> Result<(), TorchError> {
        let _ = is_on;
        Err(TorchError::Unsupported {
            operation: "step parameters in host memory",
            reason: "the optimizer does not implement `limit_to_twins`; try one of this library's, or no offload",
        })
    }

    /// The bytes of state that are on the device already.
    fn held_bytes(&self) -> usize {
        0
    }

    /// Treats parameters in bf16 as the high halves of f32 weights from now on. They are stepped by
    /// [`step_copies`](Self::step_copies), and their state is that of f32 weights.
    fn split_master_weights(&mut self) -> Result<(), TorchError> {
        Err(TorchError::Unsupported {
            operation: "split master weights",
            reason: "this optimizer cannot step them; try Adam, AdamW, Lion, Lamb or Adafactor, or copied master weights",
        })
    }

    /// The state with which [`load_state`](Self::load_state) resumes to the same bits.
    ///
    /// The tensors share memory with the optimizer: the next step changes them. Where ranks divide a parameter by rows,
    /// a tensor of its shape is divided in the same way, and another one of two or more dims has a row for each of its
    /// rows. One with fewer dims is the same on all ranks.
    fn state(&self) -> OptimizerState;

    /// Resumes from a saved state. The tensors are copied. Of the scalars only the learning rate is used; all other
    /// settings of this optimizer stay. If the state does not fit, returns an error and changes nothing.
    fn load_state(&mut self, state: &OptimizerState) -> Result<(), TorchError>;

    /// Like [`load_state`](Self::load_state) for the parameters whose names are `wanted`: the state has tensors of these
    /// only, and other parameters keep theirs. A state that does not fit into memory is loaded in parts.
    fn load_state_of(
        &mut self,
        state: &OptimizerState,
        wanted: &dyn Fn(&str) -> bool,
    ) -> Result<(), TorchError> {
        let _ = (state, wanted);
        Err(TorchError::Unsupported {
            operation: "load a part of an optimizer's state",
            reason: "the optimizer does not implement `load_state_of`; try Sgd, Adam or AdamW",
        })
    }

    /// The bytes of state that a parameter has after its first step. `None` if the optimizer does not say so: then its
    /// state cannot be offloaded.
    fn state_bytes(&self, parameter: &Named) -> Option<usize> {
        let _ = parameter;
        None
    }
}
