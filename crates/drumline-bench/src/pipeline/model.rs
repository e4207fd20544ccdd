//! A GPT as a list of layers: the embedding, the blocks, and the head, whose weight is its own.
//!
//! Its linear layers are those of pipelines, whose weights are `[outputs, inputs]`: `bench/peers/pipeline.py` has the same.

use std::ops::Range;

use drumline::engine::pipeline::{
    Boundary, Embedding, Layer, LayerBuilder, LayerError, LayerList, LayerSpec, Linear, MicroBatch, Mode,
};
use drumline_torch::{SmoothedLabels, smoothed_cross_entropy};
use drumline_zoo::formula::tokens;
use drumline_zoo::models::gpt::GptOptions;
use tch::nn::{LayerNorm, Module, layer_norm};
use tch::{Device, Kind, Tensor};

use super::PipelineArgs;
use crate::shard::Size;

type Result<T> = std::result::Result<T, LayerError>;

/// The sizes of the model.
pub(super) fn options() -> GptOptions {
    Size::Mini.options()
}

/// The number of layers: the embedding, the blocks, the head.
pub(super) fn num_layers() -> usize {
    options().n_layer as usize + 2
}

/// These layers of the model.
pub(super) fn layers(range: Range<usize>) -> LayerList {
    let (mut list, last) = (LayerList::default(), num_layers() - 1);
    for place in range {
        list.push(match place {
            0 => LayerSpec::new("embedding", |layer| Ok(Box::new(First::new(layer)?))).cost(0.1),
            _ if place == last => {
                LayerSpec::new("head", |layer| Ok(Box::new(Last::new(layer)?))).cost(head_cost())
            }
            _ => LayerSpec::new(format!("h.{}", place - 1), |layer| Ok(Box::new(Block::new(layer)?))),
        });
    }
    list
}

/// The time of the head in blocks: its product, and the loss.
fn head_cost() -> f64 {
    let GptOptions { vocab_size, n_embd, .. } = options();
    vocab_size as f64 / (12 * n_embd) as f64 + 0.2
}

/// The names of all parameters.
pub(super) fn names() -> Vec<String> {
    let of_block = |block: i64| {
        ["ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"]
            .iter()
            .flat_map(move |layer| ["weight", "bias"].map(|name| format!("h.{block}.{layer}.{name}")))
    };
    let others = ["wte.weight", "wpe.weight", "ln_f.weight", "ln_f.bias", "lm_head.weight"];
    (0..options().n_layer).flat_map(of_block).chain(others.map(str::to_owned)).collect()
}

/// The micro-batches of a step.
pub(super) fn micro_batches(args: &PipelineArgs, step: usize) -> Vec<MicroBatch> {
    let (step, each) = (step as i64, args.batch);
    let texts = args.micro_batches as i64 * each;
    let (inputs, targets) = tokens((step + 1) * texts, args.places, options().vocab_size);
    let own = |all: &Tensor, place: i64| all.narrow(0, step * texts + place * each, each).contiguous();
    let one = |place: i64| {
        MicroBatch::new(vec![own(&inputs, place)], vec![own(&targets, place)], (place * each) as u64)
    };
    (0..args.micro_batches as i64).map(one).collect()
}

/// What travels between two stages for a micro-batch, with gradients.
pub(super) fn hidden_states(args: &PipelineArgs) -> Tensor {
    let size = [args.batch, args.places, options().n_embd];
    Tensor::randn(size, (Kind::Float, Device::Cpu)).set_requires_grad(true)
}

/// The sum of the cross-entropies of all next tokens.
pub(super) fn loss(outputs: &[Tensor], batch: &MicroBatch) -> Result<Tensor> {
    let classes = &batch.targets[0].f_flatten(0, 1)?;
    let labels = SmoothedLabels { classes, ignored: None, smoothing: 0.0 };
    Ok(smoothed_cross_entropy(&outputs[0].f_flatten(0, 1)?, labels)?)
}

fn only(mut xs: Boundary) -> Result<Tensor> {
    Ok(xs.pop().ok_or("a layer got no tensor")?)
}

struct First {
    words: Embedding,
    places: Tensor,
}

impl First {
    fn new(layer: &LayerBuilder<'_>) -> Result<Self> {
        let GptOptions { n_embd, n_positions, vocab_size, .. } = options();
        let words = Embedding::new(&(layer.root() / "wte"), vocab_size, n_embd)?;
        Ok(Self { words, places: Embedding::new(&(layer.root() / "wpe"), n_positions, n_embd)?.weight })
    }
}

