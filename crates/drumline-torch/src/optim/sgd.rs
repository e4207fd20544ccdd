//! Stochastic gradient descent with momentum, dampening, Nesterov's look ahead and weight decay, as `torch.optim.SGD`.

use tch::Tensor;

use super::groups::ParameterGroups;
use super::state::{Layout, OptimizerState};
use super::trained::{Ready, Trained, grads, not_negative};
use super::{CopiedParameter, Optimizer};
use crate::error::TorchError;
use crate::fused::{FusedSgd, StepTensors};
use crate::kernels::Rule;
use crate::named::Named;

/// Settings of [`Sgd`]; the defaults are PyTorch's.
#[derive(Debug, Clone, PartialEq)]
pub struct SgdOptions {
    /// Learning rate.
    pub lr: f64,
    /// How much of the momentum buffer is kept from step to step.
    pub momentum: f64,
    /// How much of a gradient is kept out of the buffer, from a parameter's second step on.
    pub dampening: f64,
    /// Whether a step looks ahead by the momentum.
    pub nesterov: bool,
    /// How much of a parameter is added to its gradient.
    pub weight_decay: f64,
    /// Whether steps go up instead of down.
    pub maximize: bool,
}

impl Default for SgdOptions {
    fn default() -> Self {
        Self { lr: 1e-3, momentum: 0.0, dampening: 0.0, nesterov: false, weight_decay: 0.0, maximize: false }
    }
}

impl SgdOptions {
    fn check(&self) -> Result<(), TorchError> {
        not_negative("the momentum", self.momentum)?;
        if !self.dampening.is_finite() {
            return Err(TorchError::Unfit(format!("the dampening is {}; expected a number", self.dampening)));
        }
        if self.nesterov && (self.momentum == 0.0 || self.dampening != 0.0) {
            return Err(TorchError::Unfit(format!(
                "nesterov needs a momentum and no dampening; got momentum {} and dampening {}",
                self.momentum, self.dampening
            )));
        }
        Ok(())
    }
}

/// SGD on the fused kernel.
#[derive(Debug)]
pub struct Sgd {
    trained: Trained,
    options: SgdOptions,
}

impl Sgd {
    /// Trains some parameters, or groups of them.
    pub fn new(parameters: impl Into<ParameterGroups>, options: SgdOptions) -> Result<Self, TorchError> {
        options.check()?;
        let trained = Trained::new(parameters.into(), options.lr, options.weight_decay)?;
        Ok(Self { trained, options })
    }

    fn layout(&self) -> Layout {
        let slots: &[&str] = if self.options.momentum == 0.0 { &[] } else { &["momentum_buffer"] };
        Layout { kind: "sgd", slots }
    }

    fn step_batch(
        &mut self,
        batch: usize,
        ready: Vec<Ready>,
        tensors: StepTensors<'_>,
    ) -> Result<(), TorchError> {
        match self.options.momentum == 0.0 {
            true => self.run(batch, &ready, Buffers::None, tensors),
            false => self.step_with_momentum(batch, ready, tensors),
        }
    }

    /// A parameter's first step is another call: it fills the buffer, which is kept only if that went well. One that is left out on the device leaves
    /// zeros, from which the next step makes the same of them, as there is no dampening then.
    fn step_with_momentum(
        &mut self,
        batch: usize,
        ready: Vec<Ready>,
        tensors: StepTensors<'_>,
    ) -> Result<(), TorchError> {
        let held = &self.trained.batches[batch];
        let is_known = |ready: &Ready| !held.parameters[ready.place].kept.is_empty();
        let (known, new): (Vec<_>, Vec<_>) = ready.into_iter().partition(is_known);
        new.iter().try_for_each(|ready| held.parameters[ready.place].check_begin())?;
        self.run(batch, &known, Buffers::Known(&held.kept(&known, 0)), tensors)?;
        let made: Vec<_> = held.tensors(&new).into_iter().map(Tensor::zeros_like).collect();
        self.run(batch, &new, Buffers::New(&made.iter().collect::<Vec<_>>()), tensors)?;
        for (ready, buffer) in new.iter().zip(made) {
            self.trained.batches[batch].parameters[ready.place].kept = vec![buffer];
        }
        Ok(())
    }

