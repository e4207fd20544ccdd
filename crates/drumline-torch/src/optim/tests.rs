//! Parameter groups, wrong states, invalid settings.

use tch::{Device, Kind, Tensor};

use super::*;
use crate::grad::{grad, set_grad};

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

fn leaf(name: &str, sizes: &[i64]) -> Named {
    Named { name: name.into(), tensor: Tensor::ones(sizes, FLOAT).set_requires_grad(true) }
}

fn set_grads(parameters: &[Named], value: f64) {
    for Named { tensor, .. } in parameters {
        set_grad(tensor, Some(&tensor.full_like(value).detach())).unwrap();
    }
}

fn first(named: &Named) -> f64 {
    named.tensor.flatten(0, -1).double_value(&[0])
}

fn momentum() -> SgdOptions {
    SgdOptions { lr: 0.5, momentum: 0.5, ..SgdOptions::default() }
}

/// An SGD with momentum that has made a step.
fn stepped(parameters: Vec<Named>) -> Sgd {
    set_grads(&parameters, 1.0);
    let mut sgd = Sgd::new(parameters, momentum()).unwrap();
    sgd.step().unwrap();
    sgd
}

#[test]
fn betas_are_checked_when_they_are_set() {
    let one = || vec![leaf("weight", &[2])];
    let betas = |optimizer: &dyn Optimizer| {
        let scalars = optimizer.state().scalars;
        ["beta1", "beta2"].map(|name| scalars[name])
    };
    let optimizers: [Box<dyn Optimizer>; 4] = [
        Box::new(AdamW::new(one(), AdamOptions::default()).unwrap()),
        Box::new(Lion::new(one(), LionOptions::default()).unwrap()),
        Box::new(Lamb::new(one(), LambOptions::default()).unwrap()),
        Box::new(MasterWeights::new(one(), |copies| AdamW::new(copies, AdamOptions::default())).unwrap()),
    ];
    for mut optimizer in optimizers {
        assert!(optimizer.set_betas(0.0, 0.99).unwrap());
        for (beta1, beta2) in [(1.0, 0.99), (0.9, 1.5), (-0.1, 0.9), (f64::NAN, 0.9)] {
            let error = optimizer.set_betas(beta1, beta2).unwrap_err().to_string();
            assert!(error.ends_with("expected at least 0 and less than 1"), "{error}");
            assert_eq!(betas(&*optimizer), [0.0, 0.99], "nothing changes");
        }
    }
    let mut sgd = Sgd::new(one(), momentum()).unwrap();
    assert!(!sgd.set_betas(0.5, 0.99).unwrap());
}

#[test]
fn groups_have_their_own_learning_rates() {
    let [decaying, kept] = no_decay_on_norms(vec![leaf("fc.weight", &[2, 2]), leaf("fc.bias", &[2])]);
    let fast = ParameterGroup { lr_factor: 10.0, ..vec![leaf("head.weight", &[1, 2])].into() };
    let options = SgdOptions { lr: 0.1, weight_decay: 1.0, ..SgdOptions::default() };
    let mut sgd = Sgd::new([decaying, kept, fast], options).unwrap();
    let parameters = sgd.parameters();
    assert_eq!(
        parameters.iter().map(|p| p.name.as_str()).collect::<Vec<_>>(),
        ["fc.weight", "fc.bias", "head.weight"]
    );
    set_grads(&parameters, 1.0);
    sgd.step().unwrap();
    let found: Vec<_> = parameters.iter().map(first).collect();
    for (found, expected) in found.iter().zip([1.0 - 0.1 * 2.0, 1.0 - 0.1, 1.0 - 2.0]) {
        assert!((found - expected).abs() < 1e-6, "{found} {expected}");
    }
}

#[test]
fn parameters_of_all_kinds_are_stepped() {
    let of = |name: &str, kind| {
        let tensor = Tensor::ones([3], (kind, Device::Cpu)).set_requires_grad(true);
        Named { name: name.into(), tensor }
    };
    let kinds = [Kind::Float, Kind::Double, Kind::BFloat16, Kind::Float];
    let parameters: Vec<_> = kinds.iter().enumerate().map(|(i, kind)| of(&format!("p{i}"), *kind)).collect();
    let mut adamw = AdamW::new(
        parameters.clone(),
        AdamOptions { lr: 0.5, weight_decay: Some(0.0), ..Default::default() },
    )
    .unwrap();
    set_grads(&parameters, 2.0);
    adamw.step().unwrap();
    for parameter in &parameters {
        assert!((first(parameter) - 0.5).abs() < 1e-2, "{}", parameter.name);
    }
}

