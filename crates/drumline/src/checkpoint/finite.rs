//! Whether weights are finite. A training whose loss has become NaN still saves checkpoints, which must not replace the
//! last good one.

use drumline_torch::Named;
use tch::Kind;

use super::state::RunState;

impl RunState {
    /// Whether the loss, if it is known, and all weights are finite. A buffer may hold infinities, as masks do, but no
    /// NaN.
    pub(super) fn is_finite(&self) -> bool {
        let has_loss = self.loss.is_none_or(f64::is_finite);
        has_loss && self.model.iter().chain(&self.trained).all(is_finite)
    }
}

/// Checks the sum in double precision, which is not finite if a value is not. This needs no copy of the values.
fn is_finite(named: &Named) -> bool {
    let tensor = &named.tensor;
    if !tensor.defined() || !matches!(tensor.kind(), Kind::Half | Kind::BFloat16 | Kind::Float | Kind::Double)
    {
        return true;
    }
    let sum = tch::no_grad(|| tensor.f_sum(Kind::Double).and_then(|sum| sum.f_double_value(&[])));
    // Tensors that cannot be summed are not checked.
    let Ok(sum) = sum else { return true };
    if tensor.requires_grad() { sum.is_finite() } else { !sum.is_nan() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Tensor;

    fn state(values: &[f32], is_trained: bool) -> RunState {
        let tensor = Tensor::from_slice(values).set_requires_grad(is_trained);
        RunState::new(vec![Named { name: "w".into(), tensor }]).unwrap()
    }

    #[test]
    fn weights_are_finite_and_buffers_have_no_nan() {
        for (values, weight, buffer) in [
            (&[1.0, -2.0, f32::MAX, f32::MAX][..], true, true),
            (&[], true, true),
            (&[1.0, f32::NAN], false, false),
            (&[1.0, f32::INFINITY], false, true),
            (&[f32::NEG_INFINITY, f32::NEG_INFINITY], false, true),
        ] {
            let found = [true, false].map(|is_trained| state(values, is_trained).is_finite());
            assert_eq!(found, [weight, buffer], "{values:?}");
        }
    }

    #[test]
    fn a_known_loss_must_be_finite() {
        let with = |loss| RunState { loss, ..state(&[1.0], true) }.is_finite();
        assert!(with(None) && with(Some(0.5)));
        assert!(!with(Some(f64::NAN)) && !with(Some(f64::INFINITY)));
    }
}
