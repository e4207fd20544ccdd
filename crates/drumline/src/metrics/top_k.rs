//! Top-k accuracy.

use drumline_torch::TorchError;
use tch::{Kind, Tensor};

use super::Metric;

/// The fraction of samples whose class is among the `k` best of the output, from 0 to 1.
///
/// Of equal outputs the lower class counts as better, on every device. NaN counts as better than any number, including
/// another NaN: a sample whose own class has NaN is wrong, and so is one with NaN in `k` other classes. Both count as
/// samples.
#[derive(Debug, Clone, PartialEq)]
pub struct TopK {
    k: usize,
    correct: f64,
    count: f64,
}

impl TopK {
    /// `k` = 1 is plain accuracy.
    pub fn new(k: usize) -> Self {
        Self { k, correct: 0.0, count: 0.0 }
    }

    /// The number of guesses for a sample.
    pub fn k(&self) -> usize {
        self.k
    }

    fn check(&self, output: &Tensor, target: &Tensor) -> Result<(), TorchError> {
        let (size, k) = (output.size(), self.k as i64);
        let what = |what: &str| format!("top-{k} accuracy: {what}");
        let [samples, classes] = size[..] else {
            let expected = "samples × classes".to_owned();
            return Err(TorchError::Shape { what: what("the output"), expected, got: size });
        };
        if k < 1 || k > classes {
            let expected = format!("1 to {classes}, the number of classes; try another k");
            return Err(TorchError::value(what("k"), k, expected));
        }
        if target.size() != [samples] || target.kind() != Kind::Int64 {
            let got = format!("{:?} of {:?}", target.kind(), target.size());
            return Err(TorchError::value(what("the target"), got, format!("{samples} classes as Int64")));
        }
        let outside = target.f_lt(0)?.f_logical_or(&target.f_ge(classes)?)?;
        if outside.f_any()?.f_int64_value(&[])? != 0 {
            let worst = target.f_masked_select(&outside)?.f_int64_value(&[0])?;
            let expected = format!("0 to {}; try the model's class count", classes - 1);
            return Err(TorchError::value(what("a target class"), worst, expected));
        }
        Ok(())
    }
}

impl Metric for TopK {
    fn update(&mut self, output: &Tensor, target: &Tensor) -> Result<(), TorchError> {
        let _no_grad = tch::no_grad_guard();
        self.check(output, target)?;
        let (target, classes) = (target.f_unsqueeze(1)?, output.size()[1]);
        let own = output.f_gather(1, &target, false)?;
        let behind = Tensor::f_arange(classes, (Kind::Int64, output.device()))?.f_gt_tensor(&target)?;
        let beaten =
            output.f_eq_tensor(&own)?.f_logical_and(&behind)?.f_logical_or(&output.f_lt_tensor(&own)?)?;
        // The classes that are not beaten come before the sample's class.
        let beaten = beaten.f_sum_dim_intlist(1, false, Kind::Int64)?;
        let correct = beaten.f_ge(classes - self.k as i64)?;
        self.correct += correct.f_sum(Kind::Int64)?.f_int64_value(&[])? as f64;
        self.count += output.size()[0] as f64;
        Ok(())
    }

    fn sums(&self) -> Vec<f64> {
        vec![self.correct, self.count]
    }

    fn value_of(&self, sums: &[f64]) -> f64 {
        sums[0] / sums[1]
    }

    fn reset(&mut self) {
        *self = Self::new(self.k);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use drumline_comm::{CommError, LocalGroup};

    fn top(k: usize, rows: &[[f32; 4]], targets: &[i64]) -> f64 {
        let mut metric = TopK::new(k);
        let output = Tensor::from_slice(rows.as_flattened()).view([rows.len() as i64, 4]);
        metric.update(&output, &Tensor::from_slice(targets)).unwrap();
        metric.value()
    }

    #[test]
    fn the_class_must_be_among_the_best() {
        let row = [0.1, 0.7, -3.0, 0.2];
        for (target, place) in [(1, 1), (3, 2), (0, 3), (2, 4)] {
            for k in 1..=4 {
                assert_eq!(
                    top(k, &[row], &[target]),
                    f64::from(u8::from(k >= place)),
                    "class {target}, k {k}"
                );
            }
        }
        assert_eq!(top(1, &[row, row, row], &[1, 0, 1]), 2.0 / 3.0);
    }

    #[test]
    fn of_equals_the_lower_class_is_better() {
        for (target, right) in [(0, 1.0), (1, 1.0), (2, 0.0), (3, 0.0)] {
            assert_eq!(top(2, &[[5.0; 4]], &[target]), right);
        }
    }

    #[test]
    fn nan_never_helps() {
        let nan = f32::NAN;
        assert_eq!(top(1, &[[nan; 4], [nan, 1.0, 2.0, 3.0]], &[0, 0]), 0.0);
        assert_eq!(top(3, &[[nan, 0.0, 0.0, 0.0]], &[0]), 0.0);
        assert_eq!(top(1, &[[nan, 0.0, 0.0, 9.0]], &[3]), 0.0);
        assert_eq!(top(2, &[[nan, 0.0, 0.0, 9.0]], &[3]), 1.0);
    }

    #[test]
    fn wrong_shapes_and_classes_are_errors() {
        let output = Tensor::zeros([2, 4], (Kind::Float, tch::Device::Cpu));
        let message = |k, target: &Tensor| TopK::new(k).update(&output, target).unwrap_err().to_string();
        assert!(
            message(5, &Tensor::from_slice(&[0i64, 1])).contains("expected 1 to 4, the number of classes")
        );
        assert!(
            message(0, &Tensor::from_slice(&[0i64, 1])).contains("expected 1 to 4, the number of classes")
        );
        assert!(
            message(1, &Tensor::from_slice(&[0i64]))
                .contains("the target is Int64 of [1]; expected 2 classes")
        );
        assert!(message(1, &Tensor::from_slice(&[0i64, 4])).contains("a target class is 4; expected 0 to 3"));
        assert!(
            message(1, &Tensor::from_slice(&[-1i64, 0])).contains("a target class is -1; expected 0 to 3")
        );
    }

    /// Sample i of n is correct for i % 3 == 0: ceil(n / 3) of them, for any distribution over ranks.
    #[test]
    fn uneven_shares_and_ranks_without_a_batch_are_exact() -> Result<(), CommError> {
        for (world, samples) in [(1, 10), (2, 7), (3, 100), (4, 2)] {
            let values = LocalGroup::run(world, |group| {
                let mut metric = TopK::new(1);
                for batch in (group.rank()..samples).step_by(world).collect::<Vec<_>>().chunks(4) {
                    let targets: Vec<_> = batch.iter().map(|i| i64::from(i % 3 != 0)).collect();
                    let output = Tensor::from_slice(&[1f32, 0.0]).repeat([batch.len() as i64, 1]);
                    metric.update(&output, &Tensor::from_slice(&targets)).unwrap();
                }
                let both = super::super::reduce_metrics([&metric, &metric], &group)?;
                assert_eq!(both, [metric.reduce(&group)?; 2]);
                Ok(both[0])
            })?;
            assert_eq!(values, vec![samples.div_ceil(3) as f64 / samples as f64; world]);
        }
        Ok(())
    }
}
