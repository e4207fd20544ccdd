//! Copies a checkpoint's tensors into a model's.

use std::collections::BTreeMap;

use drumline_torch::{Named, OptimizerState, TorchError, buffers, parameters};
use tch::Tensor;
use tch::nn::VarStore;

use super::error::CheckpointError;

/// All tensors of a model: its parameters, then its buffers.
pub fn named(store: &VarStore) -> Vec<Named> {
    parameters(store).into_iter().chain(buffers(store)).collect()
}

/// Copies the values of `from` into the tensors `into` of the same names, on any device. Unless names, shapes and types
/// are the same in both, the error lists all differences and nothing is copied.
pub fn restore(into: &[Named], from: &[Named]) -> Result<(), CheckpointError> {
    check_model(into, from)?;
    let from: BTreeMap<_, _> = from.iter().map(|named| (&named.name, &named.tensor)).collect();
    tch::no_grad(|| into.iter().try_for_each(|named| copy(&named.tensor, from[&named.name])))
}

/// Returns an error with all differences unless names, shapes and types of `from` match `into`.
pub(crate) fn check_model(into: &[Named], from: &[Named]) -> Result<(), CheckpointError> {
    let from: BTreeMap<_, _> = from.iter().map(|named| (&named.name, &named.tensor)).collect();
    let wanted: BTreeMap<_, _> = into.iter().map(|named| (&named.name, &named.tensor)).collect();
    let missing = wanted.keys().filter(|name| !from.contains_key(*name));
    let unexpected = from.keys().filter(|name| !wanted.contains_key(*name));
    let both = wanted.iter().filter_map(|(name, wanted)| Some((name, *wanted, *from.get(name)?)));
    let mut differences: Vec<_> = missing.map(|name| format!("`{name}` is not in the checkpoint")).collect();
    differences.extend(unexpected.map(|name| format!("`{name}` is not in the model")));
    differences.extend(both.filter_map(|(name, wanted, found)| difference(name, wanted, found)));
    if differences.is_empty() { Ok(()) } else { Err(CheckpointError::Mismatch { differences }) }
}

fn copy(into: &Tensor, from: &Tensor) -> Result<(), CheckpointError> {
    into.shallow_clone().f_copy_(from).map_err(TorchError::from)?;
    Ok(())
}

fn difference(name: &str, wanted: &Tensor, found: &Tensor) -> Option<String> {
    if wanted.size() != found.size() {
        let (wanted, found) = (wanted.size(), found.size());
        return Some(format!("`{name}` has shape {found:?} in the checkpoint and {wanted:?} in the model"));
    }
    let (wanted, found) = (wanted.kind(), found.kind());
    (wanted != found)
        .then(|| format!("`{name}` is of type {found:?} in the checkpoint and {wanted:?} in the model"))
}

/// Returns an error if the state is that of another optimizer than `wanted`.
pub fn check_optimizer(saved: &OptimizerState, wanted: &str) -> Result<(), CheckpointError> {
    if saved.kind == wanted {
        return Ok(());
    }
    Err(CheckpointError::OtherOptimizer { saved: saved.kind.clone(), wanted: wanted.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::{Device, Kind};

    fn zeros(name: &str, shape: &[i64], kind: Kind) -> Named {
        Named { name: name.into(), tensor: Tensor::zeros(shape, (kind, Device::Cpu)) }
    }

    #[test]
    fn all_differences_are_listed_and_nothing_is_copied() {
        let model =
            [zeros("a", &[2], Kind::Float), zeros("b", &[2, 3], Kind::Float), zeros("c", &[1], Kind::Half)];
        let ones = Named { name: "a".into(), tensor: Tensor::ones([2], (Kind::Float, Device::Cpu)) };
        let saved = [ones, zeros("b", &[3, 2], Kind::Float), zeros("d", &[1], Kind::Half)];
        let error = restore(&model, &saved).unwrap_err().to_string();
        let expected = "the checkpoint is of another model:\
            \n  `c` is not in the checkpoint\
            \n  `d` is not in the model\
            \n  `b` has shape [3, 2] in the checkpoint and [2, 3] in the model; \
            try the model that it was saved from, or another folder";
        assert_eq!(error, expected);
        assert_eq!(Vec::<f32>::try_from(&model[0].tensor).unwrap(), [0.0, 0.0]);
        restore(&model[..1], &saved[..1]).unwrap();
        assert_eq!(Vec::<f32>::try_from(&model[0].tensor).unwrap(), [1.0, 1.0]);
        let error = restore(&[zeros("a", &[2], Kind::Double)], &saved[..1]).unwrap_err().to_string();
        assert!(error.contains("`a` is of type Float in the checkpoint and Double in the model"), "{error}");
        let many: Vec<_> =
            (0..20).map(|number| zeros(&format!("layer {number}"), &[1], Kind::Float)).collect();
        let error = restore(&many, &[]).unwrap_err().to_string();
        assert!(error.contains("\n  and 12 more; try") && error.lines().count() == 10, "{error}");
    }

    #[test]
    fn a_trained_leaf_can_be_restored() {
        let weight = Tensor::zeros([2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let saved = Named { name: "w".into(), tensor: Tensor::from_slice(&[1f32, 2.0]) };
        restore(&[Named { name: "w".into(), tensor: weight.shallow_clone() }], &[saved]).unwrap();
        assert!(weight.requires_grad() && weight.is_leaf());
        assert_eq!(Vec::<f32>::try_from(weight.detach()).unwrap(), [1.0, 2.0]);
    }

    #[test]
    fn another_optimizer_is_named() {
        let saved = OptimizerState { kind: "adam".into(), ..OptimizerState::default() };
        let error = check_optimizer(&saved, "sgd").unwrap_err().to_string();
        assert!(
            error.starts_with("the checkpoint's optimizer is `adam`, this run's is `sgd`; try"),
            "{error}"
        );
        check_optimizer(&saved, "adam").unwrap();
    }
}
