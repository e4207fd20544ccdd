//! DDP and the three stages of ZeRO side by side: four ranks train the same small GPT, and print the memory of each.
//!
//! ```text
//!   cargo run --release -p drumline-examples --bin zero
//! ```
//! Each way of training has four new processes, so that the memory of one does not count for the next. What a process
//! uses before it has the model is subtracted.
#![forbid(unsafe_code)]

use anyhow::{Context, ensure};
use drumline::comm::Mesh;
use drumline::engine::{DdpOptions, Engine, EngineOptions, EngineSetup, GradSync, ShardOptions, Stage};
use drumline::launch::Spawn;
use drumline::optim::{AdamOptions, AdamW, Optimizer, parameters};
use drumline::trainer::Mode;
use drumline::{ProcessGroup, ReduceOp, Worker};
use drumline_zoo::models::gpt::{Gpt, GptOptions};
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};

const RANKS: usize = 4;
const STEPS: i64 = 3;
const PLACES: i64 = 16;
const STAGES: [Stage; 4] = [Stage::Zero0, Stage::Zero1, Stage::Zero2, Stage::Zero3];

/// 11 million parameters.
const GPT: GptSize = GptSize { n_layer: 6, n_embd: 384, vocab_size: 1000 };
/// After a step of this one, the code of libtorch is in memory and does not count as the model's.
const TINY: GptSize = GptSize { n_layer: 1, n_embd: 32, vocab_size: 50 };

#[derive(Clone, Copy)]
struct GptSize {
    n_layer: i64,
    n_embd: i64,
    vocab_size: i64,
}

fn main() -> anyhow::Result<()> {
    for stage in STAGES {
        // Freed memory returns to the system at once, so that only memory in use counts.
        Spawn::new(RANKS).env("MALLOC_MMAP_THRESHOLD_", "131072").run(|worker| compare(&worker, stage))?;
    }
    Ok(())
}

/// What each rank does in one of the four jobs.
fn compare(worker: &Worker, stage: Stage) -> anyhow::Result<()> {
    tch::set_num_threads(1);
    let group = worker.group()?;
    drop(train(&group, stage, TINY)?);
    let before = memory()?;
    let trained = train(&group, stage, GPT)?;
    let mut numbers = [memory()? - before, trained.loss];
    group.all_reduce(&mut numbers, ReduceOp::Sum)?;
    let [bytes, loss] = numbers;
    if group.rank() == 0 {
        let num = trained.num_parameters as f64;
        if stage == Stage::Zero0 {
            println!("{:.1} million parameters in f32, Adam, {RANKS} ranks together", num / 1e6);
        }
        let name = if stage == Stage::Zero0 { "DDP".to_owned() } else { stage.to_string() };
        let mean = loss / RANKS as f64;
        println!("{name:6} {:5.0} MB, {:4.1} bytes a parameter, loss {mean:.4}", bytes / 1e6, bytes / num);
    }
    Ok(())
}

/// A model with everything that its training holds in memory.
struct Trained {
    loss: f64,
    num_parameters: usize,
    _store: VarStore,
    _engine: Box<dyn Engine>,
    _optimizer: AdamW,
}

/// Some steps of one rank, each on a text of its own.
fn train(group: &ProcessGroup, stage: Stage, size: GptSize) -> anyhow::Result<Trained> {
    let GptSize { n_layer, n_embd, vocab_size } = size;
    tch::manual_seed(1);
    let store = VarStore::new(Device::Cpu);
    let options =
        GptOptions { n_layer, n_embd, vocab_size, n_head: 4, n_positions: PLACES, ..GptOptions::default() };
    let model = Gpt::new(&store.root(), &options)?;
    let engine = engine(group, stage, &store)?;
    let mut optimizer = AdamW::new(parameters(&store), AdamOptions { lr: 1e-3, ..AdamOptions::default() })?;
    engine.adopt(&mut optimizer)?;
    let mut loss = 0.0;
    for step in 0..STEPS {
        let text = text(step * RANKS as i64 + group.rank() as i64, vocab_size);
        let (inputs, targets) = (text.narrow(1, 0, PLACES), text.narrow(1, 1, PLACES));
        optimizer.zero_grad()?;
        let sum = engine.forward_with(GradSync::Reduce, || model.loss(&inputs, &targets, Mode::Eval))?;
        let mean = sum.map_err(anyhow::Error::from_boxed)? / PLACES as f64;
        engine.backward(&mean, GradSync::Reduce)?;
        engine.step(&mut optimizer)?;
        loss = mean.double_value(&[]);
    }
    let num_parameters = parameters(&store).iter().map(|named| named.tensor.numel()).sum();
    Ok(Trained { loss, num_parameters, _store: store, _engine: engine, _optimizer: optimizer })
}

fn engine(group: &ProcessGroup, stage: Stage, store: &VarStore) -> anyhow::Result<Box<dyn Engine>> {
    let options: Box<dyn EngineOptions> = match stage {
        Stage::Zero0 => DdpOptions::default().into(),
        stage => ShardOptions::new(stage).into(),
    };
    let mesh = Mesh::new(group, options.mesh_shape(group.size())?)?;
    Ok(options.engine(EngineSetup::new(store, &mesh))?)
}

/// A text that counts in steps of three.
fn text(number: i64, vocab_size: i64) -> Tensor {
    let tokens = Tensor::arange(PLACES + 1, (Kind::Int64, Device::Cpu)) * 3 + number * 7;
    tokens.remainder(vocab_size).unsqueeze(0)
}

/// This process's share of the memory in use (PSS): a page that several processes map counts in parts.
fn memory() -> anyhow::Result<f64> {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").context("cannot read the memory in use")?;
    let line = text.lines().find_map(|line| line.strip_prefix("Pss:"));
    let kib = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<f64>().ok());
    ensure!(kib.is_some(), "/proc/self/smaps_rollup has no Pss");
    Ok(kib.unwrap_or_default() * 1024.0)
}
