//! SGD with momentum, step for step as PyTorch's, and Distribuuuu's learning rate.

use std::f64::consts::PI;

use drumline_torch::Named;
use tch::{Tensor, no_grad};

use crate::config::{LrPolicy, Optim};

/// The learning rate of an epoch: the policy times a warm-up that rises in a line.
pub(in crate::program) fn lr(optim: &Optim, epoch: f64) -> f64 {
    let part = match optim.lr_policy {
        LrPolicy::Cos => {
            let cosine = 0.5 * (1.0 + (PI * epoch / optim.max_epoch as f64).cos());
            (1.0 - optim.min_lr) * cosine + optim.min_lr
        }
        LrPolicy::Steps => {
            let passed = optim.steps.iter().filter(|step| epoch >= **step).count();
            optim.lr_mult.powi(passed.saturating_sub(1) as i32)
        }
    };
    let warm_up = match epoch / optim.warmup_epochs {
        done if epoch < optim.warmup_epochs => optim.warmup_factor * (1.0 - done) + done,
        _ => 1.0,
    };
    optim.base_lr * part * warm_up
}

pub(in crate::program) struct Sgd {
    parameters: Vec<Named>,
    momentum: Vec<Option<Tensor>>,
    options: Optim,
    lr: f64,
}

impl Sgd {
    pub(in crate::program) fn new(parameters: Vec<Named>, options: &Optim) -> Self {
        let momentum = parameters.iter().map(|_| None).collect();
        Self { parameters, momentum, options: options.clone(), lr: options.base_lr }
    }

    pub(in crate::program) fn set_lr(&mut self, lr: f64) {
        self.lr = lr;
    }

    pub(in crate::program) fn zero_grad(&mut self) -> anyhow::Result<()> {
        self.parameters.iter_mut().for_each(|named| named.tensor.zero_grad());
        Ok(())
    }

    pub(in crate::program) fn step(&mut self) -> anyhow::Result<()> {
        let (options, lr) = (&self.options, self.lr);
        no_grad(|| {
            for (named, buffer) in self.parameters.iter_mut().zip(&mut self.momentum) {
                let grad = named.tensor.grad();
                if !grad.defined() {
                    continue;
                }
                let grad = grad + &named.tensor * options.weight_decay;
                let moved = match buffer.take() {
                    Some(before) => before * options.momentum + &grad * (1.0 - options.dampening),
                    None => grad.copy(),
                };
                let change =
                    if options.nesterov { grad + &moved * options.momentum } else { moved.shallow_clone() };
                *buffer = Some(moved);
                named.tensor -= change * lr;
            }
        });
        Ok(())
    }

    /// What is saved: `NAME.momentum_buffer`.
    pub(in crate::program) fn state(&self) -> Vec<Named> {
        let pairs = self.parameters.iter().zip(&self.momentum);
        let saved = pairs.filter_map(|(named, buffer)| {
            let name = format!("{}.momentum_buffer", named.name);
            buffer.as_ref().map(|buffer| Named { name, tensor: buffer.shallow_clone() })
        });
        saved.collect()
    }

    pub(in crate::program) fn load_state(&mut self, state: &[Named]) {
        for (named, buffer) in self.parameters.iter().zip(&mut self.momentum) {
            let name = format!("{}.momentum_buffer", named.name);
            let found = state.iter().find(|saved| saved.name == name);
            *buffer = found.map(|saved| saved.tensor.to_device(named.tensor.device()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_warms_up_and_falls() {
        let optim = Optim { base_lr: 0.2, max_epoch: 100, ..Optim::default() };
        assert!((lr(&optim, 0.0) - 0.02).abs() < 1e-12);
        assert!((lr(&optim, 50.0) - 0.1).abs() < 1e-12);
        let steps = Optim { lr_policy: LrPolicy::Steps, steps: vec![0.0, 30.0, 60.0], ..optim };
        let rates: Vec<_> = [29.0, 30.0, 99.0].iter().map(|epoch| lr(&steps, *epoch)).collect();
        assert!(
            rates.iter().zip([0.2, 0.02, 0.002]).all(|(rate, due)| (rate - due).abs() < 1e-12),
            "{rates:?}"
        );
    }
}
