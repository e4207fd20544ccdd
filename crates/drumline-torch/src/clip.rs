//! Gradient clipping, by the norm of all gradients or by element, as PyTorch's `clip_grad_*`.
//!
//! With data parallelism call this after gradients were reduced, so that all ranks see the same norm.

use tch::{Device, Kind, Tensor};

use crate::error::TorchError;
use crate::foreach::{foreach_clamp, foreach_mul_scalar, foreach_mul_tensor, foreach_norm};
use crate::grad::grad;
use crate::named::Named;

/// PyTorch's epsilon, which avoids a division by a norm of zero.
const EPSILON: f64 = 1e-6;

/// Which norm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormType {
    /// The root of the sum of squares.
    L2,
    /// The greatest absolute value.
    Inf,
}

/// The norm of all gradients together. It may be infinite or NaN. Parameters without a gradient are skipped.
pub fn grad_norm(parameters: &[Named], norm: NormType) -> Result<f64, TorchError> {
    let grads = Grads::of(parameters)?;
    Ok(total(&grads.norms(norm)?, norm))
}

/// Scales gradients down so that their L2 norm is at most `max_norm`. Returns the norm before clipping.
///
/// An infinite or NaN norm is an error that names the parameter, and the gradients do not change.
///
/// ```
/// use drumline_torch::{Named, clip_grad_norm, set_grad};
/// use tch::{Device, Kind, Tensor};
///
/// let tensor = Tensor::zeros([2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
/// set_grad(&tensor, Some(&Tensor::from_slice(&[3f32, 4.0])))?;
/// let weight = Named { name: "weight".into(), tensor };
/// assert_eq!(clip_grad_norm(std::slice::from_ref(&weight), 1.0)?, 5.0);
/// assert!((weight.tensor.grad().double_value(&[1]) - 0.8).abs() < 1e-6);
/// # Ok::<(), drumline_torch::TorchError>(())
/// ```
pub fn clip_grad_norm(parameters: &[Named], max_norm: f64) -> Result<f64, TorchError> {
    clip_grad_norm_of(parameters, max_norm, NormType::L2)
}

/// Like [`clip_grad_norm`], with a choice of the norm.
pub fn clip_grad_norm_of(parameters: &[Named], max_norm: f64, norm: NormType) -> Result<f64, TorchError> {
    let grads = Grads::of(parameters)?;
    let norms = grads.norms(norm)?;
    let total = total(&norms, norm);
    if !total.is_finite() {
        return Err(grads.not_finite(&norms, total));
    }
    clip_grad_norm_to(parameters, max_norm, total)?;
    Ok(total)
}

/// Scales down these gradients, which are a part of those whose norm is `total`, so that the norm of all is at most
/// `max_norm`. An infinite or NaN norm is an error, and the gradients do not change.
pub fn clip_grad_norm_to(parameters: &[Named], max_norm: f64, total: f64) -> Result<(), TorchError> {
    check_bound("the maximum norm of gradients", max_norm)?;
    let grads = Grads::of(parameters)?;
    if !total.is_finite() {
        return Err(grads.not_finite(&grads.norms(NormType::L2)?, total));
    }
    let factor = max_norm / (total + EPSILON);
    if factor < 1.0 { foreach_mul_scalar(&grads.borrowed(), factor) } else { Ok(()) }
}

/// Like [`clip_grad_norm`], without waiting for the device. The norm is returned as a tensor of one element, and a
/// captured graph clips by the norm of each replay. If the norm is infinite or NaN, the gradients do not change:
/// `found_inf` is expected to skip such a step.
pub fn clip_grad_norm_on_device(parameters: &[Named], max_norm: f64) -> Result<Tensor, TorchError> {
    let device = Grads::of(parameters)?.0.first().map_or(Device::Cpu, |(_, grad)| grad.device());
    let total = grad_norm_on_device(parameters, device)?;
    clip_grad_norm_by(parameters, max_norm, &total)?;
    Ok(total)
}

/// The L2 norm of all gradients together, as a tensor of one element on their device; zero if there are none.
pub fn grad_norm_on_device(parameters: &[Named], device: Device) -> Result<Tensor, TorchError> {
    let grads = Grads::of(parameters)?;
    grads.check_one_device()?;
    if grads.0.is_empty() {
        return Ok(Tensor::f_zeros([], (Kind::Float, device))?);
    }
    let norms: Result<Vec<_>, _> =
        foreach_norm(&grads.borrowed(), 2.0)?.iter().map(|norm| norm.f_to_kind(Kind::Float)).collect();
    Ok(Tensor::f_stack(&norms?, 0)?.f_norm()?)
}

