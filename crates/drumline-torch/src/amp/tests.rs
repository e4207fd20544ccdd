//! DeepSpeed's rule, saved states, several ranks, and errors.

use drumline_comm::{LocalGroup, ReduceOp};
use tch::{Device, Kind, Tensor};

use super::*;
use crate::collectives::TensorCollectives;
use crate::grad::set_grad;
use crate::named::Named;
use crate::optim::{Optimizer, Sgd, SgdOptions};

/// The scale after each of these steps; `!` is one with an overflow.
fn scales(policy: ScalePolicy, steps: &str) -> Vec<f64> {
    let mut scaler = LossScaler::new(policy, Device::Cpu).unwrap();
    let moved = |step: char| {
        let found_inf = Tensor::from(if step == '!' { 1f32 } else { 0.0 });
        scaler.update(&found_inf).unwrap();
        scaler.scale().unwrap()
    };
    steps.chars().map(moved).collect()
}

fn rule() -> DeepSpeedScale {
    DeepSpeedScale { initial_scale_power: 3, loss_scale_window: 3, ..DeepSpeedScale::default() }
}

#[test]
fn deepspeeds_scale_has_hysteresis_and_a_minimum() {
    let of = |rule, steps| scales(ScalePolicy::DeepSpeed(rule), steps);
    // The first overflow does not change the scale. Growth resets the count of overflows, and a single good step does
    // not.
    assert_eq!(of(rule(), "!!.!...."), [8.0, 4.0, 4.0, 2.0, 2.0, 2.0, 2.0, 4.0]);
    assert_eq!(of(rule(), "!....!!"), [8.0, 8.0, 8.0, 8.0, 16.0, 16.0, 8.0]);
    assert_eq!(of(rule(), "!.!.!!"), [8.0, 8.0, 4.0, 4.0, 2.0, 1.0]);
    let consecutive = DeepSpeedScale { consecutive_hysteresis: true, ..rule() };
    assert_eq!(of(consecutive, "!.!.!!"), [8.0, 8.0, 8.0, 8.0, 8.0, 4.0]);
    let at_once = DeepSpeedScale { hysteresis: 1, min_loss_scale: 2.0, ..rule() };
    assert_eq!(of(at_once, "!!!!"), [4.0, 2.0, 2.0, 2.0]);
    assert_eq!(of(rule(), "......."), [8.0, 8.0, 8.0, 16.0, 16.0, 16.0, 32.0]);
}

/// The scales of DeepSpeed itself: `bench/oracle/deepspeed_engine.py`.
#[test]
fn scales_are_those_of_deepspeed_itself() {
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/../../bench/oracle/golden/deepspeed.json");
    let golden: serde_json::Value = serde_json::from_slice(&std::fs::read(golden).unwrap()).unwrap();
    let cases = golden["loss_scales"].as_array().unwrap();
    assert!(cases.len() >= 4);
    for case in cases {
        let rule = &case["rule"];
        let whole = |name: &str| rule[name].as_u64().unwrap() as u32;
        let rule = DeepSpeedScale {
            initial_scale_power: whole("initial_scale_power"),
            loss_scale_window: whole("loss_scale_window"),
            hysteresis: whole("hysteresis"),
            consecutive_hysteresis: rule["consecutive_hysteresis"].as_bool().unwrap(),
            min_loss_scale: rule["min_loss_scale"].as_f64().unwrap(),
        };
        let step = |overflow: &serde_json::Value| if overflow == 1 { '!' } else { '.' };
        let steps: String = case["overflows"].as_array().unwrap().iter().map(step).collect();
        let expected: Vec<f64> = serde_json::from_value(case["scales"].clone()).unwrap();
        assert_eq!(scales(ScalePolicy::DeepSpeed(rule), &steps), expected, "{rule:?}, {steps}");
    }
}

