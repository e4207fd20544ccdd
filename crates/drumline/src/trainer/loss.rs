//! Losses: a sum over samples or tokens, and their count.
//!
//! ```text
//!   rank 0   batch, batch ─▶ sums of losses ─┐
//!   rank 1   batch        ─▶ sum of losses ──┴─▶ ÷ count of the whole window over all ranks ─▶ gradient
//! ```
//! Sums are divided once, by the correct number, for any distribution of samples and tokens over micro-batches and
//! ranks.

use drumline_torch::{SmoothedLabels, TorchError, smoothed_cross_entropy};
use tch::{Kind, Tensor};

use super::batch::{Batch, Supervised};
use crate::data::loader::Cause;

/// A loss for outputs `O` of batches `B`.
///
/// A function of output and batch is a loss as well: it returns the mean over the batch's samples.
///
/// ```
/// use drumline::tch::{Reduction, Tensor};
/// use drumline::trainer::Loss;
///
/// let squares = |output: &Tensor, batch: &(Tensor, Tensor)| output.mse_loss(&batch.1, Reduction::Mean);
/// let ones = Tensor::from_slice(&[1f32, 1.0]);
/// let batch = (ones.shallow_clone(), ones * 3.0);
/// assert_eq!(squares.sum(&batch.0, &batch)?.double_value(&[]), 8.0);
/// assert_eq!(squares.count(&batch)?, 2.0);
/// # Ok::<(), drumline::data::Cause>(())
/// ```
pub trait Loss<B, O> {
    /// The sum of the losses of all samples, or tokens, of a batch.
    fn sum(&self, output: &O, batch: &B) -> Result<Tensor, Cause>;

    /// The number of summed losses. The trainer divides by the total of all batches of a step, on all ranks.
    fn count(&self, batch: &B) -> Result<f64, Cause>;
}

impl<B: Batch, O, F: Fn(&O, &B) -> Tensor> Loss<B, O> for F {
    fn sum(&self, output: &O, batch: &B) -> Result<Tensor, Cause> {
        Ok(self(output, batch) * batch.num_samples() as f64)
    }

    fn count(&self, batch: &B) -> Result<f64, Cause> {
        Ok(batch.num_samples() as f64)
    }
}

/// Cross-entropy of logits, whose last dimension is the classes, with the correct classes of samples, or of the tokens
/// of sentences.
///
/// ```
/// use drumline::tch::{Device, Kind, Tensor};
/// use drumline::trainer::{CrossEntropy, Loss};
///
/// // Two sentences of 3 and 1 tokens, padded with 0; 10 words.
/// let words = Tensor::from_slice(&[4i64, 7, 2, 5, 0, 0]).view([2, 3]);
/// let batch = (words.shallow_clone(), words);
/// let logits = Tensor::zeros([2, 3, 10], (Kind::Float, Device::Cpu));
/// let loss = CrossEntropy { ignored: Some(0), ..CrossEntropy::default() };
/// assert_eq!(loss.count(&batch)?, 4.0);
/// assert!((loss.sum(&logits, &batch)?.double_value(&[]) - 4.0 * 10f64.ln()).abs() < 1e-5);
/// # Ok::<(), drumline::data::Cause>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct CrossEntropy {
    /// The class of padding: it has no loss and does not count.
    pub ignored: Option<i64>,
    /// How much of the correct class's weight is spread over all classes.
    pub label_smoothing: f64,
}

impl<B: Supervised> Loss<B, Tensor> for CrossEntropy {
    fn sum(&self, output: &Tensor, batch: &B) -> Result<Tensor, Cause> {
        let size = output.size();
        let Some(&classes) = size.last().filter(|_| size.len() > 1) else {
            return Err(format!("cross-entropy: expected logits of samples × classes, got {size:?}").into());
        };
        let (logits, target) = (output.f_reshape([-1, classes]), batch.target().f_reshape([-1]));
        let (logits, target) = (logits.map_err(TorchError::from)?, target.map_err(TorchError::from)?);
        let Self { ignored, label_smoothing: smoothing } = *self;
        Ok(smoothed_cross_entropy(&logits, SmoothedLabels { classes: &target, ignored, smoothing })?)
    }

    fn count(&self, batch: &B) -> Result<f64, Cause> {
        let target = batch.target();
        let Some(ignored) = self.ignored else { return Ok(target.numel() as f64) };
        let counted = target.f_ne(ignored).and_then(|counted| counted.f_sum(Kind::Double));
        Ok(counted.and_then(|sum| sum.f_double_value(&[])).map_err(TorchError::from)?)
    }
}
