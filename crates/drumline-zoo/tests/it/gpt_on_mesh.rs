//! A GPT that ranks of a mesh train: stages along `pp`, layers cut along `tp`, texts along `cp`, replicas and ZeRO along `dp`
//! and `shard`. Losses, norms and parameters are compared with those of one rank.

use std::rc::Rc;
use std::time::Duration;

use drumline::ProcessGroup;
use drumline::comm::{Axis, CommError, GroupOptions, LocalGroup, Mesh, MeshShape};
use drumline::engine::pipeline::{MicroBatch, Order, Pipeline, PipelineOptions, Scale, Schedule, Stages};
use drumline::engine::{
    Agreed, Brought, Clip, Engine, EngineOptions, EngineSetup, GradSync, ModelParallel, ShardOptions, Stage,
};
use drumline::trainer::Mode;
use drumline_torch::{Adam, AdamOptions, Masks, Named, Optimizer, StepSamples, parameters};
use drumline_zoo::models::gpt::{Gpt, GptOptions, layers};
use drumline_zoo::models::{Checkpointing, ModelRanks};
use rank_test::anyhow::{self, Result};
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor, no_grad};

const STEPS: u64 = 10;
/// Texts of a step over all ranks.
const TEXTS: i64 = 8;
const PLACES: i64 = 13;
/// Those of a step in a pipeline.
const MICRO_BATCHES: usize = 2;

pub(super) fn options() -> GptOptions {
    let small =
        GptOptions { n_layer: 2, n_head: 8, n_embd: 32, n_positions: PLACES + 1, ..Default::default() };
    // The vocabulary is uneven.
    GptOptions { vocab_size: 29, ..small }
}

/// The sizes of a mesh, what ranks along `shard` divide, and in which order ranks along `pp` compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Tried {
    pub(super) pp: usize,
    pub(super) dp: usize,
    pub(super) shard: usize,
    pub(super) cp: usize,
    pub(super) tp: usize,
    pub(super) stage: Stage,
    pub(super) schedule: Schedule,
}

pub(super) const ALONE: Tried =
    Tried { pp: 1, dp: 1, shard: 1, cp: 1, tp: 1, stage: Stage::Zero0, schedule: Schedule::OneFOneB };

impl Tried {
    fn num_ranks(self) -> usize {
        self.pp * self.dp * self.shard * self.cp * self.tp
    }

    pub(super) fn shape(self) -> MeshShape {
        let axes = [
            (Axis::Pp, self.pp),
            (Axis::Dp, self.dp),
            (Axis::Shard, self.shard),
            (Axis::Cp, self.cp),
            (Axis::Tp, self.tp),
        ];
        axes.into_iter().fold(MeshShape::default(), |shape, (axis, size)| shape.with(axis, size))
    }

    fn options(self, ranks: &ModelRanks) -> ModelParallel {
        let within: Box<dyn EngineOptions> = match self.stage {
            Stage::Zero0 => Default::default(),
            stage => {
                ShardOptions { shard: Some(self.shard), keep_gathered: 50, ..ShardOptions::new(stage) }.into()
            }
        };
        ModelParallel { pp: self.pp, cp: self.cp, tp: self.tp, parts: ranks.tp.parts(), within }
    }
}

/// What a training leaves.
#[derive(Debug)]
pub(super) struct Trained {
    pub(super) losses: Vec<f64>,
    norms: Vec<f64>,
    parameters: Vec<Named>,
}

/// Gives all variables values by a formula, whatever part of them this rank has: threads share a generator.
fn fill(store: &VarStore, ranks: &ModelRanks) -> Result<()> {
    for Named { name, mut tensor } in parameters(store) {
        let part = ranks.tp.parts().into_iter().find(|part| part.whole.name == name);
        let size = part.as_ref().map_or_else(|| tensor.size(), |part| part.whole.size.clone());
        let numbers = Tensor::arange(size.iter().product::<i64>(), (Kind::Double, Device::Cpu));
        let place = name.bytes().map(f64::from).sum::<f64>();
        let shift = f64::from(name.contains("ln_") && name.ends_with("weight"));
        let whole = (&numbers * 0.7 + &numbers * &numbers * 1e-3 + place).sin() * 0.2 + shift;
        let whole = whole.view(&size[..]);
        let own = part.map_or_else(|| Ok(whole.shallow_clone()), |part| part.of(&whole, &tensor.size()))?;
        no_grad(|| tensor.copy_(&own));
    }
    Ok(())
}

