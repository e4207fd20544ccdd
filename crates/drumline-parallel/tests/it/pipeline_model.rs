//! A small language model as a list of layers, and its training in one process without a pipeline.

use std::collections::HashMap;

use anyhow::Result;
use drumline_comm::{Axis, Mesh, MeshShape, ProcessGroup};
use drumline_parallel::pipeline::{
    Boundary, Embedding, FirstValues, Layer, LayerError, LayerList, LayerSpec, Linear, MicroBatch, Mode,
    Order, Pipeline, PipelineOptions, Scale, StepLoss,
};
use drumline_parallel::{Agreed, Brought};
use drumline_plan::pipeline::{Action, Compute, Program};
use drumline_torch::{Masks, Named, dropout, grad, mask_layer, parameters, set_grad};
use tch::nn::{self, Init, Module, VarStore};
use tch::{Device, Kind, Reduction, Tensor};

pub(crate) const VOCAB: i64 = 11;
pub(crate) const SIZE: i64 = 6;
const TOKENS: i64 = 3;
pub(crate) const SEED: u64 = 5;

/// What a model has beside its layers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Variant {
    pub(crate) blocks: usize,
    pub(crate) is_tied: bool,
    pub(crate) is_checkpointed: bool,
    pub(crate) dropout: f64,
    /// The last micro-batch is shorter.
    pub(crate) is_uneven: bool,
    /// Tied variables are drawn.
    pub(crate) draws: bool,
}

impl Variant {
    pub(crate) const PLAIN: Self = Self {
        blocks: 15,
        is_tied: false,
        is_checkpointed: false,
        dropout: 0.0,
        is_uneven: false,
        draws: false,
    };
    pub(crate) const ALL: Self = Self {
        blocks: 15,
        is_tied: true,
        is_checkpointed: true,
        dropout: 0.3,
        is_uneven: true,
        draws: false,
    };
}

struct First {
    embedding: Embedding,
    dropout: f64,
}

struct Block {
    norm: nn::LayerNorm,
    fc: Linear,
    back: Linear,
    dropout: f64,
}

struct Last {
    norm: nn::LayerNorm,
    head: Linear,
}

fn dropped(x: &Tensor, p: f64, mode: Mode) -> Result<Tensor, LayerError> {
    if p > 0.0 && mode.is_train() { Ok(dropout(x, p)?) } else { Ok(x.shallow_clone()) }
}

/// Tokens become features, which also skip all blocks.
impl Layer for First {
    fn forward(&self, xs: Boundary, mode: Mode) -> Result<Boundary, LayerError> {
        let features = self.embedding.forward(xs, mode)?.remove(0);
        Ok(vec![dropped(&features, self.dropout, mode)?, features])
    }
}

impl Layer for Block {
    fn forward(&self, xs: Boundary, mode: Mode) -> Result<Boundary, LayerError> {
        let [x, skip] = &xs[..] else { return Err("a block gets two tensors".into()) };
        let inner = self.fc.apply(&self.norm.forward(x))?.f_gelu("none")?;
        let made = dropped(&self.back.apply(&inner)?, self.dropout, mode)?;
        Ok(vec![x.f_add(&made)?, skip.shallow_clone()])
    }
}

impl Layer for Last {
    fn forward(&self, xs: Boundary, _: Mode) -> Result<Boundary, LayerError> {
        let [x, skip] = &xs[..] else { return Err("the last layer gets two tensors".into()) };
        Ok(vec![self.head.apply(&self.norm.forward(&x.f_add(skip)?))?])
    }
}

fn norm(path: nn::Path<'_>) -> nn::LayerNorm {
    nn::layer_norm(path, vec![SIZE], Default::default())
}

fn table(path: &nn::Path<'_>, name: &str) -> Tensor {
    path.var(name, &[VOCAB, SIZE], Init::Randn { mean: 0.0, stdev: 0.5 })
}

/// The same without drawing: other tests of this process may draw from the generators of libtorch at the same time, and
/// tied variables must begin equal on all ranks.
fn waves(path: &nn::Path<'_>, name: &str) -> Tensor {
    let values = (Tensor::arange(VOCAB * SIZE, (Kind::Float, Device::Cpu)) * 0.7).sin() * 0.5;
    path.var_copy(name, &values.view([VOCAB, SIZE]))
}

fn block(path: &nn::Path<'_>, dropout: f64) -> Result<Block, LayerError> {
    let (fc, back) =
        (Linear::new(&(path / "fc"), SIZE, 2 * SIZE)?, Linear::new(&(path / "back"), 2 * SIZE, SIZE)?);
    Ok(Block { norm: norm(path / "norm"), fc, back, dropout })
}

