//! Figures of a batch, of a step over all ranks, of an epoch: sums and counts, so that a mean is one over samples whatever the
//! sizes of the batches.

use drumline::{CommError, ProcessGroup, ReduceOp};
use tch::{Kind, Tensor};

/// Sums over samples.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) struct Sums {
    loss: f64,
    correct: f64,
    correct_k: f64,
    samples: f64,
}

impl Sums {
    /// Of a batch whose mean loss is `loss`.
    pub(super) fn of(output: &Tensor, labels: &Tensor, loss: &Tensor, k: usize) -> Self {
        let samples = labels.size()[0] as f64;
        let classes = output.size()[1];
        let (_, best) = output.detach().topk((k as i64).min(classes), 1, true, true);
        let hits = best.eq_tensor(&labels.unsqueeze(1)).to_kind(Kind::Double);
        let correct = hits.narrow(1, 0, 1).sum(Kind::Double).double_value(&[]);
        let correct_k = hits.sum(Kind::Double).double_value(&[]);
        Self { loss: loss.double_value(&[]) * samples, correct, correct_k, samples }
    }

    /// Over all ranks; the same on each of them.
    #[track_caller]
    pub(super) fn reduced(self, group: &ProcessGroup) -> Result<Self, CommError> {
        let mut all = [self.loss, self.correct, self.correct_k, self.samples];
        group.all_reduce(&mut all, ReduceOp::Sum)?;
        let [loss, correct, correct_k, samples] = all;
        Ok(Self { loss, correct, correct_k, samples })
    }

    pub(super) fn loss(&self) -> f64 {
        self.loss / self.samples
    }

    /// In percent.
    pub(super) fn acc1(&self) -> f64 {
        100.0 * self.correct / self.samples
    }

    /// In percent.
    pub(super) fn acck(&self) -> f64 {
        100.0 * self.correct_k / self.samples
    }

    pub(super) fn samples(&self) -> u64 {
        self.samples as u64
    }
}

impl std::ops::AddAssign for Sums {
    fn add_assign(&mut self, other: Self) {
        self.loss += other.loss;
        self.correct += other.correct;
        self.correct_k += other.correct_k;
        self.samples += other.samples;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn means_are_over_samples_and_not_over_batches() {
        let output = Tensor::from_slice(&[0.9_f32, 0.5, 0.1, 0.1, 0.5, 0.9]).view([2, 3]);
        let loss = Tensor::from(2.0_f64);
        let mut sums = Sums::of(&output, &Tensor::from_slice(&[0_i64, 1]), &loss, 2);
        assert_eq!((sums.loss(), sums.acc1(), sums.acck(), sums.samples()), (2.0, 50.0, 100.0, 2));
        let one = output.narrow(0, 0, 1);
        sums += Sums::of(&one, &Tensor::from_slice(&[2_i64]), &Tensor::from(5.0_f64), 9);
        assert_eq!((sums.loss(), sums.samples()), (3.0, 3));
        assert!((sums.acck() - 100.0).abs() < 1e-9, "k is at most the number of classes");
    }
}
