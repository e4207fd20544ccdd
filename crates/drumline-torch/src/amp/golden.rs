//! Scales and steps compared with PyTorch 2.11's `GradScaler`: `bench/oracle/amp.py` wrote the expected values.

use std::collections::HashMap;
use std::path::Path;

use tch::{Device, Tensor};

use super::*;
use crate::grad::set_grad;
use crate::named::Named;
use crate::optim::{AdamOptions, AdamW, Optimizer, Sgd, SgdOptions};

const NAMES: [&str; 2] = ["w", "b"];
const STEPS: i64 = 24;
const MAX_NORM: f64 = 0.5;

type Golden = HashMap<String, Tensor>;

fn golden() -> Golden {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../bench/oracle/golden/amp.safetensors");
    Tensor::read_safetensors(path).unwrap().into_iter().collect()
}

fn parameters(golden: &Golden) -> Vec<Named> {
    let leaf = |name: &str| golden[&format!("param.{name}")].copy().set_requires_grad(true);
    NAMES.map(|name| Named { name: name.into(), tensor: leaf(name) }).into()
}

fn make(case: &str, golden: &Golden) -> (Box<dyn Optimizer>, LossScaler) {
    let parameters = parameters(golden);
    let plain = DynamicScale::default();
    let (optimizer, rule): (Box<dyn Optimizer>, _) = match case {
        "sgd" => {
            let options = SgdOptions { lr: 0.1, ..SgdOptions::default() };
            (Box::new(Sgd::new(parameters, options).unwrap()), DynamicScale { growth_interval: 3, ..plain })
        }
        "sgd_momentum" => {
            let options = SgdOptions { lr: 0.1, momentum: 0.9, nesterov: true, ..SgdOptions::default() };
            let options = SgdOptions { weight_decay: 0.05, ..options };
            (Box::new(Sgd::new(parameters, options).unwrap()), DynamicScale { growth_interval: 3, ..plain })
        }
        _ => {
            let options = AdamOptions { lr: 0.01, ..AdamOptions::default() };
            let rule = match case {
                "adamw" => DynamicScale {
                    init_scale: 1024.0,
                    growth_factor: 4.0,
                    backoff_factor: 0.25,
                    growth_interval: 5,
                },
                _ => DynamicScale { growth_interval: 2, ..plain },
            };
            (Box::new(AdamW::new(parameters, options).unwrap()), rule)
        }
    };
    (optimizer, LossScaler::new(ScalePolicy::Dynamic(rule), Device::Cpu).unwrap())
}

/// How a step is made.
#[derive(Debug, Clone, Copy)]
enum Way {
    Host,
    Device,
}

fn step(
    case: &str,
    optimizer: &mut dyn Optimizer,
    scaler: &mut LossScaler,
    grads: &dyn Fn(&str) -> Tensor,
    way: Way,
) {
    let scale = scaler.scale().unwrap();
    for Named { name, tensor } in optimizer.parameters() {
        set_grad(&tensor, Some(&(grads(&name) * scale))).unwrap();
    }
    let unscaled = scaler.received().unscale(scaler, optimizer.parameters()).unwrap();
    if case == "clipped" {
        let _ = unscaled.clip_grad_norm(MAX_NORM).unwrap();
    }
    match way {
        Way::Host => drop(unscaled.step(scaler, optimizer).unwrap()),
        Way::Device => unscaled.step_on_device(scaler, optimizer).unwrap(),
    }
}

fn close(found: &Tensor, expected: &Tensor, what: &str) {
    let difference = (found.detach() - expected).abs().max().double_value(&[]);
    assert!(difference <= 1e-6, "{what}: {difference:e}");
}

#[test]
fn scales_and_steps_equal_pytorchs() {
    let golden = golden();
    for case in ["sgd", "sgd_momentum", "adamw", "clipped"] {
        for way in [Way::Host, Way::Device] {
            let (mut optimizer, mut scaler) = make(case, &golden);
            if let Way::Device = way {
                optimizer.keep_lr_on_device().unwrap();
            }
            for at in 0..STEPS {
                let what = format!("{case}, {way:?}, step {at}");
                let grads = |name: &str| golden[&format!("grad.{at}.{name}")].copy();
                step(case, optimizer.as_mut(), &mut scaler, &grads, way);
                let state = scaler.state().unwrap();
                let expected = |key: &str| golden[&format!("{case}.{key}")].double_value(&[at]);
                assert_eq!(
                    (state.scale, state.growth_tracker as f64),
                    (expected("scale"), expected("tracker")),
                    "{what}"
                );
                for Named { name, tensor } in optimizer.parameters() {
                    close(&tensor, &golden[&format!("{case}.{name}")].get(at), &format!("{what}, `{name}`"));
                }
                let steps = optimizer.state().tensors.into_iter().find(|named| named.name == "w.step");
                let steps = steps.map_or(0.0, |named| named.tensor.double_value(&[]));
                assert_eq!(steps, expected("steps"), "{what}");
            }
        }
    }
}