/// The model.
pub(crate) fn layers(variant: Variant) -> LayerList {
    let Variant { blocks, is_tied, is_checkpointed, dropout, draws, .. } = variant;
    let mut list = LayerList::default();
    list.push(LayerSpec::new("wte", move |layer| {
        let weight = match is_tied {
            true if draws => layer.tied("wte.weight", |path, name| Ok(table(path, name)))?,
            true => layer.tied("wte.weight", |path, name| Ok(waves(path, name)))?,
            false => table(&layer.path(), "weight"),
        };
        Ok(Box::new(First { embedding: Embedding::of(weight), dropout }))
    }));
    for place in 0..blocks {
        let spec =
            LayerSpec::new(format!("h.{place}"), move |layer| Ok(Box::new(block(&layer.path(), dropout)?)));
        list.push(if is_checkpointed && place % 2 == 0 { spec.checkpointed() } else { spec });
    }
    list.push(LayerSpec::new("head", move |layer| {
        let weight = match is_tied {
            true if draws => layer.tied("wte.weight", |path, name| Ok(table(path, name)))?,
            true => layer.tied("wte.weight", |path, name| Ok(waves(path, name)))?,
            false => table(&layer.path(), "weight"),
        };
        Ok(Box::new(Last { norm: norm(layer.path() / "norm"), head: Linear::of(weight) }))
    }));
    if is_tied {
        list.tie("wte.weight", &["wte", "head"]);
    }
    list
}

/// The loss of a micro-batch, as a sum over its tokens.
pub(crate) fn loss(outputs: &[Tensor], batch: &MicroBatch) -> Result<Tensor, LayerError> {
    let targets = batch.targets[0].view([-1]);
    let logits = outputs[0].f_view([-1, VOCAB])?;
    Ok(logits.f_cross_entropy_loss::<Tensor>(&targets, None, Reduction::Sum, -100, 0.0)?)
}

/// The micro-batches of a step, the same on all ranks.
pub(crate) fn batches(count: usize, is_uneven: bool, seed: i64) -> Vec<MicroBatch> {
    let rows = |micro_batch: usize| if is_uneven && micro_batch + 1 == count { 1 } else { 2 };
    let tokens = |micro_batch: usize, shift: i64| {
        let first = seed * 31 + micro_batch as i64 * 7 + shift;
        let numbers = Tensor::arange(rows(micro_batch) * TOKENS, (Kind::Int64, Device::Cpu));
        ((numbers * 5 + first) * 3).remainder(VOCAB).view([-1, TOKENS])
    };
    let batch = |place| MicroBatch::new(vec![tokens(place, 0)], vec![tokens(place, 1)], 2 * place as u64);
    (0..count).map(batch).collect()
}

pub(crate) fn count_of(batches: &[MicroBatch]) -> f64 {
    batches.iter().map(|batch| batch.targets[0].numel() as f64).sum()
}

pub(crate) fn agreed(mesh: &Mesh, batches: &[MicroBatch]) -> Result<Agreed> {
    let samples = batches.iter().map(|batch| batch.samples.count as usize).sum();
    let brought = Brought { batches: batches.len(), samples, count: count_of(batches), ..Default::default() };
    Ok(Agreed::reach(mesh, &brought)?)
}

pub(crate) fn masks(step: u64) -> Masks {
    let masks = Masks::new(SEED, Device::Cpu).unwrap();
    masks.set_step(step).unwrap();
    masks
}

/// A mesh of `pp` and the rest along `dp`.
pub(crate) fn mesh(group: &ProcessGroup, pp: usize) -> Result<Mesh> {
    Ok(Mesh::new(group, MeshShape::default().with(Axis::Pp, pp).with(Axis::Dp, group.size() / pp))?)
}

pub(crate) fn options(order: Order, micro_batches: usize) -> PipelineOptions {
    PipelineOptions {
        order,
        micro_batches,
        first_values: FirstValues::OfEachLayer(SEED),
        masks: Some(masks(0)),
        ..Default::default()
    }
}

/// A step of a pipeline, without the optimizer's.
pub(crate) fn step(pipeline: &Pipeline, batches: &[MicroBatch]) -> Result<StepLoss> {
    let agreed = agreed(pipeline.engine().mesh(), batches)?;
    Ok(pipeline.step(&agreed, batches, Scale::No, loss)?)
}

/// Gradients by name, as copies.
pub(crate) fn gradients(parameters: &[Named]) -> HashMap<String, Tensor> {
    let of = |named: &Named| Some((named.name.clone(), grad(&named.tensor).unwrap()?.copy()));
    parameters.iter().filter_map(of).collect()
}

pub(crate) fn clear(parameters: &[Named]) {
    parameters.iter().for_each(|named| set_grad(&named.tensor, None).unwrap());
}

/// The whole model in one process, by plain libtorch: the gradients of each micro-batch alone. A tied variable has a
/// gradient for each of its layers, the second one under `head.weight`.
pub(crate) struct Oracle {
    variant: Variant,
    /// Of each micro-batch.
    pub(crate) gradients: Vec<HashMap<String, Tensor>>,
    pub(crate) losses: Vec<f64>,
}

