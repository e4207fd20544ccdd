//! A Transformer as a list of layers, for pipelines.
//!
//! ```text
//!   source, target, places ─▶ embed ─▶ rows of both, source, target, places ─▶ encoder.layers.0 ─▶ … ─▶ decoder.layers.0 ─▶ …
//!                                                                                        ─▶ generator ─▶ logits at the places
//! ```
//! Layers compute what [`Transformer`](super::Transformer) computes, of the same variables. The rows of the target pass all
//! encoder layers, and words travel with them, as they say which places are rows.

use drumline::engine::pipeline::{Boundary, Layer, LayerBuilder, LayerError, LayerList, LayerSpec, Mode};

use super::layer::{DecoderLayer, EncoderLayer};
use super::stack::{Encoded, decoded, decoder_masks, encoder_masks, ended, last_norm};
use super::{Embedding, LayerNorm, Rows, TransformerOptions};
use crate::error::ZooError;
use crate::models::checkpointing::OneBlock;
use crate::models::logits::OutputLayer;
use crate::models::net::tensors_of;
use crate::models::ranks::ModelRanks;

/// The variable of the first and of the last layer, if they share one.
const TARGET: &str = "tgt_embed.weight";

/// The model as a list of layers, of which a rank has all or its part. The first layer gets the source and the decoder's input,
/// both `[sentences, places]` and padded, and the places at which words are predicted; the last one returns their logits, of
/// this rank's classes.
pub fn layers(ranks: &ModelRanks, options: &TransformerOptions) -> Result<LayerList, ZooError> {
    options.check()?;
    ranks.check_no_cp()?;
    options.checkpoint.check(options.n_layers as usize)?;
    let model = Shared { ranks: ranks.clone(), options: options.clone() };
    let TransformerOptions { n_layers, d_model, d_inner_hid, tgt_vocab, .. } = *options;
    let feed_forward = 2 * d_model * d_inner_hid;
    let mut list = LayerList::default();
    // Costs are products for each word.
    let mut push = |name: String, cost: i64, build: Build| {
        let model = model.clone();
        list.push(LayerSpec::new(name, move |layer| build(&model, layer)).cost(cost as f64).names_masks());
    };
    push("embed".to_owned(), d_model, Box::new(Shared::first));
    for index in 0..n_layers {
        let build = move |model: &Shared, layer: &LayerBuilder<'_>| model.encoder(layer, index);
        push(format!("encoder.layers.{index}"), 4 * d_model * d_model + feed_forward, Box::new(build));
    }
    for index in 0..n_layers {
        let build = move |model: &Shared, layer: &LayerBuilder<'_>| model.decoder(layer, index);
        push(format!("decoder.layers.{index}"), 8 * d_model * d_model + feed_forward, Box::new(build));
    }
    push("generator".to_owned(), d_model * tgt_vocab, Box::new(Shared::last));
    if options.proj_share_weight {
        list.tie(TARGET, &["embed", "generator"]);
    }
    Ok(list)
}