/// This rank's texts of a step, of `TEXTS`: ranks take them in turn.
fn batch(step: u64, rank: usize, stride: usize) -> (Tensor, Tensor) {
    let all = Tensor::arange(TEXTS * (PLACES + 1), (Kind::Int64, Device::Cpu)) + step as i64 * 31;
    let all = (&all * &all * 7 + &all * 3).remainder(29).view([TEXTS, PLACES + 1]);
    let own = all.slice(0, rank as i64, None, stride as i64);
    (own.narrow(1, 0, PLACES).contiguous(), own.narrow(1, 1, PLACES).contiguous())
}

/// What a rank has of the model: all layers, or a part of each, or some of them.
enum Model {
    Layers(Box<Gpt>),
    Stages(Rc<Stages>),
}

impl Model {
    fn new(
        tried: Tried,
        ranks: &ModelRanks,
        mesh: &Mesh,
        store: &VarStore,
        options: &GptOptions,
    ) -> Result<Self> {
        if tried.pp == 1 {
            return Ok(Self::Layers(Gpt::on(ranks, &store.root(), options)?.into()));
        }
        let cut = PipelineOptions {
            order: Order::from(tried.schedule),
            micro_batches: MICRO_BATCHES,
            // A stage for each layer, if there are as many.
            costs: Some(vec![1.0; options.n_layer as usize + 2]),
            ..Default::default()
        };
        Ok(Self::Stages(Stages::build(&layers(ranks, options)?, store, mesh, &cut)?.into()))
    }

    fn on(self, engine: &Rc<dyn Engine>, masks: &Masks) -> Result<Steps> {
        Ok(match self {
            Self::Layers(model) => Steps::Whole { model, engine: engine.clone(), masks: masks.clone() },
            Self::Stages(stages) => {
                Steps::Pipelined(Pipeline::on(stages, engine.clone())?.with_masks(masks.clone()))
            }
        })
    }
}

/// Forward and backward of a step.
enum Steps {
    Whole { model: Box<Gpt>, engine: Rc<dyn Engine>, masks: Masks },
    Pipelined(Pipeline),
}

impl Steps {
    /// The sum of the losses of all texts, with the gradients of their mean.
    fn gradients(&self, step: u64, mesh: &Mesh) -> Result<f64> {
        let (tokens, targets) = batch(step, mesh.samples().rank(), mesh.samples().size());
        match self {
            Self::Pipelined(pipeline) => pipelined(pipeline, mesh, &[tokens, targets]),
            Self::Whole { model, engine, masks } => {
                let loss = {
                    let _masks = masks.enter(samples(mesh, 0, tokens.size()[0]));
                    let forward = || model.loss(&tokens, &targets, Mode::Train);
                    engine.forward_with(GradSync::Reduce, forward)?.map_err(anyhow::Error::from_boxed)?
                };
                let mut sum = [loss.double_value(&[])];
                mesh.losses().all_reduce(&mut sum, drumline::ReduceOp::Sum)?;
                let factor = mesh.losses().size() as f64 / (TEXTS * PLACES) as f64;
                engine.backward(&(&loss * factor), GradSync::Reduce)?;
                Ok(sum[0])
            }
        }
    }
}

/// Which texts of the step these are: `count` of this rank's, from its `first` on.
fn samples(mesh: &Mesh, first: i64, count: i64) -> StepSamples {
    let (rank, stride) = (mesh.samples().rank() as u64, mesh.samples().size() as u64);
    StepSamples { first: rank + stride * first as u64, stride, count: count as u64 }
}

fn pipelined(pipeline: &Pipeline, mesh: &Mesh, texts: &[Tensor; 2]) -> Result<f64> {
    let own = texts[0].size()[0];
    let len = own / MICRO_BATCHES as i64;
    let micro_batch = |nth: usize| {
        let first = nth as i64 * len;
        let inputs = texts.iter().map(|texts| texts.narrow(0, first, len)).collect();
        MicroBatch { inputs, targets: Vec::new(), samples: samples(mesh, first, len) }
    };
    let batches: Vec<_> = (0..MICRO_BATCHES).map(micro_batch).collect();
    let brought = Brought {
        batches: MICRO_BATCHES,
        samples: own as usize,
        // Ranks along `cp` count their places.
        count: (own * PLACES) as f64 / mesh.axis(Axis::Cp).size() as f64,
        ..Default::default()
    };
    let agreed = Agreed::reach(mesh, &brought)?;
    let loss = pipeline.step(&agreed, &batches, Scale::No, |outputs, _| Ok(outputs[0].shallow_clone()))?;
    Ok(loss.sum)
}

