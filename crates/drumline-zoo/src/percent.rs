//! Accuracies in percent.

use drumline::metrics::{Metric, TopK};
use drumline::torch::TorchError;
use tch::Tensor;

/// Wraps a metric between 0 and 1 and reports it in percent.
#[derive(Debug, Clone)]
pub struct Percent<M>(pub M);

impl Percent<TopK> {
    /// Top-`k` accuracy: the samples whose class is among the `k` best.
    pub fn of_top(k: usize) -> Self {
        Self(TopK::new(k))
    }
}

impl<M: Metric> Metric for Percent<M> {
    fn update(&mut self, output: &Tensor, target: &Tensor) -> Result<(), TorchError> {
        self.0.update(output, target)
    }

    fn sums(&self) -> Vec<f64> {
        self.0.sums()
    }

    fn value_of(&self, sums: &[f64]) -> f64 {
        100.0 * self.0.value_of(sums)
    }

    fn reset(&mut self) {
        self.0.reset();
    }
}