type Built = Result<Box<dyn Layer>, LayerError>;
type Build = Box<dyn Fn(&Shared, &LayerBuilder<'_>) -> Built + Send + Sync>;

/// What all layers know.
#[derive(Debug, Clone)]
struct Shared {
    ranks: ModelRanks,
    options: TransformerOptions,
}

impl Shared {
    /// The embedding of the target.
    fn target(&self, layer: &LayerBuilder<'_>) -> Result<Embedding, LayerError> {
        let Self { ranks, options } = self;
        let TransformerOptions { tgt_vocab, proj_share_weight, .. } = *options;
        if !proj_share_weight {
            return Ok(options.embedding(ranks, &(layer.root() / "tgt_embed"), tgt_vocab)?);
        }
        let weight = layer.tied(TARGET, |path, _| Ok(options.embedding(ranks, path, tgt_vocab)?.weight))?;
        Ok(Embedding::of(ranks, weight, options.table(tgt_vocab)))
    }

    fn first(&self, layer: &LayerBuilder<'_>) -> Built {
        let (target, Self { ranks, options }) = (self.target(layer)?, self);
        let source = if options.share_embeddings {
            target.shared()
        } else {
            options.embedding(ranks, &(layer.root() / "src_embed"), options.src_vocab)?
        };
        Ok(Box::new(First { source, target, model: self.clone() }))
    }

    /// Whether the norm of a stack follows this layer.
    fn is_last(&self, index: i64) -> bool {
        index + 1 == self.options.n_layers
    }

    fn encoder(&self, layer: &LayerBuilder<'_>, index: i64) -> Built {
        let shape = self.options.stack().layer;
        let block = EncoderLayer::new(&self.ranks, &layer.path(), &shape)?;
        let block = OneBlock::new(block, index as usize, self.options.checkpoint);
        let norm = self.is_last(index).then(|| last_norm(&(layer.root() / "encoder"), &shape)).flatten();
        Ok(Box::new(Encoding { block, norm, model: self.clone() }))
    }

    fn decoder(&self, layer: &LayerBuilder<'_>, index: i64) -> Built {
        let shape = self.options.stack().layer;
        let block = DecoderLayer::new(&self.ranks, &layer.path(), &shape)?;
        let block = OneBlock::new(block, index as usize, self.options.checkpoint);
        let norm = self.is_last(index).then(|| last_norm(&(layer.root() / "decoder"), &shape)).flatten();
        Ok(Box::new(Decoding { block, norm, model: self.clone() }))
    }

    fn last(&self, layer: &LayerBuilder<'_>) -> Built {
        let Self { ranks, options } = self;
        let shared = options.proj_share_weight.then(|| self.target(layer)).transpose()?;
        let generator = options.generator(ranks, &layer.root(), shared.map(|target| target.weight))?;
        Ok(Box::new(Last(generator)))
    }

    fn dropout(&self, mode: Mode) -> f64 {
        if mode.is_train() { self.options.dropout } else { 0.0 }
    }
}

struct First {
    source: Embedding,
    target: Embedding,
    model: Shared,
}

struct Encoding {
    block: OneBlock<EncoderLayer>,
    norm: Option<LayerNorm>,
    model: Shared,
}

struct Decoding {
    block: OneBlock<DecoderLayer>,
    norm: Option<LayerNorm>,
    model: Shared,
}

struct Last(OutputLayer);

impl Layer for First {
    fn forward(&self, xs: Boundary, mode: Mode) -> Result<Boundary, LayerError> {
        let [source, target, places] = tensors_of(xs)?;
        let (p, pad) = (self.model.dropout(mode), self.model.options.pad);
        // In this order, as dropouts are counted.
        let encoded = Encoded::embedded(&self.source.placed(&source, 0, p), &source, pad);
        let rows = Rows::at(&places, &target).pack(&self.target.placed(&target, 0, p));
        Ok(vec![encoded.states().shallow_clone(), rows, source, target, places])
    }
}

impl Layer for Encoding {
    fn forward(&self, xs: Boundary, mode: Mode) -> Result<Boundary, LayerError> {
        let _masks = encoder_masks();
        let [states, rows, source, target, places] = tensors_of(xs)?;
        let encoded = Encoded::of_rows(states, &source, self.model.options.pad);
        let encoded = encoded.through(&self.block, self.model.dropout(mode)).ended(self.norm.as_ref());
        Ok(vec![encoded.states().shallow_clone(), rows, source, target, places])
    }
}

impl Layer for Decoding {
    fn forward(&self, xs: Boundary, mode: Mode) -> Result<Boundary, LayerError> {
        let _masks = decoder_masks();
        let [states, rows, source, target, places] = tensors_of(xs)?;
        let encoded = Encoded::of_rows(states.shallow_clone(), &source, self.model.options.pad);
        let at = Rows::at(&places, &target);
        let rows = decoded(&self.block, &rows, &at, &encoded, self.model.dropout(mode));
        Ok(vec![states, ended(rows, self.norm.as_ref()), source, target, places])
    }
}

impl Layer for Last {
    fn forward(&self, xs: Boundary, _: Mode) -> Result<Boundary, LayerError> {
        let [_, rows, _, target, places] = tensors_of(xs)?;
        let words = Rows::at(&places, &target).at_places(rows, &places);
        Ok(vec![self.0.forward(&words)?.local().shallow_clone()])
    }
}

/// The number of layers of the list.
pub(crate) fn num_layers(n_layers: usize) -> usize {
    2 * n_layers + 2
}