#[test]
fn update_changes_the_scale_and_no_weight() {
    let policy = ScalePolicy::Dynamic(DynamicScale { init_scale: 8.0, ..DynamicScale::default() });
    let mut scaler = LossScaler::new(policy, Device::Cpu).unwrap();
    let tensor = Tensor::ones([2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let weight = Named { name: "weight".into(), tensor };
    for (grad, found, scale) in [(16.0, 0.0, 8.0), (f32::INFINITY, 1.0, 4.0)] {
        set_grad(&weight.tensor, Some(&Tensor::from_slice(&[grad, 8.0]))).unwrap();
        let unscaled = scaler.received().unscale(&scaler, vec![weight.clone()]).unwrap();
        let (found_inf, moved) = unscaled.update(&mut scaler).unwrap();
        assert_eq!((found_inf.double_value(&[]), moved.double_value(&[])), (found, scale));
        assert_eq!(scaler.scale().unwrap(), scale);
        assert_eq!(weight.tensor.double_value(&[0]), 1.0);
    }
}

#[test]
fn a_static_scale_stays() {
    assert_eq!(scales(ScalePolicy::Static(128.0), "!.!!"), [128.0; 4]);
}

#[test]
fn a_saved_scale_resumes_as_one_that_never_stopped() {
    let steps = "!.!..!...!....!!..";
    for policy in [
        ScalePolicy::Dynamic(DynamicScale { growth_interval: 2, ..DynamicScale::default() }),
        ScalePolicy::DeepSpeed(rule()),
        ScalePolicy::Static(4.0),
    ] {
        let found = |step| Tensor::from(if step == '!' { 1f32 } else { 0.0 });
        let mut whole = LossScaler::new(policy, Device::Cpu).unwrap();
        for step in steps.chars() {
            let mut resumed = LossScaler::new(policy, Device::Cpu).unwrap();
            resumed.load_state(&whole.state().unwrap()).unwrap();
            resumed.update(&found(step)).unwrap();
            whole.update(&found(step)).unwrap();
            assert_eq!(resumed.state().unwrap(), whole.state().unwrap(), "{policy:?}");
        }
    }
    let mut scaler = LossScaler::new(ScalePolicy::default(), Device::Cpu).unwrap();
    let wrong = ScalerState { scale: f64::NAN, ..scaler.state().unwrap() };
    assert!(scaler.load_state(&wrong).unwrap_err().to_string().contains("NaN"));
}

#[test]
fn invalid_policies_are_errors() {
    let plain = DynamicScale::default();
    for policy in [
        ScalePolicy::Static(0.0),
        ScalePolicy::Static(f64::INFINITY),
        ScalePolicy::Dynamic(DynamicScale { growth_factor: 1.0, ..plain }),
        ScalePolicy::Dynamic(DynamicScale { backoff_factor: 1.0, ..plain }),
        ScalePolicy::Dynamic(DynamicScale { growth_interval: 0, ..plain }),
        ScalePolicy::DeepSpeed(DeepSpeedScale { hysteresis: 0, ..rule() }),
        ScalePolicy::DeepSpeed(DeepSpeedScale { min_loss_scale: 0.0, ..rule() }),
    ] {
        let error = LossScaler::new(policy, Device::Cpu).unwrap_err().to_string();
        assert!(error.ends_with("try ScalePolicy::default()"), "{error}");
    }
}

fn leaf(kind: Kind, grad: f32) -> Named {
    let tensor = Tensor::ones([2], (kind, Device::Cpu)).set_requires_grad(true);
    set_grad(&tensor, Some(&Tensor::from_slice(&[grad, 4.0]).to_kind(kind))).unwrap();
    Named { name: format!("{kind:?}"), tensor }
}

#[test]
fn gradients_of_each_kind_are_unscaled_and_checked() {
    let kinds = [Kind::Float, Kind::Double, Kind::BFloat16];
    let scaler = LossScaler::new(ScalePolicy::Static(4.0), Device::Cpu).unwrap();
    for bad in [None, Some(0), Some(1), Some(2)] {
        let grad = |place| if bad == Some(place) { f32::INFINITY } else { 8.0 };
        let leaves: Vec<_> = kinds.iter().enumerate().map(|(at, kind)| leaf(*kind, grad(at))).collect();
        let unscaled = scaler.received().unscale(&scaler, leaves.clone()).unwrap();
        assert_eq!(unscaled.has_overflowed().unwrap(), bad.is_some());
        for leaf in &leaves {
            assert_eq!(leaf.tensor.grad().double_value(&[1]), 1.0, "{}", leaf.name);
        }
    }
}

#[test]
fn gradients_in_half_are_errors_as_in_pytorch() {
    let scaler = LossScaler::new(ScalePolicy::default(), Device::Cpu).unwrap();
    let error = scaler.received().unscale(&scaler, vec![leaf(Kind::Half, 1.0)]).unwrap_err().to_string();
    assert!(error.starts_with("the gradient of `Half` is of kind Half"), "{error}");
}

#[test]
fn all_ranks_agree_on_an_overflow() {
    for bad_rank in [None, Some(1)] {
        let made = LocalGroup::run(2, |group| {
            let bad = bad_rank == Some(group.rank());
            let leaf = leaf(Kind::Float, if bad { f32::NAN } else { 1.0 });
            let mut sgd = Sgd::new(vec![leaf], SgdOptions::default()).unwrap();
            let mut scaler = LossScaler::new(ScalePolicy::default(), Device::Cpu).unwrap();
            let mut unscaled = scaler.received().unscale(&scaler, sgd.parameters()).unwrap();
            unscaled.agree(&group).unwrap();
            let made = unscaled.step(&mut scaler, &mut sgd).unwrap();
            let mut scale = Tensor::from(scaler.scale().unwrap());
            group.all_reduce_tensor(&mut scale, ReduceOp::Sum).unwrap();
            Ok((made, scale.double_value(&[])))
        });
        let expected = match bad_rank {
            Some(_) => (StepMade::Skipped, 65536.0),
            None => (StepMade::Yes, 2.0 * 65536.0),
        };
        assert_eq!(made.unwrap(), [expected; 2]);
    }
}
