//! A small network as a list of layers that `pp` cuts into stages and `tp` into parts, with a tied table and stacked weights.

use drumline::comm::Mesh;
use drumline::engine::pipeline::{
    Boundary, LayerBuilder, LayerError, LayerList, LayerSpec, MicroBatch, layer_fn,
};
use drumline::engine::tensor::{
    AttentionShape, ColumnLinear, Keeps, LayerNorm, LinearShape, RowLinear, SelfAttention, TensorParallel,
    TpTensor, Variable, VocabEmbedding, VocabLabels, vocab_cross_entropy,
};
use drumline::engine::{Agreed, Brought};
use drumline_torch::{Named, parameters};
use rank_test::anyhow::Result;
use tch::nn::{Init, VarStore};
use tch::{Device, Kind, Tensor, no_grad};

const VOCAB: i64 = 19;
const SIZE: i64 = 16;
const INNER: i64 = 27;
const INIT: Init = Init::Const(0.1);
/// The variable of the first and of the last layer.
pub(super) const TIED: &str = "wte.weight";
/// All of them.
pub(super) const NUM_PARAMETERS: usize = 11;

/// Four layers: an embedding, attention, a feed-forward network, and a loss by the table of the embedding.
pub(super) fn layers(tp: &TensorParallel) -> LayerList {
    let mut list = LayerList::default();
    list.push(spec("embed", tp, |layer, tp| {
        let words = words(layer, &tp)?;
        Ok(Box::new(move |tokens, _| Ok(words.forward(tokens)?.sum()?.into_tensor())))
    }));
    list.push(spec("attn", tp, |layer, tp| {
        let shape = AttentionShape { features: SIZE, heads: 8, causal: true };
        let norm = LayerNorm::new(&tp, &(layer.root() / "norm"), SIZE)?;
        let attention = SelfAttention::new(&tp, &(layer.root() / "attn"), shape, INIT)?;
        Ok(Box::new(move |xs, _| {
            let xs = TpTensor::invariant(xs.shallow_clone(), &tp);
            let seen = attention.forward(&norm.forward_invariant(&xs)?.replicate()?)?;
            Ok(xs.plus(&seen)?.into_tensor())
        }))
    }));
    list.push(spec("mlp", tp, |layer, tp| {
        let linear = |inputs, outputs| LinearShape { init: INIT, ..LinearShape::new(inputs, outputs) };
        let fc = ColumnLinear::new(&tp, &(layer.root() / "fc"), linear(SIZE, INNER))?;
        let back = RowLinear::new(&tp, &(layer.root() / "back"), linear(INNER, SIZE))?;
        Ok(Box::new(move |xs, _| {
            let xs = TpTensor::invariant(xs.shallow_clone(), &tp);
            let hidden = fc.forward(&xs.replicate()?)?.map(|hidden| hidden.f_gelu("none"))?;
            Ok(xs.plus(&back.forward(&hidden)?)?.into_tensor())
        }))
    }));
    list.push(spec("head", tp, |layer, tp| {
        let words = words(layer, &tp)?;
        Ok(Box::new(move |xs, tokens| {
            let xs = TpTensor::invariant(xs.shallow_clone(), &tp).replicate()?;
            let logits = words.logits(&xs)?.map(|logits| logits.f_flatten(0, 1))?;
            let classes = tokens.f_view([-1])?;
            let labels = VocabLabels { classes: &classes, num_classes: None, ignored: None, smoothing: 0.1 };
            Ok(vocab_cross_entropy(&logits, labels)?.into_tensor())
        }))
    }));
    list.tie(TIED, &["embed", "head"]);
    list
}

/// What a layer computes of the states and the tokens, which travel with them.
type Forward = Box<dyn Fn(&Tensor, &Tensor) -> Result<Tensor, LayerError> + Send>;

fn spec(
    name: &str,
    tp: &TensorParallel,
    build: fn(&LayerBuilder<'_>, TensorParallel) -> Result<Forward, LayerError>,
) -> LayerSpec {
    let tp = tp.clone();
    LayerSpec::new(name, move |layer| {
        let forward = build(layer, tp.clone())?;
        Ok(layer_fn(move |xs: Boundary, _| Ok(vec![forward(&xs[0], &xs[1])?, xs[1].shallow_clone()])))
    })
}

fn words(layer: &LayerBuilder<'_>, tp: &TensorParallel) -> Result<VocabEmbedding, LayerError> {
    let weight = layer.tied(TIED, |path, name| {
        let table = Variable { name, size: &[VOCAB, SIZE], keeps: Keeps::Along(0) };
        Ok(tp.variable(path, table, INIT)?)
    })?;
    Ok(VocabEmbedding::of(&weight, VOCAB, tp))
}

/// Gives variables values that differ from element to element, whatever part of them this rank has.
pub(super) fn fill(store: &VarStore, tp: &TensorParallel) -> Result<()> {
    for Named { name, mut tensor } in parameters(store) {
        let part = tp.parts().into_iter().find(|part| part.whole.name == name);
        let size = part.as_ref().map_or_else(|| tensor.size(), |part| part.whole.size.clone());
        let shift = name.bytes().map(f64::from).sum::<f64>();
        let numbers = Tensor::arange(size.iter().product::<i64>(), (Kind::Float, Device::Cpu));
        let whole = (numbers * 0.37 + shift).sin().view(&size[..]);
        let own = part.map_or_else(|| Ok(whole.shallow_clone()), |part| part.of(&whole, &tensor.size()))?;
        no_grad(|| tensor.copy_(&own));
    }
    Ok(())
}

/// The batch of each step, and what ranks agree on.
pub(super) fn batch(mesh: &Mesh) -> Result<(MicroBatch, Agreed)> {
    let tokens = (Tensor::arange(10, (Kind::Int64, Device::Cpu)).view([2, 5]) * 7).remainder(VOCAB);
    let brought = Brought { batches: 1, samples: 2, count: 2.0, ..Default::default() };
    let batch = MicroBatch::new(vec![tokens.shallow_clone(), tokens], Vec::new(), 0);
    Ok((batch, Agreed::reach(mesh, &brought)?))
}
