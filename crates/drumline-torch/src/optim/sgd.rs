//! Stochastic gradient descent with momentum, dampening, Nesterov momentum and weight decay, as `torch.optim.SGD`.

use tch::Tensor;

use super::groups::ParameterGroups;
use super::state::{Layout, Like, OptimizerState, Slot};
use super::trained::{CopyStep, Parameter, Ready, Trained, grads, methods_of_trained, not_negative};
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
    /// Momentum.
    pub momentum: f64,
    /// Dampening of the momentum, from a parameter's second step on.
    pub dampening: f64,
    /// Whether to use Nesterov momentum.
    pub nesterov: bool,
    /// Weight decay, which adds a part of the parameter to its gradient.
    pub weight_decay: f64,
    /// Whether to maximize instead of minimize.
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
            return Err(TorchError::value("the dampening", self.dampening, "a finite number"));
        }
        if self.nesterov && (self.momentum == 0.0 || self.dampening != 0.0) {
            let got = format!("({}, {})", self.momentum, self.dampening);
            let expected = "a positive momentum and a dampening of 0, which nesterov needs";
            return Err(TorchError::value("(momentum, dampening)", got, expected));
        }
        Ok(())
    }
}

const KIND: &str = "sgd";

/// SGD on the fused kernel.
#[derive(Debug)]
pub struct Sgd {
    trained: Trained,
    options: SgdOptions,
}

impl Sgd {
    /// Trains parameters, or parameter groups.
    pub fn new(parameters: impl Into<ParameterGroups>, options: SgdOptions) -> Result<Self, TorchError> {
        options.check()?;
        let trained = Trained::new(parameters.into(), options.lr, options.weight_decay)?;
        Ok(Self { trained, options })
    }

    fn slots(&self) -> &'static [Slot] {
        const MOMENTUM: &[Slot] = &[Slot::new("momentum_buffer", Like::Parameter)];
        if self.options.momentum == 0.0 { &[] } else { MOMENTUM }
    }

    fn step_batch(
        &mut self,
        batch: usize,
        ready: Vec<Ready>,
        tensors: StepTensors<'_>,
    ) -> Result<(), TorchError> {
        if self.options.momentum == 0.0 {
            self.run(batch, &ready, Buffers::None, tensors)
        } else {
            self.step_with_momentum(batch, ready, tensors)
        }
    }

    /// A parameter's first step is a separate call, which fills the buffer. The buffer is kept only if the call
    /// succeeds. A first step that the device skips leaves zeros, which the next step treats the same, because there is
    /// no dampening then.
    fn step_with_momentum(
        &mut self,
        batch: usize,
        ready: Vec<Ready>,
        tensors: StepTensors<'_>,
    ) -> Result<(), TorchError> {
        let held = &self.trained.batches[batch];
        let is_known = |ready: &Ready| !held.parameters[ready.place].kept.is_empty();
        let (known, new): (Vec<_>, Vec<_>) = ready.into_iter().partition(is_known);
        new.iter().try_for_each(|ready| held.parameters[ready.place].check_first_step())?;
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
            let expected =
                "0, because a step that the device may skip cannot know whether it is a parameter's first";
            return Err(TorchError::value("the dampening", self.options.dampening, expected));
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
        let rule = Rule::Sgd { momentum, nesterov };
        let slots = self.slots();
        let step = CopyStep { slots: &|_| slots, rule, maximize, found_inf: tensors.found_inf };
        // With buffers of zeros a step equals a first step, because there is no dampening.
        let rest = self.trained.step_copies(copies, step)?;
        let Some(rest) = rest else { return Ok(false) };
        let mut rest = rest.into_iter().enumerate();
        rest.try_for_each(|(batch, ready)| self.step_batch(batch, ready, tensors))?;
        Ok(true)
    }

    fn keep_lr_on_device(&mut self) -> Result<(), TorchError> {
        self.trained.keep_lr_on_device()
    }

    methods_of_trained!();

    fn state(&self) -> OptimizerState {
        let SgdOptions { momentum, dampening, nesterov, weight_decay, maximize, .. } = self.options;
        let scalars = [
            ("momentum", momentum),
            ("dampening", dampening),
            ("nesterov", f64::from(u8::from(nesterov))),
            ("weight_decay", weight_decay),
            ("maximize", f64::from(u8::from(maximize))),
        ];
        let slots = |_: &Parameter| self.slots();
        Layout { kind: KIND, slots: &slots }.save(&self.trained, &scalars)
    }

    fn load_state(&mut self, state: &OptimizerState) -> Result<(), TorchError> {
        self.load_state_of(state, &|_| true)
    }

    fn load_state_of(
        &mut self,
        state: &OptimizerState,
        wanted: &dyn Fn(&str) -> bool,
    ) -> Result<(), TorchError> {
        let slots = self.slots();
        Layout { kind: KIND, slots: &|_| slots }.load(&mut self.trained, state, wanted)
    }

    fn state_bytes(&self, parameter: &Named) -> Option<usize> {
        let slots = self.slots();
        Layout { kind: KIND, slots: &|_| slots }.state_bytes(&self.trained, parameter)
    }
}

/// The momentum buffers of a call.
#[derive(Clone, Copy)]
enum Buffers<'a> {
    /// There is no momentum.
    None,
    /// They are filled.
    Known(&'a [&'a Tensor]),
    /// They become the gradient: this is the parameters' first step.
    New(&'a [&'a Tensor]),
}
