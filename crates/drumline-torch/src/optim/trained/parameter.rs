//! A parameter that an optimizer steps, and its state.

use tch::Tensor;

use super::{Ready, gradient_of};
use crate::cuda::is_recorded;
use crate::error::TorchError;
use crate::named::Named;
use crate::recordable::NotRecordable;

/// A parameter and its state.
#[derive(Debug)]
pub(in crate::optim) struct Parameter {
    pub(in crate::optim) named: Named,
    /// One tensor for each of the optimizer's slots; empty until the parameter's first step.
    pub(in crate::optim) kept: Vec<Tensor>,
    /// Its index among all parameters, the same on all ranks.
    pub(in crate::optim) index: usize,
    /// The shape of the whole parameter, of which `named` may have some rows.
    pub(in crate::optim) whole: Vec<i64>,
    /// The index of the first of these rows.
    pub(super) first_row: i64,
    /// The parameter, if `named` is its twin.
    pub(super) of_twin: Option<Tensor>,
}

impl Parameter {
    /// As the program knows it.
    pub(super) fn of_program(&self) -> Named {
        let Named { name, tensor } = &self.named;
        Named { name: name.clone(), tensor: self.of_twin.as_ref().unwrap_or(tensor).shallow_clone() }
    }

    /// The index of its first element in the whole parameter.
    pub(in crate::optim) fn first_element(&self) -> u64 {
        let row_len: i64 = self.whole.iter().skip(1).product();
        (self.first_row * row_len) as u64
    }

    pub(super) fn ready(&self, place: usize) -> Result<Option<Ready>, TorchError> {
        Ok(gradient_of(&self.named)?.map(|grad| Ready { place, grad }))
    }

    /// An error if this first step is recorded in a CUDA graph: each launch would reset the state.
    pub(in crate::optim) fn check_first_step(&self) -> Result<(), TorchError> {
        let Named { name, tensor } = &self.named;
        if is_recorded(tensor.device())? {
            return Err(NotRecordable::FirstStep { parameter: name.clone() }.into());
        }
        Ok(())
    }
}
