//! Moves the variables of a model to the device on which it trains.

use drumline_torch::Optimizer;
use tch::nn::VarStore;
use tch::{Device, Tensor, no_grad};

use super::Result;

/// Whether a model was moved after its optimizer was created.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Moved {
    Yes,
    No,
}

impl Moved {
    /// Lets an optimizer step parameters that were moved: its master weights belong beside them.
    pub(crate) fn adopt(self, optimizer: &mut dyn Optimizer) -> Result {
        match self {
            Self::Yes => Ok(optimizer.replace_parameters(&mut |named| Some(named.tensor.shallow_clone()))?),
            Self::No => Ok(()),
        }
    }
}

/// Moves all variables that are not on the device, except for those of `left`.
pub(crate) fn move_to(store: &VarStore, device: Device, left: impl Fn(&str) -> bool) -> Result<Moved> {
    let mut moved = Moved::No;
    for (name, variable) in store.variables() {
        if variable.device() != device && !left(&name) {
            move_variable(&variable, device)?;
            moved = Moved::Yes;
        }
    }
    Ok(moved)
}

/// All handles of the tensor see it on the device.
fn move_variable(variable: &Tensor, device: Device) -> Result {
    let there = no_grad(|| variable.f_detach()?.f_to_device(device))?;
    Ok(variable.shallow_clone().f_set_data(&there)?)
}