impl Layer for First {
    fn forward(&self, xs: Boundary, mode: Mode) -> Result<Boundary> {
        let words = only(self.words.forward(xs, mode)?)?;
        let places = self.places.f_narrow(0, 0, words.size()[1])?;
        Ok(vec![words.f_add(&places)?])
    }
}

struct Block {
    ln_1: LayerNorm,
    c_attn: Linear,
    attn_proj: Linear,
    ln_2: LayerNorm,
    c_fc: Linear,
    mlp_proj: Linear,
    num_heads: i64,
}

impl Block {
    fn new(layer: &LayerBuilder<'_>) -> Result<Self> {
        let GptOptions { n_embd, n_head, .. } = options();
        let path = layer.path();
        let norm = |name: &str| layer_norm(&path / name, vec![n_embd], Default::default());
        let (attn, mlp) = (&path / "attn", &path / "mlp");
        Ok(Self {
            ln_1: norm("ln_1"),
            c_attn: Linear::new(&(&attn / "c_attn"), n_embd, 3 * n_embd)?,
            attn_proj: Linear::new(&(&attn / "c_proj"), n_embd, n_embd)?,
            ln_2: norm("ln_2"),
            c_fc: Linear::new(&(&mlp / "c_fc"), n_embd, 4 * n_embd)?,
            mlp_proj: Linear::new(&(&mlp / "c_proj"), 4 * n_embd, n_embd)?,
            num_heads: n_head,
        })
    }

    fn attention(&self, x: &Tensor) -> Result<Tensor> {
        let (texts, places, size) = x.size3()?;
        let heads = |part: Tensor| part.f_view([texts, places, self.num_heads, -1])?.f_transpose(1, 2);
        let parts = self.c_attn.apply(x)?.f_split(size, 2)?.into_iter().map(heads);
        let [q, k, v]: [Tensor; 3] =
            parts.collect::<std::result::Result<Vec<_>, _>>()?.try_into().map_err(|_| "not three parts")?;
        let seen =
            Tensor::f_scaled_dot_product_attention(&q, &k, &v, None::<Tensor>, 0.0, true, None, false)?;
        self.attn_proj.apply(&seen.f_transpose(1, 2)?.f_flatten(2, 3)?)
    }
}

impl Layer for Block {
    fn forward(&self, xs: Boundary, _: Mode) -> Result<Boundary> {
        let x = only(xs)?;
        let x = x.f_add(&self.attention(&self.ln_1.forward(&x))?)?;
        let hidden = self.c_fc.apply(&self.ln_2.forward(&x))?.f_gelu("tanh")?;
        Ok(vec![x.f_add(&self.mlp_proj.apply(&hidden)?)?])
    }
}

struct Last {
    ln_f: LayerNorm,
    lm_head: Linear,
}

impl Last {
    fn new(layer: &LayerBuilder<'_>) -> Result<Self> {
        let GptOptions { n_embd, vocab_size, .. } = options();
        let ln_f = layer_norm(layer.root() / "ln_f", vec![n_embd], Default::default());
        let weight = Embedding::new(&(layer.root() / "lm_head"), vocab_size, n_embd)?.weight;
        Ok(Self { ln_f, lm_head: Linear::of(weight) })
    }
}

impl Layer for Last {
    fn forward(&self, xs: Boundary, _: Mode) -> Result<Boundary> {
        Ok(vec![self.lm_head.apply(&self.ln_f.forward(&only(xs)?))?])
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use drumline::comm::{Axis, LocalGroup, Mesh};
    use drumline::engine::pipeline::{Pipeline, PipelineOptions};
    use drumline_plan::pipeline::partition;

    use super::*;

    #[test]
    fn all_parameters_have_names_and_the_stages_are_balanced() {
        let list = layers(0..num_layers());
        assert_eq!(partition(&list.costs(), 2).unwrap(), [0..5, 5..8]);
        let made = LocalGroup::run(1, |group| {
            let mesh = Mesh::along(&group, Axis::Pp)?;
            let pipeline = Pipeline::new(&list, &mesh, PipelineOptions::default()).unwrap();
            Ok(pipeline.store().variables().into_keys().collect::<BTreeSet<_>>())
        });
        assert_eq!(made.unwrap()[0], names().into_iter().collect());
    }
}