impl Oracle {
    /// With these values of all variables.
    pub(crate) fn new(
        variant: Variant,
        values: &HashMap<String, Tensor>,
        batches: &[MicroBatch],
        step: u64,
    ) -> Self {
        let store = VarStore::new(Device::Cpu);
        let root = store.root();
        let Variant { blocks, dropout, .. } = variant;
        let copy = |path: nn::Path<'_>, name: &str, of: &str| path.var_copy(name, &values[of]);
        let linear = |name: &str| {
            let path = name.split('.').fold(root.clone(), |path, part| path / part);
            let [weight, bias] =
                ["weight", "bias"].map(|part| copy(path.clone(), part, &format!("{name}.{part}")));
            Linear { weight, bias: Some(bias) }
        };
        let first = First { embedding: Embedding::of(copy(&root / "wte", "weight", "wte.weight")), dropout };
        let mut layers: Vec<(String, Box<dyn Layer>)> = vec![("wte".into(), Box::new(first))];
        for place in 0..blocks {
            let (name, norm) = (format!("h.{place}"), norm(&root / "h" / place / "norm"));
            let [fc, back] = ["fc", "back"].map(|part| linear(&format!("{name}.{part}")));
            layers.push((name, Box::new(Block { norm, fc, back, dropout })));
        }
        let of = if variant.is_tied { "wte.weight" } else { "head.weight" };
        let head = Linear::of(copy(&root / "head", "weight", of));
        layers.push(("head".into(), Box::new(Last { norm: norm(&root / "head" / "norm"), head })));
        let (parameters, masks, count) = (parameters(&store), masks(step), count_of(batches));
        let (mut all, mut losses) = (Vec::new(), Vec::new());
        for batch in batches {
            let _scope = masks.enter(batch.samples);
            let mut xs: Boundary = batch.inputs.iter().map(Tensor::shallow_clone).collect();
            for (name, layer) in &layers {
                let _layer = mask_layer(name, 0);
                xs = layer.forward(xs, Mode::Train).unwrap();
            }
            let sum = loss(&xs, batch).unwrap();
            losses.push(sum.double_value(&[]));
            (sum * (1.0 / count)).backward();
            all.push(gradients(&parameters));
            clear(&parameters);
        }
        Self { variant, gradients: all, losses }
    }

    pub(crate) fn loss(&self) -> f64 {
        self.losses.iter().sum()
    }

    /// The gradients, with micro-batches in the order of the program.
    pub(crate) fn in_order_of(
        &self,
        program: &Program,
        layers: &[std::ops::Range<usize>],
    ) -> HashMap<String, Tensor> {
        let stage_of = |layer: usize| layers.iter().position(|range| range.contains(&layer)).unwrap();
        let layer_of = |name: &str| match name.split('.').collect::<Vec<_>>()[..] {
            ["wte", ..] => 0,
            ["h", place, ..] => 1 + place.parse::<usize>().unwrap(),
            _ => 1 + self.variant.blocks,
        };
        let names = self.gradients[0].keys();
        let mut made = HashMap::new();
        for name in names {
            if self.variant.is_tied && name == "head.weight" {
                continue;
            }
            let mut uses = vec![(name.clone(), stage_of(layer_of(name)))];
            if self.variant.is_tied && name == "wte.weight" {
                uses.push(("head.weight".into(), layers.len() - 1));
            }
            let is_apart = self.gradients[0][name].dim() == 2;
            let sum = program.rows.iter().filter_map(|row| self.summed(row, &uses, is_apart));
            let total = sum.reduce(|sum, next| sum + next).unwrap();
            made.insert(name.clone(), total);
        }
        made
    }

    /// The sum of a rank: each computation adds its gradient to those before.
    fn summed(&self, row: &[Action], uses: &[(String, usize)], is_apart: bool) -> Option<Tensor> {
        let mut sum: Option<Tensor> = None;
        for work in row.iter().flat_map(|action| action.works()) {
            let adds = match work.compute {
                Compute::Backward => true,
                Compute::Weight => is_apart,
                Compute::Input => !is_apart,
                Compute::Forward => false,
            };
            for (name, _) in uses.iter().filter(|(_, stage)| adds && *stage == work.stage) {
                let own = &self.gradients[work.micro_batch][name];
                sum = Some(sum.map_or_else(|| own.copy(), |sum| sum + own));
            }
        }
        sum
    }
}

/// The values of the variables of all ranks, by name.
pub(crate) fn values(pipeline: &Pipeline) -> Result<HashMap<String, Tensor>> {
    let engine = pipeline.engine();
    engine.tensors().into_iter().map(|whole| Ok((whole.name.clone(), engine.full(&whole.name)?))).collect()
}