#[test]
fn without_gradients_a_step_changes_nothing() {
    let mut sgd = stepped(vec![leaf("w", &[2])]);
    let before = first(&sgd.parameters()[0]);
    sgd.zero_grad().unwrap();
    assert!(grad(&sgd.parameters()[0].tensor).unwrap().is_none());
    sgd.step().unwrap();
    assert_eq!(first(&sgd.parameters()[0]), before);
    assert_eq!(sgd.state().tensors[0].tensor.double_value(&[0]), 1.0);
}

#[test]
fn gradients_of_replaced_parameters_are_cleared() {
    let parameters = vec![leaf("w", &[4, 2]), leaf("elsewhere", &[1])];
    let mut sgd = Sgd::new(parameters.clone(), momentum()).unwrap();
    let rows = parameters[0].tensor.detach().narrow(0, 2, 2).set_requires_grad(true);
    sgd.replace_parameters(&mut |named| (named.name == "w").then(|| rows.shallow_clone())).unwrap();
    set_grads(&parameters, 1.0);
    sgd.zero_grad().unwrap();
    assert!(parameters.iter().all(|named| grad(&named.tensor).unwrap().is_none()));
    set_grads(&sgd.parameters(), 1.0);
    sgd.step().unwrap();
    let firsts = |column: &Tensor| Vec::<f32>::try_from(column.select(1, 0).detach()).unwrap();
    assert_eq!(firsts(&parameters[0].tensor), [1.0, 1.0, 0.5, 0.5], "the control: rows are stepped");
}

#[test]
fn a_wrong_gradient_leaves_no_half_step() {
    let parameters = vec![leaf("a", &[2])];
    let odd = ParameterGroup { lr_factor: 2.0, ..vec![leaf("odd", &[2])].into() };
    let bad = odd.parameters[0].clone();
    let mut sgd = Sgd::new([parameters.clone().into(), odd], momentum()).unwrap();
    set_grads(&parameters, 1.0);
    set_grad(&bad.tensor, Some(&Tensor::ones([2], (Kind::Double, Device::Cpu)))).unwrap();
    let error = sgd.step().unwrap_err().to_string();
    assert!(error.starts_with("parameter `odd`: ") && error.contains("Double"), "{error}");
    assert_eq!((first(&parameters[0]), sgd.state().tensors.len()), (1.0, 0));
    set_grads(&[bad], 1.0);
    sgd.step().unwrap();
    assert_eq!((first(&parameters[0]), sgd.state().tensors.len()), (0.5, 2));
}

#[test]
fn a_wrong_state_is_an_error_and_changes_nothing() {
    let saved = stepped(vec![leaf("a", &[2]), leaf("b", &[3])]).state();
    assert_eq!(saved.scalars["momentum"], 0.5);
    let refused = |sgd: &mut dyn Optimizer, words: &str| {
        let error = sgd.load_state(&saved).unwrap_err().to_string();
        assert!(
            error.starts_with("cannot load the state of an optimizer: ") && error.contains(words),
            "{error}"
        );
        assert_eq!(sgd.lr(), 0.25);
        assert!(sgd.state().tensors.is_empty());
    };
    let sgd = |parameters, momentum| {
        let options = SgdOptions { lr: 0.25, momentum, ..SgdOptions::default() };
        Sgd::new(parameters, options).unwrap()
    };
    let only_a = vec![leaf("a", &[2])];
    refused(&mut sgd(only_a, 0.5), "`b.momentum_buffer`, and no parameter `b` is trained here");
    let other_shape = vec![leaf("a", &[2]), leaf("b", &[4])];
    refused(&mut sgd(other_shape, 0.5), "`b.momentum_buffer` has shape [3]; expected [4]");
    let same = || vec![leaf("a", &[2]), leaf("b", &[3])];
    refused(&mut sgd(same(), 0.0), "keeps [] and no `momentum_buffer`");
    let options = AdamOptions { lr: 0.25, ..AdamOptions::default() };
    refused(&mut Adam::new(same(), options).unwrap(), "it is of `sgd`, and this optimizer is `adam`");
    let mut control = sgd(same(), 0.5);
    control.load_state(&saved).unwrap();
    assert_eq!(control.lr(), 0.5);
    assert_eq!(control.state().tensors.len(), 2);
}

