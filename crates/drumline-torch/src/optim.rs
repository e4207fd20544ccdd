//! Optimizers on the fused kernels: [`Sgd`], [`Adam`] and [`AdamW`], with PyTorch's numbers and savable state.
//!
//! ```text
//!   ParameterGroup{lr_factor, weight_decay} ─▶ batches of one rate, device and kind ─▶ one fused call a batch and step
//!   OptimizerState{"conv1.weight.momentum_buffer", …} ◀─ state(), load_state() ─▶ checkpoints
//! ```
//!
//! - `groups`: which parameters have rates of their own
//! - `trained`: the parameters in batches, and what is kept for each
//! - `state`: saved and loaded, with everything checked first
//! - `sgd`, `adam`: the steps
//! - `master`: f32 copies of parameters in fewer bits, around any of them
//!
//! Not here: schedules (they call `set_lr`) and the reduction of gradients over ranks.

mod adam;
#[cfg(test)]
mod golden;
mod groups;
mod master;
mod sgd;
mod state;
#[cfg(test)]
mod tests;
mod trained;

pub use adam::{Adam, AdamFamily, AdamOptions, AdamW};
pub use groups::{ParameterGroup, ParameterGroups, no_decay_on_norms};
pub use master::MasterWeights;
pub use sgd::{Sgd, SgdOptions};
pub use state::OptimizerState;

use tch::Tensor;

use crate::error::TorchError;
use crate::fused::StepTensors;
use crate::named::Named;

/// A parameter in fewer bits whose f32 copy an optimizer trains in its place.
#[derive(Debug)]
pub struct CopiedParameter<'a> {
    /// The name of the copy among the optimizer's parameters.
    pub name: &'a str,
    /// The parameter.
    pub parameter: &'a Tensor,
    /// Its gradient, in as many bits.
    pub grad: Tensor,
}

/// What changes parameters by their gradients.
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
    /// Changes each parameter that has a gradient. One that has none stays as it is, and so does what is kept for it.
    fn step(&mut self) -> Result<(), TorchError> {
        self.step_with(StepTensors::default())
    }

    /// A step that is told by tensors on the device whether it is made, and by what gradients are divided.
    fn step_with(&mut self, tensors: StepTensors<'_>) -> Result<(), TorchError>;

    /// A step by gradients of fewer bits than its parameters, which are copies, and the outcome rounded to the parameters that they are copies of, at
    /// once; other parameters are stepped as ever. False where that cannot be done; then no parameter has changed.
    fn step_copies(
        &mut self,
        copies: &[CopiedParameter<'_>],
        tensors: StepTensors<'_>,
    ) -> Result<bool, TorchError> {
        let _ = (copies, tensors);
        Ok(false)
    }

    /// Keeps the learning rate in tensors on the parameters' devices from now on: a captured graph then follows [`set_lr`](Self::set_lr).
    fn keep_lr_on_device(&mut self) -> Result<(), TorchError>;

    /// Takes in what others have changed in the parameters since the last step, where it keeps copies of them. A step does so by itself; one that was
    /// recorded in a graph cannot, so it is done before the launch.
    fn take_in_changes(&mut self) -> Result<(), TorchError> {
        Ok(())
    }

    /// Leaves the parameters without gradients (undefined, not zero).
    fn zero_grad(&mut self) -> Result<(), TorchError>;

    /// The learning rate of groups whose factor is 1.
    fn lr(&self) -> f64;

    /// Sets the learning rate; each group multiplies it by its factor.
    fn set_lr(&mut self, lr: f64);

    /// What is trained, group by group.
    fn parameters(&self) -> Vec<Named>;

    /// What a later [`load_state`](Self::load_state) needs to go on with the same bits.
    ///
    /// The tensors are the optimizer's own: the next step changes them.
    fn state(&self) -> OptimizerState;

    /// Goes on from a saved state. The tensors are copied. Of the scalars only the learning rate is taken; all other
    /// settings stay as they were given to this optimizer. Refuses, and changes nothing, if the state does not fit.
    fn load_state(&mut self, state: &OptimizerState) -> Result<(), TorchError>;
}