    fn run(
        &self,
        batch: usize,
        ready: &[Ready],
        buffers: Buffers<'_>,
        tensors: StepTensors<'_>,
    ) -> Result<(), TorchError> {
        let batch = &self.trained.batches[batch];
        let (momentum_buffers, is_first_step) = match buffers {
            Buffers::None => (&[][..], false),
            Buffers::Known(buffers) => (buffers, false),
            Buffers::New(buffers) => (buffers, true),
        };
        FusedSgd {
            params: &batch.tensors(ready),
            grads: &grads(ready),
            momentum_buffers,
            lr: self.trained.lr_of(batch),
            momentum: self.options.momentum,
            dampening: self.options.dampening,
            weight_decay: batch.weight_decay,
            nesterov: self.options.nesterov,
            maximize: self.options.maximize,
            is_first_step,
            tensors,
        }
        .run()
    }
}

impl Optimizer for Sgd {
    fn step_with(&mut self, tensors: StepTensors<'_>) -> Result<(), TorchError> {
        if tensors.found_inf.is_some() && self.options.dampening != 0.0 {
            return Err(TorchError::Unfit(format!(
                "the dampening is {}, and a step that may be left out on the device does not know which one is a parameter's first; \
                 try a dampening of 0",
                self.options.dampening
            )));
        }
        let mut ready = self.trained.ready()?.into_iter().enumerate();
        ready.try_for_each(|(batch, ready)| self.step_batch(batch, ready, tensors))
    }

    fn step_copies(
        &mut self,
        copies: &[CopiedParameter<'_>],
        tensors: StepTensors<'_>,
    ) -> Result<bool, TorchError> {
        if tensors.grad_scale.is_some() || self.options.dampening != 0.0 {
            return Ok(false);
        }
        let SgdOptions { momentum, nesterov, maximize, .. } = self.options;
        let (slots, rule) = (self.layout().slots, Rule::Sgd { momentum, nesterov });
        // Buffers of zeros come to the same as a first step, as there is no dampening.
        let rest = self.trained.step_copies(copies, slots, (rule, maximize), tensors.found_inf)?;
        let Some(rest) = rest else { return Ok(false) };
        let mut rest = rest.into_iter().enumerate();
        rest.try_for_each(|(batch, ready)| self.step_batch(batch, ready, tensors))?;
        Ok(true)
    }

    fn zero_grad(&mut self) -> Result<(), TorchError> {
        self.trained.zero_grad()
    }

    fn keep_lr_on_device(&mut self) -> Result<(), TorchError> {
        self.trained.keep_lr_on_device()
    }

    fn lr(&self) -> f64 {
        self.trained.lr()
    }

    fn set_lr(&mut self, lr: f64) {
        self.trained.set_lr(lr);
    }

    fn parameters(&self) -> Vec<Named> {
        self.trained.named()
    }

    fn state(&self) -> OptimizerState {
        let SgdOptions { momentum, dampening, nesterov, weight_decay, maximize, .. } = self.options;
        let scalars = [
            ("momentum", momentum),
            ("dampening", dampening),
            ("nesterov", f64::from(u8::from(nesterov))),
            ("weight_decay", weight_decay),
            ("maximize", f64::from(u8::from(maximize))),
        ];
        self.layout().save(&self.trained, &scalars)
    }

    fn load_state(&mut self, state: &OptimizerState) -> Result<(), TorchError> {
        self.layout().load(&mut self.trained, state)
    }
}

/// The momentum buffers of a call.
enum Buffers<'a> {
    /// There is no momentum.
    None,
    /// They hold something.
    Known(&'a [&'a Tensor]),
    /// They become the gradient: this is the parameters' first step.
    New(&'a [&'a Tensor]),
}
