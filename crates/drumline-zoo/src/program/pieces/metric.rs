//! Accuracies as people read them.

use drumline::{Metric, TopK, TorchError};
use tch::Tensor;

/// A share in percent.
#[derive(Debug, Clone)]
pub(in crate::program) struct Percent<M>(pub(in crate::program) M);

impl Percent<TopK> {
    /// Of the samples whose class is among the best `k`.
    pub(in crate::program) fn of_top(k: usize) -> Self {
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
