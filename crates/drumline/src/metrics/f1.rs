//! F1 over classes.

use drumline_torch::TorchError;
use tch::Tensor;

use super::Metric;
use super::labelled::Labelled;

/// How the F1 of several classes is averaged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Average {
    /// Counts samples of all classes together, so that each sample has the same weight.
    Micro,
    /// Takes the mean over classes, so that each class has the same weight. Classes that are neither predicted nor
    /// correct for any sample are left out, as in scikit-learn.
    Macro,
}

/// F1 of the predicted classes, of samples or of the tokens of sentences: the harmonic mean of precision and recall,
/// from 0 to 1.
///
/// ```
/// use drumline::metrics::{Average, F1, Metric};
/// use drumline::tch::{Kind, Tensor};
///
/// let (predicted, right) = (Tensor::from_slice(&[0i64, 0, 1, 2]), Tensor::from_slice(&[0i64, 1, 1, 2]));
/// let mut f1 = F1::new(3, Average::Macro);
/// f1.update(&predicted.one_hot(3).to_kind(Kind::Float), &right)?;
/// assert!((f1.value() - (2.0 / 3.0 + 2.0 / 3.0 + 1.0) / 3.0).abs() < 1e-12);
/// # Ok::<(), drumline::torch::TorchError>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct F1 {
    average: Average,
    ignored: Option<i64>,
    /// For each class: correctly predicted, predicted, and actual samples.
    counts: Vec<[f64; 3]>,
}

impl F1 {
    /// For outputs with this number of classes.
    pub fn new(classes: usize, average: Average) -> Self {
        Self { average, ignored: None, counts: vec![[0.0; 3]; classes] }
    }

    /// Leaves out samples of this class, such as the padding of sentences.
    #[must_use]
    pub fn ignoring(self, class: i64) -> Self {
        Self { ignored: Some(class), ..self }
    }
}

impl Metric for F1 {
    fn update(&mut self, output: &Tensor, target: &Tensor) -> Result<(), TorchError> {
        let _no_grad = tch::no_grad_guard();
        let samples = Labelled::new("F1", output, target, self.ignored)?;
        let classes = self.counts.len() as i64;
        if samples.classes() != classes {
            let found = samples.classes();
            return Err(TorchError::value(
                "F1: the number of classes of the outputs",
                found,
                classes.to_string(),
            ));
        }
        let predicted = samples.output.f_argmax(1, false)?;
        let right = predicted.f_masked_select(&predicted.f_eq_tensor(&samples.target)?)?;
        for (place, these) in [right, predicted, samples.target].into_iter().enumerate() {
            let counts = these.f_bincount::<Tensor>(None, classes)?;
            let counts: Vec<i64> = Vec::try_from(counts.f_to_device(tch::Device::Cpu)?)?;
            self.counts.iter_mut().zip(counts).for_each(|(all, new)| all[place] += new as f64);
        }
        Ok(())
    }

    fn sums(&self) -> Vec<f64> {
        self.counts.concat()
    }

    fn value_of(&self, sums: &[f64]) -> f64 {
        let f1 = |[right, predicted, actual]: [f64; 3]| 2.0 * right / (predicted + actual);
        let counts = sums.as_chunks::<3>().0;
        match self.average {
            Average::Micro => f1([0, 1, 2].map(|place| counts.iter().map(|of| of[place]).sum())),
            Average::Macro => {
                let present: Vec<_> = counts.iter().filter(|of| of[1] + of[2] > 0.0).collect();
                present.iter().map(|of| f1(**of)).sum::<f64>() / present.len() as f64
            }
        }
    }

    fn reset(&mut self) {
        self.counts.fill([0.0; 3]);
    }
}

#[cfg(test)]
mod tests {
    use super::super::golden::{self, one_hot};
    use super::*;
    use drumline_comm::{CommError, LocalGroup};

    #[test]
    fn values_are_scikit_learns() {
        let cases = golden::read().classes;
        assert!(cases.len() > 20);
        for case in cases {
            for (average, expected) in [(Average::Micro, case.micro), (Average::Macro, case.macro_)] {
                let mut f1 = F1::new(case.classes, average);
                f1.ignored = case.ignored;
                // In two batches. The second may be empty.
                let half = case.target.len() / 2 + 1;
                for part in [0..half.min(case.target.len()), half.min(case.target.len())..case.target.len()] {
                    let output = one_hot(&case.predicted[part.clone()], case.classes);
                    f1.update(&output, &Tensor::from_slice(&case.target[part])).unwrap();
                }
                let near = (f1.value() - expected).abs() < 1e-12;
                assert!(near, "{average:?} of {case:?}: {}, expected {expected}", f1.value());
                f1.reset();
                assert!(f1.value().is_nan());
            }
        }
    }

    #[test]
    fn shares_of_ranks_are_added_up() -> Result<(), CommError> {
        let case =
            golden::read().classes.into_iter().find(|case| case.target.len() > 9 && case.ignored.is_none());
        let case = case.unwrap();
        let values = LocalGroup::run(3, |group| {
            let mut f1 = F1::new(case.classes, Average::Macro);
            // The last rank has no samples.
            for index in (0..case.target.len()).filter(|index| index % 2 == group.rank()) {
                let output = one_hot(&case.predicted[index..=index], case.classes);
                f1.update(&output, &Tensor::from_slice(&case.target[index..=index])).unwrap();
            }
            f1.reduce(&group)
        })?;
        assert!(values.iter().all(|value| (value - case.macro_).abs() < 1e-12 && *value == values[0]));
        Ok(())
    }

    #[test]
    fn wrong_shapes_and_classes_are_errors() {
        let message = |output: [i64; 2], target: &[i64]| {
            let output = Tensor::zeros(output, (tch::Kind::Float, tch::Device::Cpu));
            F1::new(3, Average::Micro).update(&output, &Tensor::from_slice(target)).unwrap_err().to_string()
        };
        assert!(
            message([2, 4], &[0, 1]).contains("F1: the number of classes of the outputs is 4; expected 3")
        );
        assert!(
            message([2, 3], &[0]).contains("the target is Int64 of [1]; expected classes as Int64 of [2]")
        );
        assert!(message([2, 3], &[0, 3]).contains("a target class is 3; expected 0 to 2; try"));
    }
}