/// Scales down these gradients, which are a part of those whose norm is the tensor `total`, so that the norm of all is at
/// most `max_norm`. If the norm is infinite or NaN, the gradients do not change.
pub fn clip_grad_norm_by(parameters: &[Named], max_norm: f64, total: &Tensor) -> Result<(), TorchError> {
    check_bound("the maximum norm of gradients", max_norm)?;
    let grads = Grads::of(parameters)?;
    if grads.0.is_empty() {
        return Ok(());
    }
    let factor = (total.f_add_scalar(EPSILON)?.f_reciprocal()?.f_mul_scalar(max_norm)?).f_clamp_max(1.0)?;
    let factor = factor.f_where_self(&total.f_isfinite()?, &total.f_ones_like()?)?;
    foreach_mul_tensor(&grads.borrowed(), &factor)
}

/// Clamps each element of the gradients to the range from `-max_value` to `max_value`. NaN stays NaN.
pub fn clip_grad_value(parameters: &[Named], max_value: f64) -> Result<(), TorchError> {
    check_bound("the maximum value of gradients", max_value)?;
    foreach_clamp(&Grads::of(parameters)?.borrowed(), -max_value, max_value)
}

/// The gradients of the parameters that have one, with their names.
struct Grads<'a>(Vec<(&'a str, Tensor)>);

impl<'a> Grads<'a> {
    fn of(parameters: &'a [Named]) -> Result<Self, TorchError> {
        let mut grads = Vec::with_capacity(parameters.len());
        for Named { name, tensor } in parameters {
            grads.extend(grad(tensor)?.map(|grad| (name.as_str(), grad)));
        }
        Ok(Self(grads))
    }

    fn borrowed(&self) -> Vec<&Tensor> {
        self.0.iter().map(|(_, grad)| grad).collect()
    }

    fn check_one_device(&self) -> Result<(), TorchError> {
        let Some((first_name, first)) = self.0.first() else { return Ok(()) };
        let device = first.device();
        match self.0.iter().find(|(_, grad)| grad.device() != device) {
            None => Ok(()),
            Some((name, grad)) => Err(TorchError::Device {
                what: format!("the gradient of `{name}`"),
                expected: format!(
                    "{device:?}, as the gradient of `{first_name}`; try clip_grad_norm, which waits for both"
                ),
                got: grad.device(),
            }),
        }
    }

    /// The norm of each gradient. All are read from the device at once.
    fn norms(&self, norm: NormType) -> Result<Vec<f64>, TorchError> {
        let Some((_, first)) = self.0.first() else { return Ok(Vec::new()) };
        let ord = match norm {
            NormType::L2 => 2.0,
            NormType::Inf => f64::INFINITY,
        };
        let norms = foreach_norm(&self.borrowed(), ord)?;
        let on_one_device: Result<Vec<_>, _> =
            norms.iter().map(|norm| norm.f_to_device(first.device())?.f_to_kind(Kind::Double)).collect();
        Ok(Vec::try_from(Tensor::f_stack(&on_one_device?, 0)?)?)
    }

    fn not_finite(&self, norms: &[f64], total: f64) -> TorchError {
        let first = self.0.iter().zip(norms).find(|(_, norm)| !norm.is_finite());
        let parameter = first.map(|((name, _), norm)| ((*name).to_owned(), *norm));
        TorchError::NormNotFinite { total, parameter }
    }
}

fn total(norms: &[f64], norm: NormType) -> f64 {
    match norm {
        NormType::L2 => norms.iter().map(|norm| norm * norm).sum::<f64>().sqrt(),
        // `f64::max` would lose a NaN.
        NormType::Inf => norms.iter().copied().fold(0.0, |a, b| if b > a || b.is_nan() { b } else { a }),
    }
}

