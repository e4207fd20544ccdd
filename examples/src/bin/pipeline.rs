//! Naive model parallelism and GPipe: a network whose layers are on two devices, in one process and on two ranks.
//!
//! ```text
//!   cargo run --release -p drumline-examples --bin pipeline
//! ```
//! All three train the same network to the same loss. In one process both stages are on the CPU here; give two GPUs to
//! `devices` where there are any. Naive model parallelism is a pipeline with one micro-batch.
#![forbid(unsafe_code)]

use anyhow::{Context, anyhow};
use drumline::engine::pipeline::{
    Boundary, FirstValues, LayerError, LayerList, LayerSpec, Linear, MicroBatch, Order, Pipeline,
    PipelineOptions, Scale, Schedule, layer_fn,
};
use drumline::engine::{Agreed, Brought};
use drumline::launch::Spawn;
use drumline::optim::{Optimizer, Sgd, SgdOptions};
use drumline::{CommError, ProcessGroup};
use drumline_comm::{Axis, LocalGroup, Mesh};
use tch::{Device, Kind, Tensor};

const STEPS: usize = 200;
const SAMPLES: i64 = 64;

fn main() -> anyhow::Result<()> {
    // The ranks of the last part start this program again, and come to `Spawn` at once.
    if std::env::var_os("RANK").is_none() {
        in_one_process("naive model parallelism, 2 stages in one process", 1)?;
        in_one_process("GPipe, 4 micro-batches, 2 stages in one process", 4)?;
    }
    Spawn::new(2).run(|worker| {
        let loss = train(&worker.group()?, 4)?;
        if worker.rank == 1 {
            println!("GPipe, 4 micro-batches, 2 ranks: loss {loss:.6}");
        }
        anyhow::Ok(())
    })?;
    Ok(())
}

fn in_one_process(what: &str, micro_batches: usize) -> anyhow::Result<()> {
    let as_comm = |error: anyhow::Error| CommError::Init { cause: format!("{error:#}") };
    let losses = LocalGroup::run(1, |group| train(&group, micro_batches).map_err(as_comm))?;
    println!("{what}: loss {:.6}", losses[0]);
    Ok(())
}

/// Five layers with names, of which each stage builds its own.
fn network() -> LayerList {
    let mut layers = LayerList::default();
    for (name, inputs, outputs) in [("fc1", 1, 32), ("fc2", 32, 32), ("fc3", 32, 1)] {
        let spec =
            LayerSpec::new(name, move |layer| Ok(Box::new(Linear::new(&layer.path(), inputs, outputs)?)));
        layers.push(spec.cost((inputs * outputs) as f64));
        if name != "fc3" {
            let tanh = |xs: Boundary| xs.iter().map(|x| Ok(x.f_tanh()?)).collect::<Result<_, LayerError>>();
            layers.push(LayerSpec::new(format!("{name}.tanh"), move |_| Ok(layer_fn(move |xs, _| tanh(xs)))));
        }
    }
    layers
}

/// Trains the network, and returns its last loss.
fn train(group: &ProcessGroup, micro_batches: usize) -> anyhow::Result<f64> {
    tch::set_num_threads(1);
    let mesh = Mesh::along(group, Axis::Pp)?;
    let options = PipelineOptions {
        order: Order::from(Schedule::GPipe),
        ranks: Some(2),
        micro_batches,
        devices: vec![Device::Cpu, Device::Cpu],
        first_values: FirstValues::OfEachLayer(1),
        ..Default::default()
    };
    let pipeline = Pipeline::new(&network(), &mesh, options)?;
    let engine = pipeline.engine();
    let options = SgdOptions { lr: 0.05, momentum: 0.9, ..Default::default() };
    let mut sgd = Sgd::new(engine.parameters(), options)?;
    engine.adopt(&mut sgd)?;
    let batches = batches(micro_batches)?;
    let brought = Brought {
        batches: micro_batches,
        samples: SAMPLES as usize,
        count: SAMPLES as f64,
        ..Default::default()
    };
    let mut last = None;
    for _ in 0..STEPS {
        let agreed = Agreed::reach(&mesh, &brought)?;
        let loss = pipeline.step(&agreed, &batches, Scale::No, squared_error)?;
        engine.step(&mut sgd)?;
        sgd.zero_grad()?;
        last = Some(loss.mean());
    }
    last.context("there are steps")
}

/// One period of a sine, in equal parts.
fn batches(count: usize) -> anyhow::Result<Vec<MicroBatch>> {
    let x = Tensor::f_linspace(-3.0, 3.0, SAMPLES, (Kind::Float, Device::Cpu))?.f_view([SAMPLES, 1])?;
    let size = SAMPLES / count as i64;
    let batch = |place: usize| {
        let first = place as i64 * size;
        let inputs = x.f_narrow(0, first, size)?;
        let targets = inputs.f_sin()?;
        Ok(MicroBatch::new(vec![inputs], vec![targets], first as u64))
    };
    (0..count).map(batch).collect::<Result<_, tch::TchError>>().map_err(|error| anyhow!(error))
}

/// The sum over a micro-batch: the pipeline divides by the count of the whole step.
fn squared_error(outputs: &[Tensor], batch: &MicroBatch) -> Result<Tensor, LayerError> {
    Ok(outputs[0].f_sub(&batch.targets[0])?.f_square()?.f_sum(Kind::Float)?)
}
