//! Results of scikit-learn and seqeval for the same classes, read for the tests (`bench/oracle/f1.py`).

use serde::Deserialize;
use tch::{Kind, Tensor};

const PATH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../bench/oracle/golden/f1.json");

#[derive(Deserialize)]
pub(super) struct Golden {
    pub(super) classes: Vec<Classes>,
    pub(super) spans: Vec<Spans>,
}

#[derive(Deserialize, Debug)]
pub(super) struct Classes {
    pub(super) classes: usize,
    pub(super) ignored: Option<i64>,
    pub(super) predicted: Vec<i64>,
    pub(super) target: Vec<i64>,
    pub(super) micro: f64,
    #[serde(rename = "macro")]
    pub(super) macro_: f64,
}

/// Sentences of tags.
#[derive(Deserialize, Debug)]
pub(super) struct Spans {
    pub(super) tags: Vec<String>,
    pub(super) predicted: Vec<Vec<i64>>,
    pub(super) target: Vec<Vec<i64>>,
    pub(super) f1: f64,
}

pub(super) fn read() -> Golden {
    serde_json::from_str(&std::fs::read_to_string(PATH).unwrap()).unwrap()
}

/// Outputs that predict these classes.
pub(super) fn one_hot(classes: &[i64], num: usize) -> Tensor {
    match classes {
        [] => Tensor::zeros([0, num as i64], (Kind::Float, tch::Device::Cpu)),
        _ => Tensor::from_slice(classes).one_hot(num as i64).to_kind(Kind::Float),
    }
}