fn check_bound(what: &str, value: f64) -> Result<(), TorchError> {
    if value >= 0.0 {
        return Ok(());
    }
    Err(TorchError::value(what, value, "a number that is not negative"))
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::path::Path;

    use super::*;
    use crate::grad::set_grad;

    fn golden() -> HashMap<String, Tensor> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../bench/oracle/golden/clip.safetensors");
        Tensor::read_safetensors(path).unwrap().into_iter().collect()
    }

    /// Parameters with the golden gradients, and one without a gradient.
    fn parameters(golden: &HashMap<String, Tensor>) -> Vec<Named> {
        let with_grad = |name: &str| {
            let grad = golden[&format!("grad.{name}")].copy();
            let tensor = grad.zeros_like().set_requires_grad(true);
            set_grad(&tensor, Some(&grad)).unwrap();
            Named { name: name.into(), tensor }
        };
        let mut parameters: Vec<_> = ["w", "b", "conv"].map(with_grad).into();
        let without = Tensor::from_slice(&[1f32]).set_requires_grad(true);
        parameters.push(Named { name: "unused".into(), tensor: without });
        parameters
    }

    fn assert_grads(parameters: &[Named], golden: &HashMap<String, Tensor>, case: &str) {
        for Named { name, tensor } in &parameters[..3] {
            let expected = &golden[&format!("{case}.{name}")];
            assert!(tensor.grad().allclose(expected, 1e-6, 1e-9, false), "{case} {name}");
        }
    }

    #[test]
    fn norms_are_clipped_as_by_pytorch() {
        let golden = golden();
        for (norm, norm_name) in [(NormType::L2, "l2"), (NormType::Inf, "inf")] {
            for max_norm in [0.5, 1e3] {
                let case = format!("{norm_name}.{max_norm}");
                let parameters = parameters(&golden);
                let found = clip_grad_norm_of(&parameters, max_norm, norm).unwrap();
                let expected = golden[&format!("{case}.norm")].double_value(&[]);
                assert!((found - expected).abs() <= 1e-6 * expected, "{case}: {found} {expected}");
                assert_grads(&parameters, &golden, &case);
                assert!(grad_norm(&parameters, norm).unwrap() <= max_norm.min(found) * (1.0 + 1e-6));
            }
        }
    }

    #[test]
    fn norms_are_clipped_on_the_device_as_by_pytorch() {
        let golden = golden();
        for max_norm in [0.5, 1e3] {
            let case = format!("l2.{max_norm}");
            let parameters = parameters(&golden);
            let found = clip_grad_norm_on_device(&parameters, max_norm).unwrap();
            assert!(found.allclose(&golden[&format!("{case}.norm")], 1e-6, 0.0, false), "{case}");
            assert_grads(&parameters, &golden, &case);
        }
        let parameters = parameters(&golden);
        let _ = parameters[1].tensor.grad().get(0).fill_(f64::INFINITY);
        let found = clip_grad_norm_on_device(&parameters, 0.5).unwrap();
        assert_eq!(found.double_value(&[]), f64::INFINITY);
        assert!(parameters[0].tensor.grad().equal(&golden["grad.w"]), "gradients do not change");
        assert_eq!(clip_grad_norm_on_device(&parameters[3..], 0.5).unwrap().double_value(&[]), 0.0);
    }

    #[test]
    fn values_are_clipped_as_by_pytorch() {
        let golden = golden();
        let parameters = parameters(&golden);
        clip_grad_value(&parameters, 0.25).unwrap();
        assert_grads(&parameters, &golden, "value");
    }

    #[test]
    fn a_norm_that_is_not_finite_names_its_parameter_and_changes_nothing() {
        let golden = golden();
        for bad in [f32::NAN, f32::INFINITY] {
            for norm in [NormType::L2, NormType::Inf] {
                let parameters = parameters(&golden);
                let _ = parameters[1].tensor.grad().get(0).fill_(f64::from(bad));
                assert!(!grad_norm(&parameters, norm).unwrap().is_finite());
                let error = clip_grad_norm_of(&parameters, 0.5, norm).unwrap_err().to_string();
                assert!(error.contains("that of `b` is"), "{error}");
                assert!(parameters[0].tensor.grad().equal(&golden["grad.w"]));
            }
        }
    }

    #[test]
    fn without_gradients_the_norm_is_zero_and_bounds_are_checked() {
        let unused = &parameters(&golden())[3..];
        assert_eq!(clip_grad_norm(unused, 1.0).unwrap(), 0.0);
        assert_eq!(clip_grad_norm(&[], 1.0).unwrap(), 0.0);
        clip_grad_value(unused, 1.0).unwrap();
        assert!(clip_grad_norm(unused, -1.0).is_err());
        assert!(clip_grad_value(unused, f64::NAN).is_err());
    }
}
