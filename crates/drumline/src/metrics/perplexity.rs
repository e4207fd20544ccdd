//! Perplexity.

use drumline_torch::TorchError;
use tch::{Kind, Reduction, Tensor};

use super::Metric;
use super::labelled::Labelled;

/// The exponential of the mean cross-entropy over samples, or over the tokens of sentences: the number of equally
/// likely classes with the same uncertainty.
///
/// ```
/// use drumline::metrics::{Metric, Perplexity};
/// use drumline::tch::{Device, Kind, Tensor};
///
/// // Two sentences of 3 and 1 tokens, padded with 0; all of 10 words are equally likely.
/// let words = Tensor::from_slice(&[4i64, 7, 2, 5, 0, 0]).view([2, 3]);
/// let mut perplexity = Perplexity::default().ignoring(0);
/// perplexity.update(&Tensor::zeros([2, 3, 10], (Kind::Float, Device::Cpu)), &words)?;
/// assert!((perplexity.value() - 10.0).abs() < 1e-12);
/// # Ok::<(), drumline::torch::TorchError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Perplexity {
    ignored: Option<i64>,
    loss: f64,
    count: f64,
}

impl Perplexity {
    /// Leaves out tokens of this class, such as the padding of sentences.
    #[must_use]
    pub fn ignoring(self, class: i64) -> Self {
        Self { ignored: Some(class), ..self }
    }
}

impl Metric for Perplexity {
    fn update(&mut self, output: &Tensor, target: &Tensor) -> Result<(), TorchError> {
        let _no_grad = tch::no_grad_guard();
        let Labelled { output, target } = Labelled::new("perplexity", output, target, self.ignored)?;
        let output = output.f_to_kind(Kind::Double)?;
        let loss = output.f_cross_entropy_loss::<Tensor>(&target, None, Reduction::Sum, i64::MIN, 0.0)?;
        self.loss += loss.f_double_value(&[])?;
        self.count += target.numel() as f64;
        Ok(())
    }

    fn sums(&self) -> Vec<f64> {
        vec![self.loss, self.count]
    }

    fn value_of(&self, sums: &[f64]) -> f64 {
        (sums[0] / sums[1]).exp()
    }

    fn reset(&mut self) {
        (self.loss, self.count) = (0.0, 0.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::MeanLoss;

    #[test]
    fn it_is_the_exponential_of_the_mean_loss() {
        let output = Tensor::arange(12, (Kind::Float, tch::Device::Cpu)).sin().view([4, 3]);
        let target = Tensor::from_slice(&[0i64, 2, 1, 1]);
        let (mut perplexity, mut loss) = (Perplexity::default(), MeanLoss::default());
        loss.update(&output, &target).unwrap();
        for part in [0..1, 1..4, 4..4] {
            let (start, len) = (part.start, part.end - part.start);
            perplexity.update(&output.narrow(0, start, len), &target.narrow(0, start, len)).unwrap();
        }
        assert!((perplexity.value() - loss.value().exp()).abs() < 1e-12);
        perplexity.reset();
        assert!(perplexity.value().is_nan());
    }
}