#[test]
fn a_loaded_state_is_a_copy() {
    let mut saved = stepped(vec![leaf("a", &[2])]);
    let mut loaded = Sgd::new(vec![leaf("a", &[2])], momentum()).unwrap();
    loaded.load_state(&saved.state()).unwrap();
    saved.step().unwrap();
    assert_eq!(saved.state().tensors[0].tensor.double_value(&[0]), 1.5);
    assert_eq!(loaded.state().tensors[0].tensor.double_value(&[0]), 1.0);
}

#[test]
fn an_incomplete_state_of_adam_is_an_error() {
    let parameters = vec![leaf("a", &[2])];
    set_grads(&parameters, 1.0);
    let mut adam = Adam::new(parameters, AdamOptions::default()).unwrap();
    adam.step().unwrap();
    let mut state = adam.state();
    let names: Vec<_> = state.tensors.iter().map(|named| named.name.as_str()).collect();
    assert_eq!(names, ["a.step", "a.exp_avg", "a.exp_avg_sq"]);
    state.tensors.remove(1);
    let error = adam.load_state(&state).unwrap_err().to_string();
    assert!(error.contains("of `a` it has only 2 of"), "{error}");
}

#[test]
fn invalid_settings_are_errors() {
    let sgd = |options| Sgd::new(vec![leaf("a", &[2])], options).unwrap_err().to_string();
    let plain = SgdOptions::default;
    assert!(sgd(SgdOptions { lr: -1.0, ..plain() }).contains("the learning rate is -1"));
    assert!(sgd(SgdOptions { nesterov: true, ..plain() }).contains("which nesterov needs"));
    assert!(sgd(SgdOptions { weight_decay: f64::NAN, ..plain() }).contains("the weight decay is NaN"));
    let adam = AdamOptions { betas: (0.9, 1.0), ..Default::default() };
    assert!(Adam::new(vec![leaf("a", &[2])], adam).unwrap_err().to_string().contains("a beta is 1"));
}

#[test]
fn parameters_that_cannot_be_trained_are_errors() {
    let refused =
        |parameters: Vec<Named>| Sgd::new(parameters, SgdOptions::default()).unwrap_err().to_string();
    let a = leaf("a", &[2]);
    assert!(refused(vec![a.clone(), a.clone()]).contains("`a` is given to the optimizer twice"));
    let alias = Named { name: "tied".into(), tensor: a.tensor.shallow_clone() };
    assert!(refused(vec![a, alias]).contains("`tied` is given to the optimizer twice"));
    let gaps = Named { name: "gaps".into(), tensor: Tensor::ones([2, 4], FLOAT).slice(1, 0, 4, 2) };
    assert!(refused(vec![gaps]).contains("`gaps` has gaps or overlaps"));
    let whole = Named { name: "n".into(), tensor: Tensor::ones([2], (Kind::Int64, Device::Cpu)) };
    assert!(refused(vec![whole]).contains("`n` is of kind Int64"));
}

#[test]
fn set_lr_reaches_the_device_with_each_groups_factor() {
    let fast = ParameterGroup { lr_factor: 10.0, ..vec![leaf("fast", &[2])].into() };
    let plain: ParameterGroup = vec![leaf("plain", &[2])].into();
    let mut sgd = Sgd::new([plain, fast], SgdOptions { lr: 0.5, ..SgdOptions::default() }).unwrap();
    sgd.keep_lr_on_device().unwrap();
    let parameters = sgd.parameters();
    set_grads(&parameters, 1.0);
    sgd.step().unwrap();
    sgd.set_lr(0.25);
    sgd.step().unwrap();
    assert_eq!(parameters.iter().map(first).collect::<Vec<_>>(), [1.0 - 0.75, 1.0 - 7.5]);
    let saved = sgd.state();
    sgd.set_lr(0.0);
    sgd.load_state(&saved).unwrap();
    sgd.step().unwrap();
    assert_eq!(first(&parameters[0]), 0.0, "a loaded rate reaches the device, too");
}

#[test]
fn a_step_that_may_be_skipped_needs_a_dampening_of_0() {
    let parameters = vec![leaf("a", &[2])];
    set_grads(&parameters, 1.0);
    let found_inf = Tensor::from(1f32);
    let tensors = StepTensors { found_inf: Some(&found_inf), ..StepTensors::default() };
    let mut control = Sgd::new(parameters.clone(), momentum()).unwrap();
    control.step_with(tensors).unwrap();
    let damped = SgdOptions { dampening: 0.5, ..momentum() };
    let error = Sgd::new(parameters.clone(), damped).unwrap().step_with(tensors).unwrap_err().to_string();
    assert!(error.contains("the dampening is 0.5; expected 0,"), "{error}");
    assert_eq!(first(&parameters[0]), 1.0);
}
