//! Tensor parallelism: the two layers of a network, of which each of two ranks has a half.
//!
//! ```text
//!   cargo run --release -p drumline-examples --bin tensor_parallel
//!
//!   x [64, 1] ─▶ fc: rows of the weight are cut ─▶ tanh ─▶ back: columns are cut ─▶ sum over ranks ─▶ y [64, 1]
//!   all ranks        16 of 32 features                      parts of a sum                         all ranks
//! ```
//! One rank and two train to the same loss. In two layers there is one all-reduce in forward and one in backward, because
//! what the first layer returns on a rank is what the second one needs there.
//!
//! Placements are types, so that these mistakes do not compile:
//!
//! ```text
//!   back.forward(&xs.replicate()?)     expected `TpTensor<Sharded<Features>>`, found `TpTensor<Replicated>`
//!   fc.forward(&xs)                    expected `TpTensor<Replicated>`, found `TpTensor<Invariant>`: its gradient is a sum
//!   back.product(&hidden)?.into_tensor()      `TpTensor<Partial>` has no such method: the sum was forgotten
//! ```
#![forbid(unsafe_code)]

use anyhow::Context;
use drumline::comm::{Axis, LocalGroup, Mesh};
use drumline::engine::tensor::{ColumnLinear, LinearShape, RowLinear, TensorParallel, TpTensor};
use drumline::engine::{Engine, EngineOptions, EngineSetup, GradSync, ModelParallel, ParallelError};
use drumline::launch::Spawn;
use drumline::optim::{Optimizer, Sgd, SgdOptions, parameters};
use drumline::{CommError, ProcessGroup};
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};

const STEPS: usize = 200;
const SAMPLES: i64 = 64;
const HIDDEN: i64 = 32;

fn main() -> anyhow::Result<()> {
    // The two ranks start this program again, and come to `Spawn` at once.
    if std::env::var_os("RANK").is_none() {
        let as_comm = |error: anyhow::Error| CommError::Init { cause: format!("{error:#}") };
        let said = LocalGroup::run(1, |group| train(&group).map_err(as_comm))?;
        println!("1 rank: {}", said[0]);
    }
    Spawn::new(2).run(|worker| {
        let said = train(&worker.group()?)?;
        if worker.rank == 0 {
            println!("2 ranks, rank 0: {said}");
        }
        anyhow::Ok(())
    })?;
    Ok(())
}

struct Network {
    fc: ColumnLinear,
    back: RowLinear,
    tp: TensorParallel,
}

impl Network {
    fn new(store: &VarStore, tp: &TensorParallel) -> Result<Self, ParallelError> {
        let root = store.root();
        let fc = ColumnLinear::new(tp, &(&root / "fc"), LinearShape::new(1, HIDDEN))?;
        let back = RowLinear::new(tp, &(&root / "back"), LinearShape::new(HIDDEN, 1))?;
        Ok(Self { fc, back, tp: tp.clone() })
    }

    /// The output, which is the same on all ranks.
    fn forward(&self, xs: &Tensor) -> Result<Tensor, ParallelError> {
        let xs = TpTensor::invariant(xs.shallow_clone(), &self.tp);
        let hidden = self.fc.forward(&xs.replicate()?)?.map(|hidden| hidden.f_tanh())?;
        Ok(self.back.forward(&hidden)?.into_tensor())
    }
}

/// Trains the network, and says what this rank has of it and the last loss.
fn train(group: &ProcessGroup) -> anyhow::Result<String> {
    tch::set_num_threads(1);
    // Each rank draws the whole network and keeps its part, so that all begin with the same seed.
    tch::manual_seed(1);
    let mesh = Mesh::along(group, Axis::Tp)?;
    let (tp, store) = (TensorParallel::on(&mesh), VarStore::new(Device::Cpu));
    let network = Network::new(&store, &tp)?;
    let options = ModelParallel { tp: group.size(), parts: tp.parts(), ..Default::default() };
    let engine = Box::new(options).engine(EngineSetup::new(&store, &mesh))?;
    let options = SgdOptions { lr: 0.05, momentum: 0.9, ..Default::default() };
    let mut sgd = Sgd::new(parameters(&store), options)?;
    engine.adopt(&mut sgd)?;
    let xs = Tensor::f_linspace(-3.0, 3.0, SAMPLES, (Kind::Float, Device::Cpu))?.f_view([SAMPLES, 1])?;
    let mut last = None;
    for _ in 0..STEPS {
        last = Some(step(&*engine, &network, &xs)?);
        engine.step(&mut sgd)?;
        sgd.zero_grad()?;
    }
    let size = |name: &str| store.variables()[name].size();
    let sizes = format!("fc.weight {:?}, back.weight {:?}", size("fc.weight"), size("back.weight"));
    Ok(format!("{sizes}, loss {:.6}", last.context("there are steps")?))
}

/// Forward and backward of one period of a sine.
fn step(engine: &dyn Engine, network: &Network, xs: &Tensor) -> anyhow::Result<f64> {
    let outputs = engine.forward_with(GradSync::Reduce, || network.forward(xs))??;
    let loss = outputs.f_sub(&xs.f_sin()?)?.f_square()?.f_mean(Kind::Float)?;
    engine.backward(&loss, GradSync::Reduce)?;
    Ok(loss.f_double_value(&[])?)
}
