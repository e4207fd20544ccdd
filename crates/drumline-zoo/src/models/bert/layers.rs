//! A BERT as a list of layers, for pipelines.
//!
//! ```text
//!   tokens, types, places ─▶ embed ─▶ rows, tokens, places ─▶ bert.encoder.layer.0 ─▶ … ─▶ head ─▶ logits at the places
//! ```
//! Layers compute what [`Bert`](super::Bert) computes, of the same variables. Tokens travel with the rows, as they say which
//! places hold words.

use drumline::engine::pipeline::{
    Boundary, Layer as PipelineLayer, LayerBuilder, LayerError, LayerList, LayerSpec, Mode,
};
use tch::nn::Path;

use super::embeddings::Embeddings;
use super::head::MaskedHead;
use super::layer::Layer;
use super::{BertOptions, Texts, at_places};
use crate::error::ZooError;
use crate::models::checkpointing::OneBlock;
use crate::models::net::tensors_of;
use crate::models::ranks::ModelRanks;
use crate::models::transformer::Embedding;

/// The variable of the first and of the last layer.
const WORDS: &str = "bert.embeddings.word_embeddings.weight";

/// The model as a list of layers, of which a rank has all or its part. The first layer gets tokens and types, both `[texts,
/// places]`, and the masked places; the last one returns their logits, of this rank's classes.
pub fn layers(ranks: &ModelRanks, options: &BertOptions, vocab_size: i64) -> Result<LayerList, ZooError> {
    options.check()?;
    ranks.check_no_cp()?;
    options.checkpoint.check(options.num_hidden_layers)?;
    let (size, inner) = (options.hidden_size, options.intermediate_size);
    let mut list = LayerList::default();
    let words = {
        let (ranks, options) = (ranks.clone(), options.clone());
        move |layer: &LayerBuilder<'_>| {
            let created =
                |path: &Path<'_>, _: &str| Ok(Embeddings::words(&ranks, path, &options, vocab_size)?.weight);
            let weight = layer.tied(WORDS, created)?;
            Ok::<_, LayerError>(Embedding::of(&ranks, weight, Embeddings::table(&options, vocab_size)))
        }
    };
    let (of_first, own) = (words.clone(), options.clone());
    let first = LayerSpec::new("embed", move |layer| {
        let embeddings = Embeddings::new(of_first(layer)?, &layer.root(), &own);
        Ok(Box::new(First { embeddings, dropout: own.dropout }))
    });
    // Costs are products for each token.
    list.push(first.cost(size as f64).names_masks());
    for index in 0..options.num_hidden_layers {
        let (ranks, own) = (ranks.clone(), options.clone());
        let spec = LayerSpec::new(format!("bert.encoder.layer.{index}"), move |layer| {
            let block = Layer::new(&ranks, &layer.path(), &own)?;
            Ok(Box::new(Middle { layer: OneBlock::new(block, index, own.checkpoint), dropout: own.dropout }))
        });
        let cost = size * (4 * size + 2 * inner + options.max_position_embeddings);
        list.push(spec.cost(cost as f64).names_masks());
    }
    let (ranks, own) = (ranks.clone(), options.clone());
    let last = LayerSpec::new("head", move |layer| {
        Ok(Box::new(Last(MaskedHead::new(&ranks, &words(layer)?, &layer.root(), &own)?)))
    });
    // About one word in seven is masked.
    let cost = size * (size + vocab_size as usize) / 7;
    list.push(last.cost(cost as f64).names_masks());
    list.tie(WORDS, &["embed", "head"]);
    Ok(list)
}

struct First {
    embeddings: Embeddings,
    dropout: f64,
}

struct Middle {
    layer: OneBlock<Layer>,
    dropout: f64,
}

struct Last(MaskedHead);

fn dropout(p: f64, mode: Mode) -> f64 {
    if mode.is_train() { p } else { 0.0 }
}

impl PipelineLayer for First {
    fn forward(&self, xs: Boundary, mode: Mode) -> Result<Boundary, LayerError> {
        let [tokens, types, places] = tensors_of(xs)?;
        let embedded = self.embeddings.forward(&tokens, &types, dropout(self.dropout, mode));
        Ok(vec![Texts::of(&tokens).rows.pack(&embedded), tokens, places])
    }
}

impl PipelineLayer for Middle {
    fn forward(&self, xs: Boundary, mode: Mode) -> Result<Boundary, LayerError> {
        let [rows, tokens, places] = tensors_of(xs)?;
        let rows = Texts::of(&tokens).through(&self.layer, &rows, dropout(self.dropout, mode));
        Ok(vec![rows, tokens, places])
    }
}

impl PipelineLayer for Last {
    fn forward(&self, xs: Boundary, _: Mode) -> Result<Boundary, LayerError> {
        let [rows, tokens, places] = tensors_of(xs)?;
        let states = Texts::of(&tokens).rows.unpack(&rows);
        Ok(vec![self.0.forward(&at_places(&states, &places)?)?.local().shallow_clone()])
    }
}

/// The number of layers of the list.
pub(crate) fn num_layers(num_hidden_layers: usize) -> usize {
    num_hidden_layers + 2
}
