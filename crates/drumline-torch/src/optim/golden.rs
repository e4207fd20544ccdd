//! The optimizers compared with PyTorch 2.11, with `transformers`, with `bitsandbytes` and with formulas of papers:
//! `optim.py`, `peer_optimizers.py` and `eight_bit.py` of `bench/oracle/` wrote the expected values.

use std::collections::HashMap;
use std::path::Path;

use tch::Tensor;

use super::*;
use crate::grad::set_grad;

const NAMES: [&str; 3] = ["w", "b", "conv"];
const STEPS: usize = 10;

type Golden = HashMap<String, Tensor>;

fn golden() -> Golden {
    golden_of("optim")
}

fn golden_of(name: &str) -> Golden {
    let file = format!("../../bench/oracle/golden/{name}.safetensors");
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
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

fn lion_options(case: &str) -> LionOptions {
    let plain = LionOptions::default();
    match case {
        "lion" => plain,
        _ => LionOptions { betas: (0.7, 0.9), weight_decay: 0.2, maximize: true, ..plain },
    }
}

fn lamb_options(case: &str) -> LambOptions {
    let decaying = LambOptions { weight_decay: 0.1, ..LambOptions::default() };
    match case {
        "lamb" => decaying,
        "lamb_deepspeed" => LambOptions { weight_decay: 0.1, ..LambOptions::deepspeed() },
        _ => LambOptions {
            betas: (0.7, 0.9),
            eps: 1e-3,
            min_coeff: 0.0,
            max_coeff: f64::INFINITY,
            maximize: true,
            ..LambOptions::default()
        },
    }
}

fn adafactor_options(case: &str) -> AdafactorOptions {
    let plain = AdafactorOptions::default();
    let transformers = AdafactorOptions { eps: (1e-15, 1e-3), ..plain.clone() };
    match case {
        "adafactor" => plain,
        "adafactor_odd" => AdafactorOptions {
            beta2_decay: -0.5,
            eps: (1e-3, 1e-2),
            d: 1.5,
            weight_decay: 0.2,
            maximize: true,
            ..plain
        },
        "adafactor_warmup" => AdafactorOptions { step_size: StepSize::WarmUp, ..transformers },
        _ => AdafactorOptions { step_size: StepSize::Fixed, scale_parameter: false, ..transformers },
    }
}

fn adagrad_options(case: &str) -> AdagradOptions {
    let plain = AdagradOptions::default();
    match case {
        "adagrad" => plain,
        _ => AdagradOptions {
            lr_decay: 0.1,
            weight_decay: 0.2,
            initial_accumulator_value: 0.5,
            eps: 1e-3,
            maximize: true,
            ..plain
        },
    }
}

const CASES: [&str; 24] = [
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
    "lion",
    "lion_odd",
    "lamb",
    "lamb_unbounded",
    "lamb_deepspeed",
    "adafactor",
    "adafactor_odd",
    "adafactor_warmup",
    "adafactor_fixed",
    "adagrad",
    "adagrad_odd",
];

fn make(case: &str, parameters: Vec<Named>) -> Box<dyn Optimizer> {
    match case {
        case if case.starts_with("sgd") => sgd(parameters, sgd_options(case)),
        case if case.starts_with("lion") => Box::new(Lion::new(parameters, lion_options(case)).unwrap()),
        case if case.starts_with("lamb") => Box::new(Lamb::new(parameters, lamb_options(case)).unwrap()),
        case if case.starts_with("adafactor") => {
            Box::new(Adafactor::new(parameters, adafactor_options(case)).unwrap())
        }
        case if case.starts_with("adagrad") => {
            Box::new(Adagrad::new(parameters, adagrad_options(case)).unwrap())
        }
        case if case.starts_with("adamw") => Box::new(AdamW::new(parameters, adam_options(case)).unwrap()),
        case => Box::new(Adam::new(parameters, adam_options(case)).unwrap()),
    }
}

fn start(golden: &Golden) -> Vec<Named> {
    let leaf = |name: &str| golden[&format!("param.{name}")].copy().set_requires_grad(true);
    NAMES.map(|name| Named { name: name.into(), tensor: leaf(name) }).into()
}

fn step(optimizer: &mut dyn Optimizer, golden: &Golden, step: usize, lay: impl Fn(&Tensor) -> Tensor) {
    optimizer.set_lr(golden["lr"].double_value(&[step as i64]));
    optimizer.zero_grad().unwrap();
    for Named { name, tensor } in optimizer.parameters() {
        let grad = golden.get(&format!("grad.{step}.{name}")).map(&lay);
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
        compare_steps(case, optimizer.as_mut(), &golden);
        compare_state(case, &optimizer.state(), &golden);
    }
}

fn compare_steps(case: &str, optimizer: &mut dyn Optimizer, golden: &Golden) {
    for at in 0..STEPS {
        step(optimizer, golden, at, Tensor::copy);
        for Named { name, tensor } in optimizer.parameters() {
            let expected = golden[&format!("{case}.{name}")].get(at as i64);
            let difference = difference(&tensor, &expected);
            assert!(difference <= 1e-6, "{case}, step {at}, `{name}`: {difference:e}");
        }
    }
}

#[test]
fn ten_steps_equal_those_of_other_libraries() {
    let golden = golden_of("peer_optimizers");
    for case in ["adafactor_warmup", "adafactor_fixed", "lion", "lion_odd"] {
        compare_steps(case, make(case, start(&golden)).as_mut(), &golden);
    }
}

/// Parameters in f64 have no kernels of ours.
#[test]
fn operations_of_libtorch_make_the_same_steps() {
    let golden = golden();
    let doubles = |tensor: &Tensor| tensor.to_kind(tch::Kind::Double);
    for case in CASES.into_iter().filter(|case| case.starts_with(['l']) || case.starts_with("adaf")) {
        let parameters = start(&golden).into_iter().map(|Named { name, tensor }| Named {
            name,
            tensor: doubles(&tensor.detach()).set_requires_grad(true),
        });
        let mut optimizer = make(case, parameters.collect());
        for at in 0..STEPS {
            step(optimizer.as_mut(), &golden, at, doubles);
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
        // Ours keeps the columns of a matrix in one dim.
        let expected = golden[&format!("{prefix}{name}")].reshape(tensor.size());
        let difference = difference(tensor, &expected);
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

#[test]
fn moments_in_8_bits_are_those_of_the_published_rule_to_the_bit() {
    let golden = golden_of("eight_bit");
    let leaf = |name: &str| golden[&format!("param.{name}")].copy().set_requires_grad(true);
    let names = ["whole", "rest", "small", "vector"];
    let parameters: Vec<_> = names.map(|name| Named { name: name.into(), tensor: leaf(name) }).into();
    let options = AdamOptions {
        lr: 0.02,
        betas: (0.9, 0.99),
        weight_decay: Some(0.1),
        moments: Moments::EightBit,
        ..AdamOptions::default()
    };
    let mut adamw = AdamW::new(parameters.clone(), options).unwrap();
    for at in 0..6 {
        for Named { name, tensor } in &parameters {
            set_grad(tensor, Some(&golden[&format!("grad.{at}.{name}")])).unwrap();
        }
        adamw.step().unwrap();
        for Named { name, tensor } in &parameters {
            let expected = golden[&format!("after.{name}")].get(at);
            let difference = difference(tensor, &expected);
            assert!(tensor.equal(&expected), "step {at}, `{name}`: {difference:e}");
        }
    }
    let state = adamw.state().tensors;
    assert_eq!(state.len(), 2 * 5 + 2 * 3);
    for Named { name, tensor } in &state {
        assert!(tensor.equal(&golden[&format!("state.{name}")]), "{name}");
    }
    let bytes = |name: &str| {
        let of = state.iter().filter(|named| named.name.starts_with(name));
        of.map(|named| named.tensor.numel() * named.tensor.kind().elt_size_in_bytes()).sum::<usize>()
    };
    // Two codes for each element, two scales for each block, and the number of steps.
    assert_eq!(bytes("whole"), 9 * 512 * 2 + 9 * 2 * 2 * 4 + 4);
    assert_eq!(bytes("rest"), 14 * 300 * 2 + 14 * 2 * 2 * 4 + 4);
}
