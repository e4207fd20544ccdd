//! Outputs and classes of samples, or of the tokens of sentences: checked, flattened, and without ignored classes.

use drumline_torch::TorchError;
use tch::{Kind, Tensor};

/// Scores of samples × classes, and the correct class of each sample.
pub(super) struct Labelled {
    pub(super) output: Tensor,
    pub(super) target: Tensor,
}

impl Labelled {
    /// Takes an output of … × classes and a target of …, and removes samples whose class is `ignored`. Errors begin
    /// with the name of the metric.
    pub(super) fn new(
        metric: &str,
        output: &Tensor,
        target: &Tensor,
        ignored: Option<i64>,
    ) -> Result<Self, TorchError> {
        let (size, samples) = (output.size(), target.size());
        let Some((&classes, rest)) = size.split_last().filter(|(classes, _)| **classes > 0) else {
            return Err(TorchError::Shape {
                what: format!("{metric}: the output"),
                expected: "samples × classes".to_owned(),
                got: size,
            });
        };
        if rest != samples || target.kind() != Kind::Int64 {
            let got = format!("{:?} of {samples:?}", target.kind());
            let expected = format!("classes as Int64 of {rest:?}");
            return Err(TorchError::value(format!("{metric}: the target"), got, expected));
        }
        let (mut output, mut target) = (output.f_reshape([-1, classes])?, target.f_reshape([-1])?);
        if let Some(ignored) = ignored {
            let counts = target.f_ne(ignored)?;
            output = output.f_index(&[Some(&counts)])?;
            target = target.f_masked_select(&counts)?;
        }
        let outside = target.f_masked_select(&target.f_lt(0)?.f_logical_or(&target.f_ge(classes)?)?)?;
        if outside.numel() > 0 {
            let worst = outside.f_int64_value(&[0])?;
            let expected = format!("0 to {}; try the model's class count", classes - 1);
            return Err(TorchError::value(format!("{metric}: a target class"), worst, expected));
        }
        Ok(Self { output, target })
    }

    pub(super) fn classes(&self) -> i64 {
        self.output.size()[1]
    }
}
