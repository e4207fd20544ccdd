//! Outputs and classes of samples, or of the tokens of sentences, checked and laid flat; what is not there is left out.

use drumline_torch::TorchError;
use tch::{Kind, Tensor};

/// Scores of samples × classes, and as many right classes.
pub(super) struct Labelled {
    pub(super) output: Tensor,
    pub(super) target: Tensor,
}

impl Labelled {
    /// Of an output of … × classes and a target of …; without those whose class is `ignored`. An error that begins with `metric` if they do not fit.
    pub(super) fn new(
        metric: &str,
        output: &Tensor,
        target: &Tensor,
        ignored: Option<i64>,
    ) -> Result<Self, TorchError> {
        let unfit = |what: String| Err(TorchError::Unfit(format!("{metric}: {what}")));
        let (size, samples) = (output.size(), target.size());
        let Some((&classes, rest)) = size.split_last().filter(|(classes, _)| **classes > 0) else {
            return unfit(format!("expected outputs of samples × classes, got {size:?}"));
        };
        if rest != samples || target.kind() != Kind::Int64 {
            let kind = target.kind();
            return unfit(format!("expected classes as Int64 of {rest:?}, got {kind:?} of {samples:?}"));
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
            return unfit(format!(
                "class {worst} is outside of 0 to {}; try the model's class count",
                classes - 1
            ));
        }
        Ok(Self { output, target })
    }

    pub(super) fn classes(&self) -> i64 {
        self.output.size()[1]
    }
}
