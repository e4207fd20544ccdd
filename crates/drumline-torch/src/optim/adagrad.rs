//! Adagrad, as `torch.optim.Adagrad`: each element's step is divided by the root of the sum of its squared gradients.

use super::Optimizer;
use super::groups::ParameterGroups;
use super::state::{Layout, Like, OptimizerState, STEP, Slot};
use super::trained::{Parameter, Ready, Trained, grads, methods_of_trained, not_negative};
use crate::error::TorchError;
use crate::fused::{FusedAdagrad, StepTensors};
use crate::named::Named;

/// Settings of [`Adagrad`]; the defaults are PyTorch's.
#[derive(Debug, Clone, PartialEq)]
pub struct AdagradOptions {
    /// Learning rate.
    pub lr: f64,
    /// The learning rate of a parameter's step k is divided by `1 + (k - 1) * lr_decay`.
    pub lr_decay: f64,
    /// Weight decay, which adds a part of the parameter to its gradient.
    pub weight_decay: f64,
    /// The sum of squared gradients before the first step.
    pub initial_accumulator_value: f64,
    /// Epsilon, which is added to the divisor.
    pub eps: f64,
    /// Whether to maximize instead of minimize.
    pub maximize: bool,
}

impl Default for AdagradOptions {
    fn default() -> Self {
        Self {
            lr: 1e-2,
            lr_decay: 0.0,
            weight_decay: 0.0,
            initial_accumulator_value: 0.0,
            eps: 1e-10,
            maximize: false,
        }
    }
}

impl AdagradOptions {
    fn check(&self) -> Result<(), TorchError> {
        not_negative("the decay of the learning rate", self.lr_decay)?;
        not_negative("the initial accumulator value", self.initial_accumulator_value)?;
        not_negative("eps", self.eps)
    }
}

const KIND: &str = "adagrad";

/// A parameter's number of steps, and its sum of squared gradients.
const SLOTS: &[Slot] = &[STEP, Slot::new("sum", Like::Parameter)];

/// Adagrad on the fused kernel.
#[derive(Debug)]
pub struct Adagrad {
    trained: Trained,
    options: AdagradOptions,
}

impl Adagrad {
    /// Trains parameters, or parameter groups.
    pub fn new(parameters: impl Into<ParameterGroups>, options: AdagradOptions) -> Result<Self, TorchError> {
        options.check()?;
        let trained = Trained::new(parameters.into(), options.lr, options.weight_decay)?;
        Ok(Self { trained, options })
    }

    /// Creates the state of parameters that make their first step.
    fn make_sums(&mut self, batch: usize, ready: &[Ready]) -> Result<(), TorchError> {
        let parameters = &self.trained.batches[batch].parameters;
        let new = ready.iter().map(|ready| ready.place).filter(|place| parameters[*place].kept.is_empty());
        let new: Vec<_> = new.collect();
        self.trained.make_slots(&|_| SLOTS, batch, new.iter().copied())?;
        for place in new {
            if let Some(sum) = self.trained.batches[batch].parameters[place].kept.get_mut(1) {
                let _ = sum.f_fill_(self.options.initial_accumulator_value)?;
            }
        }
        Ok(())
    }

    fn step_batch(
        &mut self,
        batch: usize,
        ready: &[Ready],
        tensors: StepTensors<'_>,
    ) -> Result<(), TorchError> {
        self.make_sums(batch, ready)?;
        let batch = &self.trained.batches[batch];
        FusedAdagrad {
            params: &batch.tensors(ready),
            grads: &grads(ready),
            sums: &batch.kept(ready, 1),
            steps: &batch.kept(ready, 0),
            lr: self.trained.lr_of(batch),
            lr_decay: self.options.lr_decay,
            weight_decay: batch.weight_decay,
            eps: self.options.eps,
            maximize: self.options.maximize,
            tensors,
        }
        .run()
    }
}

impl Optimizer for Adagrad {
    fn step_with(&mut self, tensors: StepTensors<'_>) -> Result<(), TorchError> {
        let mut ready = self.trained.ready()?.into_iter().enumerate();
        ready.try_for_each(|(batch, ready)| self.step_batch(batch, &ready, tensors))
    }

    fn keep_lr_on_device(&mut self) -> Result<(), TorchError> {
        self.trained.keep_lr_on_device()
    }

    methods_of_trained!();

    fn state(&self) -> OptimizerState {
        let AdagradOptions { lr: _, lr_decay, weight_decay, initial_accumulator_value, eps, maximize } =
            self.options;
        let scalars = [
            ("lr_decay", lr_decay),
            ("weight_decay", weight_decay),
            ("initial_accumulator_value", initial_accumulator_value),
            ("eps", eps),
            ("maximize", f64::from(u8::from(maximize))),
        ];
        let slots = |_: &Parameter| SLOTS;
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
        Layout { kind: KIND, slots: &|_| SLOTS }.load(&mut self.trained, state, wanted)
    }

    fn state_bytes(&self, parameter: &Named) -> Option<usize> {
        Layout { kind: KIND, slots: &|_| SLOTS }.state_bytes(&self.trained, parameter)
    }
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind, Tensor};

    use super::*;
    use crate::grad::set_grad;

    fn leaf() -> Named {
        let tensor = Tensor::ones([2, 2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        Named { name: "w".into(), tensor }
    }

    #[test]
    fn a_step_that_the_device_skips_changes_nothing() {
        let leaf = leaf();
        let options = AdagradOptions { lr: 0.5, lr_decay: 1.0, ..AdagradOptions::default() };
        let mut optimizer = Adagrad::new(vec![leaf.clone()], options).unwrap();
        let mut step = |found_inf: f32| {
            set_grad(&leaf.tensor, Some(&(leaf.tensor.detach() * 0.0 + 2.0))).unwrap();
            let found_inf = Tensor::from(found_inf);
            optimizer
                .step_with(StepTensors { found_inf: Some(&found_inf), ..StepTensors::default() })
                .unwrap();
            leaf.tensor.double_value(&[0, 0])
        };
        assert_eq!(step(1.0), 1.0);
        // The first step: a gradient of 2 over a sum of 4.
        assert!((step(0.0) - 0.5).abs() < 1e-6);
        // The second one has half of the learning rate, and a sum of 8.
        assert!((step(0.0) - (0.5 - 0.25 * 2.0 / 8f64.sqrt())).abs() < 1e-6);
        assert_eq!(optimizer.state().tensors[0].tensor.double_value(&[]), 2.0);
    }

    #[test]
    fn negative_settings_are_refused() {
        for (options, words) in [
            (
                AdagradOptions { lr_decay: -1.0, ..AdagradOptions::default() },
                "the decay of the learning rate",
            ),
            (AdagradOptions { eps: -1.0, ..AdagradOptions::default() }, "eps"),
            (
                AdagradOptions { initial_accumulator_value: -1.0, ..AdagradOptions::default() },
                "the initial accumulator value",
            ),
        ] {
            let error = Adagrad::new(vec![leaf()], options).unwrap_err().to_string();
            assert!(error.contains(words) && error.contains("-1"), "{error}");
        }
    }
}
