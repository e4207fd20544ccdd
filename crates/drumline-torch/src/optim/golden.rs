//! The optimizers compared with PyTorch 2.11: `bench/oracle/optim.py` wrote the expected values.

use std::collections::HashMap;
use std::path::Path;

use tch::Tensor;

use super::*;
use crate::grad::set_grad;

const NAMES: [&str; 3] = ["w", "b", "conv"];
const STEPS: usize = 10;

type Golden = HashMap<String, Tensor>;

fn golden() -> Golden {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../bench/oracle/golden/optim.safetensors");
    Tensor::read_safetensors(path).unwrap().into_iter().collect()
}

fn sgd(parameters: Vec<Named>, options: SgdOptions) -> Box<dyn Optimizer> {
    Box::new(Sgd::new(parameters, options).unwrap())
}

fn sgd_options(case: &str) -> SgdOptions {
    let plain = SgdOptions::default();
    match case {
        "sgd" => plain,
        "sgd_momentum" => SgdOptions { momentum: 0.9, ..plain },
        "sgd_dampening" => SgdOptions { momentum: 0.8, dampening: 0.3, ..plain },
        "sgd_nesterov" => SgdOptions { momentum: 0.9, nesterov: true, ..plain },
        "sgd_weight_decay" => SgdOptions { weight_decay: 0.1, ..plain },
        "sgd_nesterov_all" => {
            SgdOptions { momentum: 0.95, nesterov: true, weight_decay: 5e-2, maximize: true, ..plain }
        }
        "sgd_dampening_all" => {
            SgdOptions { momentum: 0.7, dampening: 0.5, weight_decay: 5e-2, maximize: true, ..plain }
        }
        other => panic!("no case {other}"),
    }
}

fn adam_options(case: &str) -> AdamOptions {
    let plain = AdamOptions::default();
    match case.split_once('_') {
        None => plain,
        Some((_, "odd")) => {
            let odd = AdamOptions { betas: (0.7, 0.9), eps: 1e-3, ..plain };
            AdamOptions { weight_decay: Some(0.2), maximize: true, ..odd }
        }
        Some((_, "amsgrad")) => {
            AdamOptions { betas: (0.5, 0.6), weight_decay: Some(0.1), amsgrad: true, ..plain }
        }
        Some(other) => panic!("no case {other:?}"),
    }
}

const CASES: [&str; 13] = [
    "sgd",
    "sgd_momentum",
    "sgd_dampening",
    "sgd_nesterov",
    "sgd_weight_decay",
    "sgd_nesterov_all",
    "sgd_dampening_all",
    "adam",
    "adam_odd",
    "adam_amsgrad",
    "adamw",
    "adamw_odd",
    "adamw_amsgrad",
];

fn make(case: &str, parameters: Vec<Named>) -> Box<dyn Optimizer> {
    match case {
        case if case.starts_with("sgd") => sgd(parameters, sgd_options(case)),
        case if case.starts_with("adamw") => Box::new(AdamW::new(parameters, adam_options(case)).unwrap()),
        case => Box::new(Adam::new(parameters, adam_options(case)).unwrap()),
    }
}

fn start(golden: &Golden) -> Vec<Named> {
    let leaf = |name: &str| golden[&format!("param.{name}")].copy().set_requires_grad(true);
    NAMES.map(|name| Named { name: name.into(), tensor: leaf(name) }).into()
}

fn step(optimizer: &mut dyn Optimizer, golden: &Golden, step: usize, lay: fn(&Tensor) -> Tensor) {
    optimizer.set_lr(golden["lr"].double_value(&[step as i64]));
    optimizer.zero_grad().unwrap();
    for Named { name, tensor } in optimizer.parameters() {
        let grad = golden.get(&format!("grad.{step}.{name}")).map(lay);
        set_grad(&tensor, grad.as_ref()).unwrap();
    }
    optimizer.step().unwrap();
}

/// The greatest difference, relative to the greatest element.
fn difference(found: &Tensor, expected: &Tensor) -> f64 {
    assert_eq!(found.size(), expected.size());
    let greatest = expected.abs().max().double_value(&[]);
    (found.detach() - expected).abs().max().double_value(&[]) / greatest
}

#[test]
fn ten_steps_equal_pytorchs() {
    let golden = golden();
    for case in CASES {
        let mut optimizer = make(case, start(&golden));
        for at in 0..STEPS {
            step(optimizer.as_mut(), &golden, at, Tensor::copy);
            for Named { name, tensor } in optimizer.parameters() {
                let expected = golden[&format!("{case}.{name}")].get(at as i64);
                let difference = difference(&tensor, &expected);
                assert!(difference <= 1e-6, "{case}, step {at}, `{name}`: {difference:e}");
            }
        }
        compare_state(case, &optimizer.state(), &golden);
    }
}

fn compare_state(case: &str, state: &OptimizerState, golden: &Golden) {
    let prefix = format!("{case}.state.");
    let expected = golden.keys().filter(|key| key.starts_with(&prefix)).count();
    assert_eq!(state.tensors.len(), expected, "{case}");
    for Named { name, tensor } in &state.tensors {
        let difference = difference(tensor, &golden[&format!("{prefix}{name}")]);
        assert!(difference <= 1e-6, "{case}, {name}: {difference:e}");
    }
}

#[test]
fn a_saved_state_resumes_to_the_same_bits() {
    let golden = golden();
    for case in CASES {
        let mut whole = make(case, start(&golden));
        (0..5).for_each(|at| step(whole.as_mut(), &golden, at, Tensor::copy));
        let copies = whole.parameters().into_iter().map(|Named { name, tensor }| Named {
            name,
            tensor: tensor.detach().copy().set_requires_grad(true),
        });
        let mut resumed = make(case, copies.collect());
        resumed.load_state(&whole.state()).unwrap();
        assert_eq!(resumed.lr(), whole.lr());
        for at in 5..STEPS {
            step(whole.as_mut(), &golden, at, Tensor::copy);
            step(resumed.as_mut(), &golden, at, Tensor::copy);
        }
        assert_same_bits(&whole.parameters(), &resumed.parameters());
        assert_same_bits(&whole.state().tensors, &resumed.state().tensors);
    }
}

#[test]
fn gradients_of_other_strides_make_the_same_step() {
    let golden = golden();
    let across = |grad: &Tensor| match grad.dim() {
        2 => grad.tr().contiguous().tr(),
        4 => grad.permute([0, 2, 3, 1]).contiguous().permute([0, 3, 1, 2]),
        _ => grad.copy(),
    };
    for case in ["sgd_nesterov_all", "adamw_amsgrad"] {
        let [mut plain, mut strided] = [(); 2].map(|()| make(case, start(&golden)));
        for at in 0..STEPS {
            step(plain.as_mut(), &golden, at, Tensor::copy);
            step(strided.as_mut(), &golden, at, across);
        }
        assert_same_bits(&plain.parameters(), &strided.parameters());
    }
}

fn assert_same_bits(found: &[Named], expected: &[Named]) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert_eq!(found.name, expected.name);
        assert!(found.tensor.equal(&expected.tensor), "{}", found.name);
    }
}
