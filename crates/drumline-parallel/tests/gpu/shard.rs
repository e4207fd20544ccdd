//! ZeRO on a GPU: ranks that share it, against replicas on the same ranks.

use anyhow::{Error, Result};
use drumline_comm::{Mesh, ProcessGroup};
use drumline_parallel::{
    Clip, DdpOptions, Engine, EngineOptions, EngineSetup, Forwards, GradSync, ParallelError, ShardOptions,
};
use drumline_plan::Stage;
use drumline_torch::cuda::{GraphedStep, memory, reset_peak};
use drumline_torch::{Optimizer, Sgd, SgdOptions, parameters};
use rank_test::ranks_test;
use tch::nn::{Linear, Module, VarStore, linear};
use tch::{Device, Kind, Tensor};

use super::{GPU, join};

const STEPS: i64 = 8;
const WIDTH: i64 = 48;
const STAGES: [Stage; 3] = [Stage::Zero1, Stage::Zero2, Stage::Zero3];

struct Training {
    vs: VarStore,
    blocks: Vec<Linear>,
    engine: Box<dyn Engine>,
    optimizer: Sgd,
}

/// A step that is made so often that it is recorded.
#[derive(Clone, Copy, PartialEq)]
enum Mode {
    Eager,
    Graph,
}

impl Training {
    fn new(group: &ProcessGroup, options: Box<dyn EngineOptions>, num_blocks: usize) -> Result<Self> {
        let vs = VarStore::new(GPU);
        let block = |index: usize| linear(vs.root() / "h" / index, WIDTH, WIDTH, Default::default());
        let blocks = (0..num_blocks).map(block).collect();
        for named in parameters(&vs) {
            let index = Tensor::arange(named.tensor.numel() as i64, (Kind::Float, Device::Cpu));
            let value = (index * 0.37 + group.rank() as f64).sin() * 0.3;
            tch::no_grad(|| named.tensor.shallow_clone().copy_(&value.view_as(&named.tensor)));
        }
        let mut optimizer =
            Sgd::new(parameters(&vs), SgdOptions { lr: 0.1, momentum: 0.9, ..SgdOptions::default() })?;
        let mesh = Mesh::new(group, options.mesh_shape(group.size())?)?;
        let engine = options.engine(EngineSetup::new(&vs, &mesh))?;
        engine.adopt(&mut optimizer)?;
        Ok(Self { vs, blocks, engine, optimizer })
    }

    fn step(&mut self, x: &Tensor) -> std::result::Result<Tensor, ParallelError> {
        self.optimizer.zero_grad()?;
        let forward = || {
            let y = self.blocks.iter().fold(x.shallow_clone(), |x, block| block.forward(&x).tanh());
            (y - 0.25).square().mean(Kind::Float)
        };
        let loss = self.engine.forward_with(GradSync::Reduce, forward)?;
        self.engine.backward(&loss, GradSync::Reduce)?;
        self.engine.clip_on_device(Clip::Norm(0.1), &self.optimizer.parameters())?;
        self.engine.step(&mut self.optimizer)?;
        Ok(loss.detach())
    }

    fn losses(&mut self, group: &ProcessGroup, mode: Mode) -> Result<Vec<f64>> {
        let mut x = Tensor::zeros([16, WIDTH], (Kind::Float, GPU));
        let (mut graphed, mut losses) = (GraphedStep::new(0)?, Vec::new());
        for step in 0..STEPS {
            let index = Tensor::arange(16 * WIDTH, (Kind::Float, Device::Cpu));
            let index = index + (group.rank() as i64 * 5000 + step * 77);
            x.copy_(&(index * 0.11).cos().view([16, WIDTH]));
            let loss = match mode {
                Mode::Eager => self.step(&x)?,
                Mode::Graph => graphed.run(|| self.step(&x))?.shallow_clone(),
            };
            losses.push(loss.double_value(&[]));
        }
        assert_eq!(graphed.is_recorded(), mode == Mode::Graph);
        Ok(losses)
    }
}

fn sharded(stage: Stage) -> Box<dyn EngineOptions> {
    ShardOptions { keep_gathered: 100, shards_alone: true, ..ShardOptions::new(stage) }.into()
}

#[track_caller]
fn assert_close(ours: &[f64], theirs: &[f64], what: &str) {
    let close = ours.iter().zip(theirs).all(|(ours, theirs)| (ours - theirs).abs() < 1e-5);
    assert!(close, "{what}: {ours:?} and {theirs:?}");
}