fn trained(group: &ProcessGroup, tried: Tried, options: &GptOptions, kind: Kind) -> Result<Trained> {
    tch::set_num_threads(1);
    let mesh = Mesh::new(group, tried.shape())?;
    let (ranks, mut store) = (ModelRanks::on(&mesh), VarStore::new(Device::Cpu));
    let model = Model::new(tried, &ranks, &mesh, &store, options)?;
    if kind == Kind::Double {
        store.double();
    }
    fill(&store, &ranks)?;
    let engine: Rc<dyn Engine> =
        Box::new(tried.options(&ranks)).engine(EngineSetup::new(&store, &mesh))?.into();
    let mut optimizer =
        Adam::new(parameters(&store), AdamOptions { lr: 3e-3, eps: 1e-3, ..Default::default() })?;
    engine.adopt(&mut optimizer)?;
    let masks = Masks::new(3, Device::Cpu)?;
    let steps = model.on(&engine, &masks)?;
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    for step in 0..STEPS {
        masks.set_step(step)?;
        losses.push(steps.gradients(step, &mesh)?);
        norms.extend(engine.clip(Clip::Norm(1.0), &engine.parameters())?);
        engine.step(&mut optimizer)?;
        optimizer.zero_grad()?;
    }
    let whole = |name: String| -> Result<Named> {
        let tensor = engine.full(&name)?;
        Ok(Named { name, tensor })
    };
    let names = engine.tensors().into_iter().map(|whole| whole.name);
    let mut parameters = names.map(whole).collect::<Result<Vec<_>>>()?;
    parameters.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(Trained { losses, norms, parameters })
}

pub(super) fn on_ranks(tried: Tried, options: &GptOptions, kind: Kind) -> Vec<Trained> {
    let limits = GroupOptions { timeout: Duration::from_secs(120), ..Default::default() };
    let body = |group: ProcessGroup| {
        trained(&group, tried, options, kind).map_err(|error| CommError::Init { cause: format!("{error:#}") })
    };
    LocalGroup::run_with(tried.num_ranks(), &limits, body)
        .unwrap_or_else(|error| panic!("{tried:?}: {error:?}"))
}

/// The largest difference of two tensors, relative to the largest element.
fn distance(one: &Tensor, other: &Tensor) -> f64 {
    let (one, other) = (one.to_kind(Kind::Double), other.to_kind(Kind::Double));
    let most = one.abs().max().double_value(&[]).max(1e-2);
    (one - other).abs().max().double_value(&[]) / most
}

fn check(one: &Trained, other: &Trained, most: f64, what: &str) {
    for (step, (one, other)) in one.losses.iter().zip(&other.losses).enumerate() {
        assert!((one - other).abs() <= most * one.abs(), "{what}: loss of step {step}: {one} and {other}");
    }
    for (step, (one, other)) in one.norms.iter().zip(&other.norms).enumerate() {
        assert!((one - other).abs() <= most * one.abs(), "{what}: norm of step {step}: {one} and {other}");
    }
    assert_eq!(one.parameters.len(), other.parameters.len(), "{what}");
    let both = one.parameters.iter().zip(&other.parameters);
    let distances = both.map(|(one, other)| {
        assert_eq!(one.name, other.name, "{what}");
        (distance(&one.tensor, &other.tensor), &other.name)
    });
    let furthest = distances.max_by(|one, other| one.0.total_cmp(&other.0));
    let (distance, name) = furthest.expect("a model has parameters");
    assert!(distance <= most, "{what}: `{name}` is the furthest, {distance:e} away");
}

/// Trains on meshes, and compares with one rank. All ranks have the same bits.
pub(super) fn equal_one_rank(meshes: &[Tried], options: &GptOptions, kind: Kind, most: f64) {
    // The loss of one rank is computed in chunks in f32 only, and all of it must be in the kind that is compared.
    let plain = GptOptions { loss_chunks: 1, checkpoint: Checkpointing::None, ..options.clone() };
    let one = on_ranks(ALONE, &plain, kind).remove(0);
    assert!(one.losses[9] < one.losses[0], "it learns: {:?}", one.losses);
    for tried in meshes {
        let all = on_ranks(*tried, options, kind);
        for rank in &all {
            check(&one, rank, most, &format!("{tried:?}"));
            for (rank, first) in rank.parameters.iter().zip(&all[0].parameters) {
                assert_eq!(
                    rank.tensor, first.tensor,
                    "{tried:?}: `{}` has the same bits on all ranks",
                    rank.name
                );
            }
        }
    }
}
