//! Metrics over all ranks: sums and counts are reduced, never averages of averages.
//!
//! ```text
//!   rank 0: batches ─▶ update ─▶ sums ─┐
//!   rank 1: batches ─▶ update ─▶ sums ─┼─ all-reduce in f64 ─▶ value_of ─▶ the same value on all ranks
//!   rank 2: no batch ─────────▶ zeros ─┘
//! ```
//! A value is exact for any distribution of samples over ranks and batches. It is NaN if there were no samples.

mod f1;
#[cfg(test)]
mod golden;
mod labelled;
mod mean_loss;
mod perplexity;
mod span_f1;
mod top_k;

use drumline_comm::{CommError, ProcessGroup, ReduceOp};
use drumline_torch::TorchError;
use tch::Tensor;

pub use f1::{Average, F1};
pub use mean_loss::MeanLoss;
pub use perplexity::Perplexity;
pub use span_f1::SpanF1;
pub use top_k::TopK;

/// A metric that is computed from sums over samples.
///
/// ```
/// use drumline::comm::LocalGroup;
/// use drumline::metrics::Metric;
/// use drumline::torch::TorchError;
/// use tch::Tensor;
///
/// /// The root of the mean squared distance between outputs and targets.
/// #[derive(Default)]
/// struct Distance([f64; 2]);
///
/// impl Metric for Distance {
///     fn update(&mut self, output: &Tensor, target: &Tensor) -> Result<(), TorchError> {
///         self.0[0] += (output - target).square().sum(tch::Kind::Double).double_value(&[]);
///         self.0[1] += target.numel() as f64;
///         Ok(())
///     }
///     fn sums(&self) -> Vec<f64> {
///         self.0.to_vec()
///     }
///     fn value_of(&self, sums: &[f64]) -> f64 {
///         (sums[0] / sums[1]).sqrt()
///     }
///     fn reset(&mut self) {
///         *self = Self::default();
///     }
/// }
///
/// let distances = LocalGroup::run(2, |group| {
///     let mut distance = Distance::default();
///     if group.rank() == 0 {
///         let (output, target) = (Tensor::from_slice(&[1f32, 2.]), Tensor::from_slice(&[4f32, 6.]));
///         distance.update(&output, &target).expect("equal sizes");
///     }
///     distance.reduce(&group)
/// })?;
/// assert_eq!(distances, [12.5f64.sqrt(); 2]);
/// # Ok::<(), drumline::CommError>(())
/// ```
pub trait Metric {
    /// Adds a batch of this rank.
    fn update(&mut self, output: &Tensor, target: &Tensor) -> Result<(), TorchError>;

    /// This rank's sums and counts, always of the same length; zeros before the first batch.
    fn sums(&self) -> Vec<f64>;

    /// The value for these sums.
    fn value_of(&self, sums: &[f64]) -> f64;

    /// Forgets all batches.
    fn reset(&mut self);

    /// The value over this rank's samples alone.
    fn value(&self) -> f64 {
        self.value_of(&self.sums())
    }

    /// The value over the samples of all ranks. Every rank must call it, even without a batch.
    #[track_caller]
    fn reduce(&self, group: &ProcessGroup) -> Result<f64, CommError> {
        let mut sums = self.sums();
        group.all_reduce(&mut sums, ReduceOp::Sum)?;
        Ok(self.value_of(&sums))
    }
}

/// A metric that is chosen at run time.
impl<M: Metric + ?Sized> Metric for Box<M> {
    fn update(&mut self, output: &Tensor, target: &Tensor) -> Result<(), TorchError> {
        (**self).update(output, target)
    }

    fn sums(&self) -> Vec<f64> {
        (**self).sums()
    }

    fn value_of(&self, sums: &[f64]) -> f64 {
        (**self).value_of(sums)
    }

    fn reset(&mut self) {
        (**self).reset();
    }
}

/// The values of several metrics over the samples of all ranks, in one collective.
///
/// ```
/// use drumline::comm::LocalGroup;
/// use drumline::metrics::{MeanLoss, Metric, TopK, reduce_metrics};
///
/// LocalGroup::run(2, |group| {
///     let (mut loss, acc1) = (MeanLoss::default(), TopK::new(1));
///     loss.add(2.0 + group.rank() as f64, 10);
///     let [loss, acc1] = reduce_metrics([&loss, &acc1], &group)?;
///     assert_eq!(loss, 2.5);
///     assert!(acc1.is_nan(), "no sample yet");
///     Ok(())
/// })?;
/// # Ok::<(), drumline::CommError>(())
/// ```
#[track_caller]
pub fn reduce_metrics<const N: usize>(
    metrics: [&dyn Metric; N],
    group: &ProcessGroup,
) -> Result<[f64; N], CommError> {
    let mut all = metrics.map(Metric::sums).concat();
    group.all_reduce(&mut all, ReduceOp::Sum)?;
    let mut rest = &all[..];
    Ok(metrics.map(|metric| {
        let (these, others) = rest.split_at(metric.sums().len());
        rest = others;
        metric.value_of(these)
    }))
}
