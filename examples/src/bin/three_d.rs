//! 3D parallelism: pipeline stages × replicas × parts of layers, on eight ranks. They train a small GPT to the losses of
//! one rank.
//!
//! ```text
//!   cargo run --release -p drumline-examples --bin three_d
//!
//!                    stage 0: tokens, blocks 0 1         stage 1: blocks 2 3, logits
//!   texts 0 2 4 6    ranks 0 and 1, half of each    ─▶   ranks 4 and 5, half of each
//!   texts 1 3 5 7    ranks 2 and 3                  ─▶   ranks 6 and 7
//! ```
//! The table of tokens is at both ends: its gradients are added up. The same function runs on one rank, where all axes of
//! the mesh are 1.
#![forbid(unsafe_code)]

use drumline::comm::{Axis, LocalGroup, Mesh, MeshShape};
use drumline::engine::pipeline::{
    FirstValues, MicroBatch, Order, Pipeline, PipelineOptions, Scale, Schedule,
};
use drumline::engine::{Agreed, Brought};
use drumline::launch::Spawn;
use drumline::optim::{AdamOptions, AdamW, Optimizer};
use drumline::torch::StepSamples;
use drumline::{CommError, ProcessGroup};
use drumline_zoo::models::ModelRanks;
use drumline_zoo::models::gpt::{GptOptions, layers};
use tch::{Device, Kind, Tensor};

const STEPS: usize = 10;
/// Texts of a step, and tokens of a text.
const TEXTS: i64 = 8;
const PLACES: i64 = 16;
const VOCAB: i64 = 50;
const MICRO_BATCHES: i64 = 2;

fn main() -> anyhow::Result<()> {
    // The eight ranks start this program again, and come to `Spawn` at once.
    if std::env::var_os("RANK").is_none() {
        let as_comm = |error: anyhow::Error| CommError::Init { cause: format!("{error:#}") };
        let trained = LocalGroup::run(1, |group| train(&group, MeshShape::default()).map_err(as_comm))?;
        println!("1 rank: {}", trained[0]);
    }
    let cube = MeshShape::default().with(Axis::Pp, 2).with(Axis::Dp, 2).with(Axis::Tp, 2);
    Spawn::new(8).run(|worker| {
        let group = worker.group()?;
        let all = group.all_gather_object(&train(&group, cube)?)?;
        let line =
            |(rank, trained): (usize, &String)| format!("pp 2 × dp 2 × tp 2, rank {rank}: {trained}\n");
        if worker.rank == 0 {
            print!("{}", all.iter().enumerate().map(line).collect::<String>());
        }
        anyhow::Ok(())
    })?;
    Ok(())
}

/// Trains a GPT, and says what this rank has of it and the first and last loss.
fn train(group: &ProcessGroup, shape: MeshShape) -> anyhow::Result<String> {
    tch::set_num_threads(1);
    let mesh = Mesh::new(group, shape)?;
    let ranks = ModelRanks::on(&mesh);
    let tp = ranks.tp.clone();
    let options = PipelineOptions {
        order: Order::from(Schedule::OneFOneB),
        micro_batches: MICRO_BATCHES as usize,
        first_values: FirstValues::OfEachLayer(1),
        parts: Box::new(move || tp.parts()),
        // Replicas train by DDP, unless another engine is given as `within`.
        ..Default::default()
    };
    let pipeline = Pipeline::new(&layers(&ranks, &gpt())?, &mesh, options)?;
    let engine = pipeline.engine();
    let mut optimizer = AdamW::new(engine.parameters(), AdamOptions { lr: 1e-2, ..Default::default() })?;
    engine.adopt(&mut optimizer)?;
    let batches = batches(&mesh);
    let samples = (TEXTS as usize) / mesh.samples().size();
    let brought = Brought {
        batches: batches.len(),
        samples,
        count: (samples as i64 * PLACES) as f64,
        ..Default::default()
    };
    let mut losses = Vec::new();
    for _ in 0..STEPS {
        let agreed = Agreed::reach(&mesh, &brought)?;
        // The last layer returns the sum of the losses.
        let loss = pipeline.step(&agreed, &batches, Scale::No, |sums, _| Ok(sums[0].shallow_clone()))?;
        engine.step(&mut optimizer)?;
        optimizer.zero_grad()?;
        losses.push(loss.mean());
    }
    let own: usize = engine.parameters().iter().map(|named| named.tensor.numel()).sum();
    Ok(format!("{own} parameters, loss {:.4} to {:.4}", losses[0], losses[STEPS - 1]))
}

fn gpt() -> GptOptions {
    let small = GptOptions { n_layer: 4, n_head: 4, n_embd: 32, ..GptOptions::default() };
    GptOptions { n_positions: PLACES, vocab_size: VOCAB, ..small }
}

/// The micro-batches of this rank's texts, which count in steps of their number. Replicas take texts in turn.
fn batches(mesh: &Mesh) -> Vec<MicroBatch> {
    let (rank, stride) = (mesh.samples().rank() as i64, mesh.samples().size() as i64);
    let starts = Tensor::arange(TEXTS, (Kind::Int64, Device::Cpu)).slice(0, rank, None, stride).unsqueeze(1);
    let texts = (&starts * 5 + Tensor::arange(PLACES + 1, (Kind::Int64, Device::Cpu)) * (&starts + 1))
        .remainder(VOCAB);
    let len = TEXTS / stride / MICRO_BATCHES;
    let batch = |nth: i64| {
        let texts = texts.narrow(0, nth * len, len);
        let inputs = vec![texts.narrow(1, 0, PLACES), texts.narrow(1, 1, PLACES)];
        let first = (rank + stride * nth * len) as u64;
        let samples = StepSamples { first, stride: stride as u64, count: len as u64 };
        MicroBatch { inputs, targets: Vec::new(), samples }
    };
    (0..MICRO_BATCHES).map(batch).collect()
}
