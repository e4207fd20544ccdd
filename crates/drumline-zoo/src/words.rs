//! The loss and the metrics of predicted words, for logits that are whole or cut by classes.
//!
//! ```text
//!   Whole   the loss and the metrics of `drumline`
//!   Part    the same numbers: ranks along `tp` exchange one or a few numbers for each word
//! ```

use drumline::data::Cause;
use drumline::engine::ParallelError;
use drumline::engine::tensor::{Features, Sharded, TpTensor, VocabLabels, vocab_cross_entropy};
use drumline::metrics::{Metric, Perplexity, TopK};
use drumline::torch::TorchError;
use drumline::trainer::{BatchMetric, CrossEntropy, Loss, Supervised};
use tch::{Kind, Tensor};

use crate::models::Logits;
use crate::percent::Percent;

/// This rank's part of logits.
type Part = TpTensor<Sharded<Features>>;

/// Cross-entropy of predicted words.
///
/// ```
/// use drumline::tch::{Device, Kind, Tensor};
/// use drumline::trainer::{CrossEntropy, Loss};
/// use drumline_zoo::models::Logits;
/// use drumline_zoo::words::WordLoss;
///
/// let words = Tensor::from_slice(&[4i64, 7]);
/// let batch = (words.shallow_clone(), words);
/// let logits = Logits::Whole(Tensor::zeros([2, 10], (Kind::Float, Device::Cpu)));
/// let loss = WordLoss(CrossEntropy { label_smoothing: 0.1, ..CrossEntropy::default() });
/// assert!((loss.sum(&logits, &batch)?.double_value(&[]) - 2.0 * 10f64.ln()).abs() < 1e-5);
/// # Ok::<(), drumline::data::Cause>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct WordLoss(pub CrossEntropy);

impl<B: Supervised> Loss<B, Logits> for WordLoss {
    fn sum(&self, output: &Logits, batch: &B) -> Result<Tensor, Cause> {
        let part = match output {
            Logits::Whole(logits) => return self.0.sum(logits, batch),
            Logits::Part(part) => part,
        };
        let CrossEntropy { ignored, label_smoothing: smoothing } = self.0;
        let classes = batch.target().f_reshape([-1]).map_err(TorchError::from)?;
        let labels = VocabLabels { classes: &classes, num_classes: None, ignored, smoothing };
        Ok(vocab_cross_entropy(part, labels)?.into_tensor())
    }

    fn count(&self, batch: &B) -> Result<f64, Cause> {
        Loss::<B, Tensor>::count(&self.0, batch)
    }
}

/// A metric of predicted words: of whole logits `M`, and of parts the same, a sum divided by the number of words.
#[derive(Debug, Clone)]
pub struct OfWords<M> {
    whole: M,
    of_part: fn(&Part, &Tensor) -> Result<f64, ParallelError>,
    of_parts: [f64; 2],
}

impl OfWords<Perplexity> {
    /// The exponential of the mean loss.
    pub fn perplexity() -> Self {
        Self { whole: Perplexity::default(), of_part: loss_in_f64, of_parts: [0.0; 2] }
    }
}

impl OfWords<Percent<TopK>> {
    /// The words that are the most likely ones, in percent.
    pub fn accuracy() -> Self {
        Self { whole: Percent::of_top(1), of_part: num_right, of_parts: [0.0; 2] }
    }
}

impl<M: Metric, B: Supervised> BatchMetric<B, Logits> for OfWords<M> {
    fn update(&mut self, output: &Logits, batch: &B) -> Result<(), Cause> {
        let words = batch.target();
        match output {
            Logits::Whole(logits) => self.whole.update(logits, words)?,
            Logits::Part(part) => {
                let _no_grad = tch::no_grad_guard();
                self.of_parts[0] += (self.of_part)(part, words)?;
                self.of_parts[1] += words.numel() as f64;
            }
        }
        Ok(())
    }

    fn sums(&self) -> Vec<f64> {
        self.whole.sums().iter().zip(self.of_parts).map(|(whole, of_parts)| whole + of_parts).collect()
    }

    fn value_of(&self, sums: &[f64]) -> f64 {
        self.whole.value_of(sums)
    }

    fn reset(&mut self) {
        self.whole.reset();
        self.of_parts = [0.0; 2];
    }
}

/// The sum of the losses of words, in f64 as [`Perplexity`] computes it.
fn loss_in_f64(part: &Part, words: &Tensor) -> Result<f64, ParallelError> {
    let labels = VocabLabels { classes: words, num_classes: None, ignored: None, smoothing: 0.0 };
    let part = part.map(|part| part.f_to_kind(Kind::Double))?;
    Ok(vocab_cross_entropy(&part, labels)?.into_tensor().f_double_value(&[])?)
}