fn stages_equal_replicas(modes: &[Mode]) -> Result<()> {
    let group = join()?;
    let replicas = DdpOptions { reduces_alone: true, ..DdpOptions::default() };
    let expected = Training::new(&group, replicas.into(), 4)?.losses(&group, Mode::Eager)?;
    assert!(expected[0] > 1.1 * expected[STEPS as usize - 1], "it learns: {expected:?}");
    for stage in STAGES {
        for mode in modes {
            let mut training = Training::new(&group, sharded(stage), 4)?;
            let losses = training.losses(&group, *mode)?;
            let what = if *mode == Mode::Graph { "a graph" } else { "eager" };
            assert_close(&losses, &expected, &format!("{stage} as {what}"));
            let whole = training.engine.full("h.2.weight")?;
            assert_eq!(whole.size(), [WIDTH, WIDTH]);
            drop(training.vs);
        }
    }
    Ok(())
}

ranks_test!(stages_on_one_rank_equal_a_replica, 1, timeout = super::BRIEF, {
    stages_equal_replicas(&[Mode::Eager, Mode::Graph])?
});
/// The most memory while a frozen model becomes that of an engine, and the outputs of an evaluation.
fn started(group: &ProcessGroup, created_on: Device) -> Result<(u64, Vec<Tensor>)> {
    const WIDE: i64 = 1024;
    let before = memory(0)?.allocated;
    reset_peak(0)?;
    let vs = VarStore::new(created_on);
    let block = |index: usize| linear(vs.root() / "h" / index, WIDE, WIDE, Default::default());
    let blocks: Vec<Linear> = (0..16).map(block).collect();
    for (index, block) in blocks.iter().enumerate() {
        for tensor in [Some(&block.ws), block.bs.as_ref()].into_iter().flatten() {
            let _ = tch::no_grad(|| tensor.shallow_clone().fill_(1e-3 * (index + 1) as f64));
        }
        // All but the first are frozen, so that there is memory for parameters only.
        let _ = block.ws.set_requires_grad(index == 0);
    }
    let options = ShardOptions::new(Stage::Zero3);
    let mesh = Mesh::new(group, options.mesh_shape(group.size())?)?;
    let engine = Box::new(options).engine(EngineSetup { device: GPU, ..EngineSetup::new(&vs, &mesh) })?;
    let peak = memory(0)?.peak_allocated - before;
    let forwards = 1 + group.rank();
    engine.begin_evaluation(Forwards::Counted(forwards))?;
    let x = Tensor::ones([2, WIDE], (Kind::Float, GPU));
    let forward = || tch::no_grad(|| blocks.iter().fold(&x * 1.0, |x, block| block.forward(&x).tanh()));
    let outputs = (0..forwards).map(|_| Ok(engine.evaluate_with(forward)?)).collect::<Result<_>>()?;
    engine.end_evaluation(None)?;
    Ok((peak, outputs))
}

ranks_test!(a_model_created_on_the_cpu_is_never_whole_on_a_gpu, 2, {
    let group = join()?;
    let (whole, outputs) = started(&group, GPU)?;
    let (divided, same_outputs) = started(&group, Device::Cpu)?;
    assert!(whole >= 64 << 20, "control: {whole} bytes, and a model has 64 MiB");
    assert!(divided < 60 << 20, "a half, two slots and a unit: {divided} bytes");
    assert!(outputs.iter().zip(&same_outputs).all(|(one, other)| one.equal(other)));
});

/// How many tensors a step gives memory to, once it has settled.
fn allocations_of_a_step(
    group: &ProcessGroup,
    options: Box<dyn EngineOptions>,
    num_blocks: usize,
) -> Result<u64> {
    let mut training = Training::new(group, options, num_blocks)?;
    let x = Tensor::ones([16, WIDTH], (Kind::Float, GPU));
    let mut counts = Vec::new();
    for _ in 0..STEPS {
        let before = memory(0)?.allocations;
        let _ = training.step(&x)?;
        counts.push(memory(0)?.allocations - before);
    }
    assert_eq!(counts[4..6], counts[6..8], "it has settled: {counts:?}");
    Ok(counts[7])
}

fn no_unit_allocates() -> Result<()> {
    let group = join()?;
    let more = |stage: Stage, num_blocks: usize| {
        let replicas = allocations_of_a_step(&group, DdpOptions::default().into(), num_blocks)?;
        Ok::<_, Error>(allocations_of_a_step(&group, sharded(stage), num_blocks)? as i64 - replicas as i64)
    };
    for stage in STAGES {
        let (few, many) = (more(stage, 4)?, more(stage, 12)?);
        assert!(many <= few && few < 4, "{stage}: {few} more than replicas with 4 blocks, {many} with 12");
    }
    Ok(())
}

ranks_test!(units_of_a_step_allocate_nothing, 2, { no_unit_allocates()? });

on_each_route!(stages_of_several_ranks_equal_replicas, {
    // Only NCCL's calls can be recorded.
    let is_nccl = std::env::var_os("DRUMLINE_SHARED_GPU").is_some_and(|route| route == "nccl");
    stages_equal_replicas(if is_nccl { &[Mode::Eager, Mode::Graph] } else { &[Mode::Eager] })?
});
