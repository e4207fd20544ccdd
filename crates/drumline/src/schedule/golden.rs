//! Compares the schedules with PyTorch 2.11 and the formulas of Distribuuuu, DeepSpeed and NJUNMT:
//! `bench/oracle/schedules.py`; DeepSpeed's also with DeepSpeed itself: `bench/oracle/deepspeed_engine.py`.

use std::collections::HashSet;
use std::path::Path;

use serde::Deserialize;
use serde_json::{Value, json};

use super::*;

#[derive(Deserialize)]
struct Case {
    schedule: LrSchedule,
    /// How many steps an epoch has; `lr` has an entry for each step.
    steps_per_epoch: u64,
    lr: Vec<f64>,
}

fn golden<T: serde::de::DeserializeOwned>(name: &str) -> T {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../bench/oracle/golden");
    serde_json::from_slice(&std::fs::read(folder.join(name)).unwrap()).unwrap()
}

fn cases() -> Vec<Case> {
    golden("schedules.json")
}

/// The cases of DeepSpeed's schedules, with the learning rates that DeepSpeed itself has set.
#[derive(Deserialize)]
struct OfDeepSpeed {
    schedules: Vec<Case>,
}

/// Compares all cases, and returns how many policies they have.
fn compare(cases: Vec<Case>) -> usize {
    let mut types = HashSet::new();
    for Case { schedule, steps_per_epoch, lr } in cases {
        types.insert(std::mem::discriminant(schedule.policy()));
        for (step, expected) in lr.into_iter().enumerate() {
            let at = At { epoch: step as f64 / steps_per_epoch as f64, step: step as u64, ..At::default() };
            let found = schedule.lr(at);
            let near = (found - expected).abs() <= 1e-6 * expected.abs() + 1e-15;
            assert!(near, "{schedule:?} at step {step}: {found}, expected {expected}");
        }
    }
    types.len()
}

#[test]
fn learning_rates_are_as_expected() {
    assert_eq!(compare(cases()), 13, "a policy has no case");
}

#[test]
fn learning_rates_are_those_of_deepspeed_itself() {
    let OfDeepSpeed { schedules } = golden("deepspeed.json");
    assert_eq!(compare(schedules), 5, "a policy has no case");
}

/// What DeepSpeed's OneCycle gives to Adam at each step.
#[derive(Deserialize)]
struct Cycle {
    params: OneCycle,
    lr: Vec<f64>,
    betas: Vec<(f64, f64)>,
}

#[test]
fn momenta_are_those_of_deepspeed_itself() {
    #[derive(Deserialize)]
    struct Cycles {
        cycles: Vec<Cycle>,
    }
    let Cycles { cycles } = golden("deepspeed.json");
    assert_eq!(cycles.len(), 4);
    for Cycle { params, lr, betas } in cycles {
        let schedule = LrSchedule::new(1.0, LrPolicy::OneCycle(params.clone())).unwrap();
        for (step, (lr, betas)) in lr.into_iter().zip(betas).enumerate() {
            let at = At { step: step as u64, ..At::default() };
            let found = schedule.betas(at).unwrap();
            let near = |found: f64, expected: f64| (found - expected).abs() < 1e-12;
            assert!(near(schedule.lr(at), lr), "{params:?}, step {step}");
            assert!(near(found.0, betas.0) && near(found.1, betas.1), "{params:?}, step {step}: {found:?}");
        }
        let constant = OneCycle { cycle_momentum: false, ..params };
        assert_eq!(constant.betas(At::default()), None);
    }
}

#[test]
fn a_schedule_is_written_and_read_again() {
    for Case { schedule, .. } in cases() {
        let text = serde_json::to_string(&schedule).unwrap();
        assert_eq!(serde_json::from_str::<LrSchedule>(&text).unwrap(), schedule);
    }
}

#[test]
fn invalid_settings_are_refused() {
    let refused = |name: &str, params: Value, expected_text: &str| {
        let schedule = json!({"base_lr": 0.1, "policy": {"type": name, "params": params}});
        let error = serde_json::from_value::<LrSchedule>(schedule).unwrap_err().to_string();
        assert!(error.contains(expected_text), "{error}");
    };
    refused("Distribuuuu", json!({"lr_policy": "steps", "steps": [30, 60]}), "do not begin at epoch 0; try");
    refused("Distribuuuu", json!({"max_epoch": 0}), "max_epoch is 0");
    refused("StepLR", json!({"step_size": 0}), "StepLR: step_size is 0");
    refused("CosineAnnealingLR", json!({"T_max": 0}), "T_max is 0");
    refused("LinearLR", json!({"total_iters": 0}), "total_iters is 0");
    refused("WarmupLR", json!({"warmup_num_steps": 0}), "warmup_num_steps is 0");
    refused("WarmupDecayLR", json!({}), "missing field `total_num_steps`");
    refused("WarmupCosineLR", json!({"total_num_steps": 9, "warm_up": 1}), "unknown field `warm_up`");
    let flat = json!({"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_second_step_size": 0});
    refused("OneCycle", flat, "half a cycle has 0 steps");
    let fast = json!({"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_max_mom": 1.0});
    refused("OneCycle", fast, "cycle_min_mom and cycle_max_mom are [0.8, 1.0]; expected 0 to below 1");
    refused("LRRangeTest", json!({"lr_range_test_step_size": 0}), "lr_range_test_step_size is 0");
    refused("Noam", json!({"d_model": 0}), "Noam: d_model is 0");
    refused("Noam", json!({"d_model": 8, "warmup_steps": 0}), "warmup_steps is 0");
    refused("Noam", json!({"d_model": 8, "factor": -1}), "factor is -1");
    refused("InverseSqrt", json!({"warmup_steps": 0}), "InverseSqrt: warmup_steps is 0");
    refused("InverseSqrt", json!({"warmup_steps": 9, "decay_steps": 4}), "decay_steps is 4, before the end");
    refused("Warmup", json!({}), "unknown variant `Warmup`");
    assert!(LrSchedule::new(f64::NAN, LrPolicy::Constant).is_err());
}
