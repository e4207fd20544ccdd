//! The engine of `drumline::deepspeed`: the losses, norms, learning rates and weights of DeepSpeed itself
//! (`bench/oracle/deepspeed_engine.py`), and what each method does.

mod checkpoints;
mod methods;
mod parity;

use drumline::deepspeed::{self, DeepSpeedEngine};
use drumline::{Accelerator, ProcessGroup};
use serde_json::{Value, json};
use tch::nn::{self, Module, VarStore};
use tch::{Device, Tensor};

const SAMPLES: i64 = 3;

/// Linear, tanh, linear: with PyTorch's names in `Sequential`, and weights that a formula gives.
#[derive(Debug)]
struct Net {
    first: nn::Linear,
    second: nn::Linear,
}

impl Module for Net {
    fn forward(&self, x: &Tensor) -> Tensor {
        self.second.forward(&self.first.forward(x).tanh())
    }
}

fn net() -> (VarStore, Net) {
    tch::set_num_threads(1);
    let store = VarStore::new(Device::Cpu);
    let root = store.root();
    let net = Net {
        first: nn::linear(&root / "0", 5, 7, Default::default()),
        second: nn::linear(&root / "2", 7, 2, Default::default()),
    };
    for (place, name) in ["0.weight", "0.bias", "2.weight", "2.bias"].into_iter().enumerate() {
        let mut variable = store.variables()[name].shallow_clone();
        let values = (0..variable.numel()).map(|index| ((index * 13 + place * 5) % 32) as f32 - 16.0);
        let values: Vec<f32> = values.map(|value| value / 32.0).collect();
        tch::no_grad(|| variable.copy_(&Tensor::from_slice(&values).view_as(&variable)));
    }
    (store, net)
}

/// Micro-batch `number` of a rank: inputs and targets by a formula.
fn micro_batch(number: i64, group: &ProcessGroup) -> (Tensor, Tensor) {
    let number = number * group.size() as i64 + group.rank() as i64;
    let values = |columns: i64, of: &dyn Fn(i64, i64) -> i64, scale: f32| {
        let all = (0..SAMPLES).flat_map(|row| (0..columns).map(move |column| (row, column)));
        let all: Vec<f32> = all.map(|(row, column)| (of(row, column) - 8) as f32 / scale).collect();
        Tensor::from_slice(&all).view([SAMPLES, columns])
    };
    let x = values(5, &|row, column| (number * 7 + row * 5 + column * 3) % 16, 8.0);
    let y = values(2, &|row, column| (number * 3 + row * 11 + column * 7) % 16, 16.0);
    (x, y)
}

fn engine(group: &ProcessGroup, config: &Value) -> anyhow::Result<(VarStore, DeepSpeedEngine<Net>)> {
    let (store, net) = net();
    let accelerator = Accelerator::builder().group(group).cpu();
    let engine = deepspeed::builder(config.to_string()).accelerator(accelerator).initialize(net, &store)?;
    Ok((store, engine))
}

/// A micro-step; its loss.
fn micro_step(engine: &mut DeepSpeedEngine<Net>, number: i64) -> anyhow::Result<f64> {
    let (x, y) = micro_batch(number, engine.accelerator().group());
    let loss = engine.forward(&x)?.mse_loss(&y, tch::Reduction::Mean);
    engine.backward(&loss)?;
    engine.step()?;
    Ok(loss.double_value(&[]))
}

fn micro_steps(engine: &mut DeepSpeedEngine<Net>, numbers: std::ops::Range<i64>) -> anyhow::Result<()> {
    numbers.into_iter().try_for_each(|number| micro_step(engine, number).map(drop))
}

/// Two micro-batches a step.
fn config(more: Value) -> Value {
    let mut config = json!({
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": 2,
        "optimizer": { "type": "AdamW", "params": { "lr": 0.05 } },
    });
    if let (Some(config), Value::Object(more)) = (config.as_object_mut(), more) {
        config.extend(more);
    }
    config
}
