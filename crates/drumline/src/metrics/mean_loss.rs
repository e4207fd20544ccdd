//! The mean loss over samples.

use drumline_torch::TorchError;
use tch::{Kind, Reduction, Tensor};

use super::Metric;

/// The mean of a loss over all samples.
///
/// [`update`](Metric::update) takes logits and classes and adds their cross-entropy. [`add`](Self::add) takes a loss of
/// any kind that was computed before. A NaN in any sample makes the value NaN on all ranks, so that it is not missed.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct MeanLoss {
    sum: f64,
    count: f64,
}

impl MeanLoss {
    /// Adds a batch with this mean loss over `samples`.
    pub fn add(&mut self, mean: f64, samples: usize) {
        // The mean over no samples is NaN, and does not count.
        if samples > 0 {
            self.sum += mean * samples as f64;
            self.count += samples as f64;
        }
    }
}

impl Metric for MeanLoss {
    fn update(&mut self, output: &Tensor, target: &Tensor) -> Result<(), TorchError> {
        let _no_grad = tch::no_grad_guard();
        // The loss of each sample, so that sums do not depend on how samples are batched. No class is ignored: an
        // invalid one is an error.
        let output = output.f_to_kind(Kind::Double)?;
        let losses = output.f_cross_entropy_loss::<Tensor>(target, None, Reduction::None, i64::MIN, 0.0)?;
        self.sum += losses.f_sum(Kind::Double)?.f_double_value(&[])?;
        self.count += losses.numel() as f64;
        Ok(())
    }

    fn sums(&self) -> Vec<f64> {
        vec![self.sum, self.count]
    }

    fn value_of(&self, sums: &[f64]) -> f64 {
        sums[0] / sums[1]
    }

    fn reset(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_logits_lose_the_logarithm_of_the_classes() {
        let mut loss = MeanLoss::default();
        for batch in [3, 1, 0] {
            let output = Tensor::zeros([batch, 10], (Kind::Float, tch::Device::Cpu));
            loss.update(&output, &Tensor::zeros([batch], (Kind::Int64, tch::Device::Cpu))).unwrap();
        }
        assert!((loss.value() - 10f64.ln()).abs() < 1e-15);
        assert_eq!(loss.sums()[1], 4.0);
    }

    #[test]
    fn batches_of_any_size_weigh_by_their_samples() {
        let mut loss = MeanLoss::default();
        loss.add(1.0, 96);
        loss.add(5.0, 4);
        loss.add(f64::NAN, 0);
        assert_eq!(loss.value(), (96.0 + 20.0) / 100.0);
        loss.add(f64::NAN, 1);
        assert!(loss.value().is_nan());
        loss.reset();
        assert_eq!((loss.sums(), loss.value().is_nan()), (vec![0.0, 0.0], true));
    }

    #[test]
    fn a_class_outside_is_an_error() {
        let output = Tensor::zeros([1, 3], (Kind::Float, tch::Device::Cpu));
        for class in [3i64, -1, -100] {
            let error = MeanLoss::default().update(&output, &Tensor::from_slice(&[class])).unwrap_err();
            assert!(error.to_string().contains("out of bounds"), "{error}");
        }
    }
}
