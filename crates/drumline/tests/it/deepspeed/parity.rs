//! The same configuration, data and weights as DeepSpeed had: the same training.

use std::path::Path;

use drumline::ProcessGroup;
use rank_test::ranks_test;
use serde::Deserialize;
use serde_json::Value;
use tch::{Device, Kind, Tensor};

use super::*;

/// How far numbers may be from DeepSpeed's.
const CLOSE: f64 = 1e-6;

#[derive(Deserialize)]
struct Golden {
    trainings: Vec<Training>,
}

#[derive(Deserialize)]
struct Training {
    name: String,
    config: Value,
    /// By rank, step and micro-batch.
    losses: Vec<Vec<Vec<f64>>>,
    /// The learning rate after each step.
    lrs: Vec<f64>,
    norms: Vec<Option<f64>>,
    weights: std::collections::BTreeMap<String, Vec<f64>>,
}

fn trainings() -> Vec<Training> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../bench/oracle/golden/deepspeed.json");
    let golden: Golden = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    golden.trainings
}

fn near(found: f64, expected: f64) -> bool {
    (found - expected).abs() <= CLOSE * expected.abs().max(1.0)
}

fn compare(group: &ProcessGroup, training: &Training) -> anyhow::Result<()> {
    let Training { name, config, losses, lrs, norms, weights } = training;
    let (store, mut engine) = engine(group, config)?;
    let mut number = 0;
    for (step, expected) in losses[group.rank()].iter().enumerate() {
        for expected in expected {
            let loss = micro_step(&mut engine, number)?;
            assert!(near(loss, *expected), "{name}, step {step}: loss {loss}, expected {expected}");
            number += 1;
        }
        let lr = engine.get_lr()[0];
        assert!(near(lr, lrs[step]), "{name}, step {step}: lr {lr}, expected {}", lrs[step]);
        if let Some(expected) = norms[step] {
            let norm = engine.get_global_grad_norm().unwrap();
            assert!(near(norm, expected), "{name}, step {step}: norm {norm}, expected {expected}");
        }
    }
    assert_eq!(engine.global_steps(), losses[0].len() as u64);
    for (variable, expected) in weights {
        let expected = Tensor::from_slice(expected);
        let found = store.variables()[variable].view([-1]).to_kind(Kind::Double);
        let difference = (found - expected).abs().max().double_value(&[]);
        assert!(difference < CLOSE, "{name}: {variable} is {difference} off");
    }
    assert_eq!(store.device(), Device::Cpu);
    Ok(())
}

ranks_test!(twenty_steps_are_those_of_deepspeed, 2, {
    let group = ProcessGroup::from_env()?;
    let trainings = trainings();
    assert!(trainings.len() >= 5);
    trainings.iter().try_for_each(|training| compare(&group, training))?;
});
