//! Golden files, and numbers that both sides compute by the same rule.

use std::path::PathBuf;

use serde_json::Value;
use tch::{Kind, Tensor};

/// A file of `bench/oracle/golden`.
pub(super) fn path(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../bench/oracle/golden").join(name)
}

pub(super) fn json(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(path(name)).unwrap()).unwrap()
}

pub(super) fn floats(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

pub(super) fn strings(value: &Value) -> Vec<String> {
    value.as_array().unwrap().iter().map(|x| x.as_str().unwrap().to_owned()).collect()
}

/// Numbers between -0.5 and 0.5 that look random, computed from the indices of the tensor and the element.
pub(super) fn fill(index: u32, shape: &[i64]) -> Tensor {
    let number = |place: u32| {
        let mut x = place.wrapping_add(index.wrapping_mul(7919)).wrapping_mul(2654435761);
        x ^= x >> 15;
        x = x.wrapping_mul(2246822519);
        x ^= x >> 13;
        f64::from(x) / 4294967296.0 - 0.5
    };
    let numbers: Vec<f64> = (0..shape.iter().product::<i64>() as u32).map(number).collect();
    Tensor::from_slice(&numbers).reshape(shape)
}

/// Two figures that identify a tensor: its length and its product with a pattern.
pub(super) fn brief(tensor: &Tensor) -> [f64; 2] {
    let x = tensor.detach().to_kind(Kind::Double).flatten(0, -1);
    let product = (&x * fill(1, &x.size())).sum(Kind::Double);
    [x.norm().double_value(&[]), product.double_value(&[])]
}

/// Asserts that figures agree to `tolerance` of the greatest of them.
pub(super) fn assert_close(what: &str, got: &[f64], expected: &[f64], tolerance: f64) {
    let scale = expected.iter().fold(1e-3, |most: f64, x| most.max(x.abs()));
    assert_eq!(got.len(), expected.len(), "{what}");
    for (got, expected) in got.iter().zip(expected) {
        assert!((got - expected).abs() <= tolerance * scale, "{what}: {got} is not {expected}");
    }
}