/// The number of words that have the greatest logit, by the rules of [`TopK`]: of equal ones the lower class is greater, and
/// NaN is never right.
fn num_right(part: &Part, words: &Tensor) -> Result<f64, ParallelError> {
    let logits = part.local();
    let (size, device) = (logits.size(), logits.device());
    let classes = Tensor::f_arange_start(part.first(), part.first() + size[1], (Kind::Int64, device))?;
    let words = words.f_unsqueeze(1)?;
    let is_word = classes.f_eq_tensor(&words)?;
    // Not by a product with 0, which is NaN for infinite logits.
    let own =
        logits.f_where_self(&is_word, &logits.f_zeros_like()?)?.f_sum_dim_intlist(1, true, logits.kind())?;
    let own = TpTensor::partial(own, part.ranks()).sum()?.into_tensor();
    let is_behind = classes.f_gt_tensor(&words)?;
    let beaten =
        logits.f_eq_tensor(&own)?.f_logical_and(&is_behind)?.f_logical_or(&logits.f_lt_tensor(&own)?)?;
    let beaten = beaten.f_sum_dim_intlist(1, false, Kind::Double)?;
    let beaten = TpTensor::partial(beaten, part.ranks()).sum()?.into_tensor();
    let right = beaten.f_ge((part.whole_len() - 1) as f64)?;
    Ok(right.f_sum(Kind::Double)?.f_double_value(&[])?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use drumline::comm::LocalGroup;
    use drumline::engine::tensor::TensorParallel;

    /// The loss with smoothing and an ignored class, the perplexity and the accuracy.
    fn figures(logits: &Logits, words: &Tensor) -> Vec<f64> {
        let batch = (words.shallow_clone(), words.shallow_clone());
        let loss = WordLoss(CrossEntropy { label_smoothing: 0.1, ignored: Some(2) });
        let (mut perplexity, mut accuracy) = (OfWords::perplexity(), OfWords::accuracy());
        perplexity.update(logits, &batch).unwrap();
        accuracy.update(logits, &batch).unwrap();
        let value = |metric: &dyn BatchMetric<(Tensor, Tensor), Logits>| metric.value_of(&metric.sums());
        let sum = loss.sum(logits, &batch).unwrap().double_value(&[]);
        vec![sum / loss_count(loss, &batch), value(&perplexity), value(&accuracy)]
    }

    fn loss_count(loss: WordLoss, batch: &(Tensor, Tensor)) -> f64 {
        Loss::<_, Logits>::count(&loss, batch).unwrap()
    }

    #[test]
    fn parts_have_the_figures_of_the_whole() {
        let rows = [
            [0.1f32, 0.7, -3.0, 0.2, 0.0],
            [2.0, 2.0, 2.0, 2.0, 2.0],
            [1.0, 5.0, 0.0, 5.0, f32::NEG_INFINITY],
            [0.0, 0.5, 1.0, 1.5, 2.0],
        ];
        for words in [[1i64, 0, 1, 4], [3, 1, 3, 2], [0, 4, 2, 0]] {
            let whole = || Tensor::from_slice2(&rows);
            let words = || Tensor::from_slice(&words);
            let expected = figures(&Logits::Whole(whole()), &words());
            for ranks in [2, 3, 6] {
                let all = LocalGroup::run(ranks, |group| {
                    let tp = TensorParallel::new(&group);
                    let own = tp.cut(5).range(tp.rank());
                    let own = whole().narrow(1, own.start, own.end - own.start);
                    Ok(figures(&Logits::Part(TpTensor::sharded(own, 5, &tp).unwrap()), &words()))
                });
                for found in all.unwrap() {
                    let near = found.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-5 || a == b);
                    assert!(near && found.len() == 3, "{ranks} ranks: {found:?}, {expected:?}");
                }
            }
        }
    }

    #[test]
    fn a_word_without_a_number_is_never_right() {
        let rows = [[f32::NAN, 0.0, 1.0], [0.0, f32::NAN, 1.0]];
        let all = LocalGroup::run(2, |group| {
            let tp = TensorParallel::new(&group);
            let own = tp.cut(3).range(tp.rank());
            let own = Tensor::from_slice2(&rows).narrow(1, own.start, own.end - own.start);
            let part = TpTensor::sharded(own, 3, &tp).unwrap();
            Ok(num_right(&part, &Tensor::from_slice(&[0i64, 2])).unwrap())
        });
        assert_eq!(all.unwrap(), [0.0; 2]);
    }
}
