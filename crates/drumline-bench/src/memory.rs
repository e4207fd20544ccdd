//! `drumline-bench memory`: the memory of a GPT in training, with its states in different places, which
//! `cargo xtask bench memory` compares with formulas.

use std::path::PathBuf;
use std::time::Instant;

use clap::{Args, ValueEnum};
use drumline::comm::Mesh;
use drumline::engine::{EngineOptions, EngineSetup, GradSync, Offload, Place, ShardOptions, Stage};
use drumline::optim::{AdamOptions, AdamW, Optimizer, parameters};
use drumline::trainer::Mode;
use drumline::{ProcessGroup, ReduceOp};
use drumline_torch::flush_denormals;
use serde_json::json;
use tch::Device;
use tch::nn::VarStore;

use drumline_zoo::formula::{fill, tokens};
use drumline_zoo::models::gpt::Gpt;

use crate::shard::{Size, pss, warm_up};

const STEPS: usize = 3;

/// What is in files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum InFiles {
    /// Nothing.
    Nothing,
    /// The optimizer's state.
    State,
    /// It, and the rows of parameters.
    All,
}

/// Weigh a GPT in training
#[derive(Debug, Args)]
pub(super) struct MemoryArgs {
    /// How large the model is
    #[arg(long)]
    size: Size,
    /// Stage of ZeRO
    #[arg(long)]
    stage: Stage,
    /// What is in files
    #[arg(long)]
    in_files: InFiles,
    /// Folder of the files
    #[arg(long)]
    folder: PathBuf,
}

impl MemoryArgs {
    fn offload(&self) -> Offload {
        let disk = || Place::Disk(self.folder.clone());
        match self.in_files {
            InFiles::Nothing => Offload::default(),
            InFiles::State => Offload { optimizer: disk(), ..Offload::default() },
            InFiles::All => Offload { optimizer: disk(), parameters: disk(), ..Offload::default() },
        }
    }
}

/// Trains on one token for each rank and step, and rank 0 prints one JSON line.
pub(super) fn run(args: &MemoryArgs) -> anyhow::Result<()> {
    flush_denormals(true)?;
    tch::set_num_threads(1);
    let group = ProcessGroup::from_env()?;
    warm_up(&group)?;
    let empty = pss()?;
    let store = VarStore::new(Device::Cpu);
    let sizes = args.size.options();
    let model = Gpt::new(&store.root(), &sizes)?;
    fill(&store);
    let num_parameters: usize = parameters(&store).iter().map(|named| named.tensor.numel()).sum();
    let options = ShardOptions { offload: args.offload(), ..ShardOptions::new(args.stage) };
    let mesh = Mesh::new(&group, options.mesh_shape(group.size())?)?;
    let engine = Box::new(options).engine(EngineSetup::new(&store, &mesh))?;
    let adam = AdamOptions { lr: 1e-4, ..AdamOptions::default() };
    let mut optimizer = AdamW::new(parameters(&store), adam)?;
    engine.adopt(&mut optimizer)?;
    let (mut times, mut losses) = (Vec::new(), Vec::new());
    for step in 0..STEPS {
        let index = (step * group.size() + group.rank()) as i64;
        let (inputs, targets) = tokens(index + 1, 1, sizes.vocab_size);
        let own = |all: tch::Tensor| all.narrow(0, index, 1).contiguous();
        let (inputs, targets) = (own(inputs), own(targets));
        optimizer.zero_grad()?;
        let loss = engine.forward_with(GradSync::Reduce, || model.loss(&inputs, &targets, Mode::Train))?;
        let loss = loss.map_err(anyhow::Error::from_boxed)?;
        engine.backward(&loss, GradSync::Reduce)?;
        group.barrier()?;
        let began = Instant::now();
        engine.step(&mut optimizer)?;
        times.push(began.elapsed().as_secs_f64() * 1e3);
        losses.push(loss.double_value(&[]));
    }
    group.all_reduce(&mut losses, ReduceOp::Avg)?;
    group.all_reduce(&mut times, ReduceOp::Max)?;
    let mut states = [pss()? - empty];
    group.all_reduce(&mut states, ReduceOp::Sum)?;
    let line = json!({
        "optimizer_ms": times.iter().copied().fold(f64::INFINITY, f64::min),
        "losses": losses,
        "pss_bytes": states[0],
        "parameters": num_parameters,
    });
    if group.rank() == 0 {
        println!("{line}");
    }
    Ok(())
}
