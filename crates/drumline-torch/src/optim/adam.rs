//! Adam and AdamW, optionally with AMSGrad, as `torch.optim.Adam` and `torch.optim.AdamW`.
//!
//! They differ in one thing: Adam adds the weight decay to the gradient, AdamW subtracts it from the parameter.

use super::groups::ParameterGroups;
use super::state::{Layout, OptimizerState, STEP};
use super::trained::{CopyStep, Ready, Trained, grads, methods_of_trained, not_negative};
use super::{CopiedParameter, Optimizer};
use crate::error::TorchError;
use crate::fused::{FusedAdam, StepTensors, WeightDecay};
use crate::kernels::Rule;

/// Adam: the weight decay is added to the gradient.
pub type Adam = AdamFamily<false>;

/// AdamW: the weight decay is subtracted from the parameter.
pub type AdamW = AdamFamily<true>;

/// Settings of [`Adam`] and [`AdamW`]; the defaults are PyTorch's.
#[derive(Debug, Clone, PartialEq)]
pub struct AdamOptions {
    /// Learning rate.
    pub lr: f64,
    /// Decay rates of the running means of the gradient and of the squared gradient.
    pub betas: (f64, f64),
    /// Epsilon, which is added to the divisor.
    pub eps: f64,
    /// Weight decay; `None` means PyTorch's default: 0 for Adam, 0.01 for AdamW.
    pub weight_decay: Option<f64>,
    /// Whether to use AMSGrad.
    pub amsgrad: bool,
    /// Whether to maximize instead of minimize.
    pub maximize: bool,
}

impl Default for AdamOptions {
    fn default() -> Self {
        Self { lr: 1e-3, betas: (0.9, 0.999), eps: 1e-8, weight_decay: None, amsgrad: false, maximize: false }
    }
}

impl AdamOptions {
    fn check(&self) -> Result<(), TorchError> {
        not_negative("eps", self.eps)?;
        for beta in [self.betas.0, self.betas.1] {
            if !(0.0..1.0).contains(&beta) {
                return Err(TorchError::value("a beta", beta, "at least 0 and less than 1"));
            }
        }
        Ok(())
    }
}

/// Adam (`DECOUPLED` is false) or AdamW (true) on the fused kernels; see [`Adam`] and [`AdamW`].
#[derive(Debug)]
pub struct AdamFamily<const DECOUPLED: bool> {
    trained: Trained,
    options: AdamOptions,
}

impl<const DECOUPLED: bool> AdamFamily<DECOUPLED> {
    const KIND: &str = if DECOUPLED { "adamw" } else { "adam" };
    const DECAY: WeightDecay = if DECOUPLED { WeightDecay::Decoupled } else { WeightDecay::L2 };
    const DEFAULT_WEIGHT_DECAY: f64 = if DECOUPLED { 1e-2 } else { 0.0 };

    /// Trains parameters, or parameter groups.
    pub fn new(parameters: impl Into<ParameterGroups>, options: AdamOptions) -> Result<Self, TorchError> {
        options.check()?;
        let weight_decay = options.weight_decay.unwrap_or(Self::DEFAULT_WEIGHT_DECAY);
        let trained = Trained::new(parameters.into(), options.lr, weight_decay)?;
        Ok(Self { trained, options })
    }

    fn layout(&self) -> Layout {
        const SLOTS: &[&str] = &[STEP, "exp_avg", "exp_avg_sq", "max_exp_avg_sq"];
        let slots = if self.options.amsgrad { SLOTS } else { &SLOTS[..3] };
        Layout { kind: Self::KIND, slots }
    }

    fn step_batch(
        &mut self,
        batch: usize,
        ready: &[Ready],
        tensors: StepTensors<'_>,
    ) -> Result<(), TorchError> {
        let slots = self.layout().slots;
        self.trained.make_slots(slots, batch, ready.iter().map(|ready| ready.place))?;
        let batch = &self.trained.batches[batch];
        let max_exp_avg_sqs = self.options.amsgrad.then(|| batch.kept(ready, 3));
        FusedAdam {
            params: &batch.tensors(ready),
            grads: &grads(ready),
            exp_avgs: &batch.kept(ready, 1),
            exp_avg_sqs: &batch.kept(ready, 2),
            max_exp_avg_sqs: max_exp_avg_sqs.as_deref(),
            steps: &batch.kept(ready, 0),
            lr: self.trained.lr_of(batch),
            betas: self.options.betas,
            eps: self.options.eps,
            weight_decay: batch.weight_decay,
            decay: Self::DECAY,
            maximize: self.options.maximize,
            tensors,
        }
        .run()
    }
}

impl<const DECOUPLED: bool> Optimizer for AdamFamily<DECOUPLED> {
    fn step_with(&mut self, tensors: StepTensors<'_>) -> Result<(), TorchError> {
        for (batch, ready) in self.trained.ready()?.into_iter().enumerate() {
            self.step_batch(batch, &ready, tensors)?;
        }
        Ok(())
    }

    fn step_copies(
        &mut self,
        copies: &[CopiedParameter<'_>],
        tensors: StepTensors<'_>,
    ) -> Result<bool, TorchError> {
        if tensors.grad_scale.is_some() || self.options.amsgrad {
            return Ok(false);
        }
        let AdamOptions { betas, eps, maximize, .. } = self.options;
        let rule = Rule::Adam { betas, eps, decoupled: DECOUPLED };
        let step = CopyStep { slots: self.layout().slots, rule, maximize, found_inf: tensors.found_inf };
        let rest = self.trained.step_copies(copies, step)?;
        let Some(rest) = rest else { return Ok(false) };
        let mut rest = rest.into_iter().enumerate();
        rest.try_for_each(|(batch, ready)| self.step_batch(batch, &ready, tensors))?;
        Ok(true)
    }

    methods_of_trained!();

    fn state(&self) -> OptimizerState {
        let AdamOptions { betas, eps, weight_decay, amsgrad, maximize, .. } = self.options;
        let scalars = [
            ("beta1", betas.0),
            ("beta2", betas.1),
            ("eps", eps),
            ("weight_decay", weight_decay.unwrap_or(Self::DEFAULT_WEIGHT_DECAY)),
            ("amsgrad", f64::from(u8::from(amsgrad))),
            ("maximize", f64::from(u8::from(maximize))),
        ];
        self.layout().save(&self.trained, &scalars)
    }

    fn load_state(&mut self, state: &OptimizerState) -> Result<(), TorchError> {
        self.layout().load(&mut self.trained, state)
    }
}
