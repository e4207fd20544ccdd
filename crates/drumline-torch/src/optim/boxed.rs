//! An optimizer whose type is not known when a program is compiled, such as one that a configuration names.

use tch::Tensor;

use super::{CopiedParameter, Division, Optimizer, OptimizerState};
use crate::error::TorchError;
use crate::fused::StepTensors;
use crate::named::Named;

// A default of the trait would hide the optimizer's own method.
#[deny(clippy::missing_trait_methods)]
impl<O: Optimizer + ?Sized> Optimizer for Box<O> {
    fn step(&mut self) -> Result<(), TorchError> {
        (**self).step()
    }

    fn step_with(&mut self, tensors: StepTensors<'_>) -> Result<(), TorchError> {
        (**self).step_with(tensors)
    }

    fn step_copies(
        &mut self,
        copies: &[CopiedParameter<'_>],
        tensors: StepTensors<'_>,
    ) -> Result<bool, TorchError> {
        (**self).step_copies(copies, tensors)
    }

    fn keep_lr_on_device(&mut self) -> Result<(), TorchError> {
        (**self).keep_lr_on_device()
    }

    fn refresh_master_weights(&mut self) -> Result<(), TorchError> {
        (**self).refresh_master_weights()
    }

    fn zero_grad(&mut self) -> Result<(), TorchError> {
        (**self).zero_grad()
    }

    fn lr(&self) -> f64 {
        (**self).lr()
    }

    fn set_lr(&mut self, lr: f64) {
        (**self).set_lr(lr);
    }

    fn set_betas(&mut self, beta1: f64, beta2: f64) -> Result<bool, TorchError> {
        (**self).set_betas(beta1, beta2)
    }

    fn parameters(&self) -> Vec<Named> {
        (**self).parameters()
    }

    fn needs_whole_tensors(&self) -> Option<&'static str> {
        (**self).needs_whole_tensors()
    }

    fn replace_parameters(
        &mut self,
        replaced: &mut dyn FnMut(&Named) -> Option<Tensor>,
    ) -> Result<(), TorchError> {
        (**self).replace_parameters(replaced)
    }

    fn divide(&mut self, division: &Division<'_>) -> Result<(), TorchError> {
        (**self).divide(division)
    }

    fn step_twins(&mut self, twins: &mut dyn FnMut(&Named) -> Option<Tensor>) -> Result<(), TorchError> {
        (**self).step_twins(twins)
    }

    fn limit_to_twins(&mut self, is_on: bool) -> Result<(), TorchError> {
        (**self).limit_to_twins(is_on)
    }

    fn held_bytes(&self) -> usize {
        (**self).held_bytes()
    }

    fn split_master_weights(&mut self) -> Result<(), TorchError> {
        (**self).split_master_weights()
    }

    fn state(&self) -> OptimizerState {
        (**self).state()
    }

    fn load_state(&mut self, state: &OptimizerState) -> Result<(), TorchError> {
        (**self).load_state(state)
    }

    fn load_state_of(
        &mut self,
        state: &OptimizerState,
        wanted: &dyn Fn(&str) -> bool,
    ) -> Result<(), TorchError> {
        (**self).load_state_of(state, wanted)
    }

    fn state_bytes(&self, parameter: &Named) -> Option<usize> {
        (**self).state_bytes(parameter)
    }
}
