//! 20 steps of AdamW in stages 1 to 3, on 2 and 3 ranks: parameters equal those of PyTorch's FSDP2
//! (`bench/oracle/fsdp.py`) to 1e-6.

use std::collections::BTreeMap;

use anyhow::Result;
use drumline_comm::{Mesh, ProcessGroup};
use drumline_parallel::{Accumulation, Clip, Engine, EngineOptions, EngineSetup, GradSync, ShardOptions};
use drumline_plan::Stage;
use drumline_torch::{AdamOptions, AdamW, Named, Optimizer, parameters};
use rank_test::ranks_test;
use serde_json::Value;
use tch::nn::{Linear, Module, VarStore, linear};
use tch::{Device, Kind, Tensor};

use super::net::loss;

const DOUBLE: (Kind, Device) = (Kind::Double, Device::Cpu);
const TOLERANCE: f64 = 1e-6;

#[derive(Debug)]
struct Net {
    first: Linear,
    second: Linear,
    third: Linear,
}

impl Net {
    fn new(vs: &VarStore) -> Self {
        tch::set_num_threads(1);
        let layer = |name: &str, from, to| linear(vs.root() / name, from, to, Default::default());
        let net = Self {
            first: layer("first", 6, 13),
            second: layer("second", 13, 7),
            third: layer("third", 7, 3),
        };
        for (place, mut tensor) in sorted(vs).into_values().enumerate() {
            let values = (Tensor::arange(tensor.numel() as i64, DOUBLE) * 0.7 + place as f64).sin() * 0.3;
            tch::no_grad(|| tensor.copy_(&values.view_as(&tensor)));
        }
        net
    }
}

impl Module for Net {
    fn forward(&self, x: &Tensor) -> Tensor {
        self.third.forward(&self.second.forward(&self.first.forward(x).tanh()).tanh())
    }
}

fn sorted(vs: &VarStore) -> BTreeMap<String, Tensor> {
    parameters(vs).into_iter().map(|Named { name, tensor }| (name, tensor)).collect()
}

fn samples(from: i64, num: i64) -> (Tensor, Tensor) {
    let rows = Tensor::arange_start(from, from + num, DOUBLE).unsqueeze(1);
    let x = (rows * 1.3 + Tensor::arange(6, DOUBLE) * 0.9).sin();
    let y = x.narrow(1, 0, 3) * x.narrow(1, 3, 3);
    (x.to_kind(Kind::Float), y.to_kind(Kind::Float))
}

struct Case {
    name: &'static str,
    num_micro_batches: usize,
    max_norm: f64,
}

const CASES: [Case; 3] = [
    Case { name: "plain", num_micro_batches: 1, max_norm: f64::INFINITY },
    Case { name: "clipped", num_micro_batches: 1, max_norm: 0.2 },
    Case { name: "accumulated", num_micro_batches: 4, max_norm: 0.2 },
];

fn golden() -> Value {
    serde_json::from_str(include_str!("../../../../bench/oracle/golden/fsdp.json")).unwrap()
}

/// The norms of all steps, and the parameters after the last.
fn trained(
    group: &ProcessGroup,
    options: ShardOptions,
    case: &Case,
    golden: &Value,
) -> Result<(Vec<f64>, VarStore)> {
    let vs = VarStore::new(Device::Cpu);
    let net = Net::new(&vs);
    let mesh = Mesh::new(group, options.mesh_shape(group.size())?)?;
    let engine: Box<dyn Engine> = Box::new(options).engine(EngineSetup::new(&vs, &mesh))?;
    let [lr, eps, weight_decay] =
        ["lr", "eps", "weight_decay"].map(|key| golden["adam"][key].as_f64().unwrap());
    let mut optimizer = AdamW::new(
        parameters(&vs),
        AdamOptions { lr, eps, weight_decay: Some(weight_decay), ..AdamOptions::default() },
    )?;
    engine.adopt(&mut optimizer)?;
    let (batch, num) = (golden["batch"].as_i64().unwrap(), case.num_micro_batches);
    let each = batch / group.size() as i64 / num as i64;
    let mut norms = Vec::new();
    for step in 0..golden["steps"].as_i64().unwrap() {
        optimizer.zero_grad()?;
        for index in 0..num {
            let sync = GradSync::of(index, num);
            let (x, y) = samples(step * batch + (group.rank() * num + index) as i64 * each, each);
            let output = engine.forward_with(sync, || net.forward(&x))?;
            engine.backward(&(loss(&output, &y) / num as f64), sync)?;
        }
        norms.extend(engine.clip(Clip::Norm(case.max_norm), &optimizer.parameters())?);
        engine.step(&mut optimizer)?;
    }
    Ok((norms, vs))
}

/// The largest difference to PyTorch's norms and parameters.
fn difference((norms, vs): &(Vec<f64>, VarStore), theirs: &Value) -> f64 {
    let numbers = |value: &Value| -> Vec<f64> {
        value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
    };
    let furthest = |ours: &[f64], theirs: &[f64]| {
        assert_eq!(ours.len(), theirs.len());
        ours.iter().zip(theirs).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
    };
    let of_parameters = sorted(vs).into_iter().map(|(name, tensor)| {
        let ours: Vec<f64> = Vec::try_from(tensor.detach().flatten(0, -1).to_kind(Kind::Double)).unwrap();
        furthest(&ours, &numbers(&theirs["final"][&name]))
    });
    of_parameters.fold(furthest(norms, &numbers(&theirs["norms"])), f64::max)
}

fn stages_equal_fsdp2() -> Result<()> {
    let (group, golden) = (ProcessGroup::from_env()?, golden());
    let theirs = &golden["ranks"][group.size().to_string()];
    for stage in [Stage::Zero1, Stage::Zero2, Stage::Zero3] {
        for accumulation in [Accumulation::OwnRows, Accumulation::All] {
            let options = || ShardOptions { accumulation: Some(accumulation), ..ShardOptions::new(stage) };
            let what = format!("{stage} {accumulation:?}");
            for case in &CASES {
                let ours = trained(&group, options(), case, &golden)?;
                let difference = difference(&ours, &theirs[case.name]);
                assert!(difference <= TOLERANCE, "{what}: {} differs by {difference:e}", case.name);
            }
        }
    }
    // The control: without clipping, other parameters.
    let ours = trained(&group, ShardOptions::new(Stage::Zero3), &CASES[0], &golden)?;
    assert!(difference(&ours, &theirs["clipped"]) > 100.0 * TOLERANCE);
    Ok(())
}

ranks_test!(stages_equal_fsdp2_on_two_ranks, 2, { stages_equal_fsdp2()? });
ranks_test!(stages_equal_fsdp2_on_three_ranks, 3, { stages_equal_fsdp2()? });
