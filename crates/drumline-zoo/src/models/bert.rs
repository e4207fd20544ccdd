//! BERT: an encoder that predicts the masked words of a text.
//!
//! ```text
//!   tokens, types ─▶ words + places + types ─▶ LayerNorm ─▶ num_hidden_layers × layer ─▶ states
//!   states at the masked places ─▶ dense, GELU, LayerNorm ─▶ head (the words' embedding again) ─▶ logits
//! ```
//! Tokens are i64 `[texts, places]`, padded with [`PAD`]. Tensors have the names and shapes of Hugging Face's
//! `BertForMaskedLM`: `bert.embeddings.word_embeddings.weight`, …, `cls.predictions.bias`.
//! [`mlm::weights`](crate::mlm::weights) reads its files.

mod embeddings;
mod head;
mod layer;
mod layers;
mod masked;

use drumline::data::Cause;
use drumline::trainer::{Mode, Model};
use tch::nn::{Init, Path};
use tch::{Kind, TchError, Tensor};

pub use layers::layers;
pub(crate) use layers::num_layers;
pub use masked::MaskedBatch;

use super::options::{check_dropout, check_heads, check_sizes};
use crate::config::section::section;
use crate::error::ZooError;
use crate::models::checkpointing::{Blocks, Checkpointing, OneBlock};
use crate::models::logits::Logits;
use crate::models::ranks::ModelRanks;
use crate::models::transformer::{Mask, Rows, hidden, ok, padding_mask};
use embeddings::Embeddings;
use head::MaskedHead;
use layer::Layer;

/// The padding token.
pub const PAD: i64 = 0;

/// The number of token types: first text and second text.
const NUM_TYPES: i64 = 2;
/// The standard deviation of BERT's initial weights.
const STDEV: f64 = 0.02;
/// The epsilon of layer norms.
const EPS: f64 = 1e-12;

section! {
    /// `MODEL`: sizes of a BERT, by Hugging Face's names. The default is BERT-small.
    BertOptions "MODEL" {
        /// Number of layers
        "NUM_HIDDEN_LAYERS" num_hidden_layers: usize = 4;
        /// Number of attention heads
        "NUM_ATTENTION_HEADS" num_attention_heads: usize = 8;
        /// Size of the hidden states
        "HIDDEN_SIZE" hidden_size: usize = 512;
        /// Size of the feed-forward layers
        "INTERMEDIATE_SIZE" intermediate_size: usize = 2048;
        /// Longest text, in tokens; longer ones are cut
        "MAX_POSITION_EMBEDDINGS" max_position_embeddings: usize = 512;
        /// Probability of dropout
        "DROPOUT" dropout: f64 = 0.1;
        /// Activation checkpointing: none, full, selective, offload, or N for every Nth layer
        "CHECKPOINT" checkpoint: Checkpointing = Checkpointing::None;
    }
}

impl BertOptions {
    /// Returns an error if the sizes do not define a valid model.
    pub fn check(&self) -> Result<(), ZooError> {
        let (size, heads) = (self.hidden_size as i64, self.num_attention_heads as i64);
        check_sizes(&[
            ("num_hidden_layers", self.num_hidden_layers as i64),
            ("num_attention_heads", heads),
            ("hidden_size", size),
            ("intermediate_size", self.intermediate_size as i64),
            ("max_position_embeddings", self.max_position_embeddings as i64),
        ])?;
        check_heads("hidden_size", size, heads)?;
        check_dropout(self.dropout)
    }
}

/// A BERT with the head that predicts masked words.
///
/// ```
/// use drumline_zoo::models::bert::{Bert, BertOptions};
/// use tch::nn::VarStore;
/// use tch::{Device, Tensor};
///
/// let store = VarStore::new(Device::Cpu);
/// let small = BertOptions { hidden_size: 16, intermediate_size: 32, ..Default::default() };
/// let model = Bert::new(&store.root(), &small, 30)?;
/// let tokens = Tensor::from_slice2(&[[2i64, 7, 29, 1], [2, 8, 1, 0]]);
/// assert_eq!(model.logits(&tokens, &tokens.zeros_like()).size(), [2, 4, 30]);
/// assert!(store.variables().contains_key("bert.encoder.layer.3.attention.self.query.weight"));
/// # Ok::<(), drumline_zoo::ZooError>(())
/// ```
#[derive(Debug)]
pub struct Bert {
    embeddings: Embeddings,
    layers: Blocks<Layer>,
    head: MaskedHead,
    dropout: f64,
}

impl Bert {
    /// Creates the model under `path` with BERT's initial weights.
    pub fn new(path: &Path<'_>, options: &BertOptions, vocab_size: i64) -> Result<Self, ZooError> {
        Self::on(&ModelRanks::default(), path, options, vocab_size)
    }

    /// Creates this rank's part of a model whose layers and vocabulary are cut among ranks of `tp`, with the initial weights
    /// of the whole.
    pub fn on(
        ranks: &ModelRanks,
        path: &Path<'_>,
        options: &BertOptions,
        vocab_size: i64,
    ) -> Result<Self, ZooError> {
        options.check()?;
        ranks.check_no_cp()?;
        let words = path / "bert" / "embeddings" / "word_embeddings";
        let words = Embeddings::words(ranks, words, options, vocab_size)?;
        let embeddings = Embeddings::new(words, path, options);
        let layer = |place| Layer::new(ranks, &(path / "bert" / "encoder" / "layer" / place), options);
        let layers = (0..options.num_hidden_layers as i64).map(layer).collect::<Result<Vec<_>, _>>()?;
        let layers = Blocks::new(layers, options.checkpoint)?;
        let head = MaskedHead::new(ranks, &embeddings.words, path, options)?;
        Ok(Self { embeddings, layers, head, dropout: options.dropout })
    }

    /// The logits of the token at each place `[texts, places, vocab_size]`. Those at padding have no meaning. Ranks
    /// that have parts of the model call it together.
    pub fn logits(&self, tokens: &Tensor, types: &Tensor) -> Tensor {
        let logits = self.head.forward(&self.states(tokens, types, 0.0));
        ok(logits.and_then(|logits| logits.whole()))
    }

    /// The outputs of the last layer `[texts, places, hidden_size]`.
    fn states(&self, tokens: &Tensor, types: &Tensor, p: f64) -> Tensor {
        let texts = Texts::of(tokens);
        let embedded = texts.rows.pack(&self.embeddings.forward(tokens, types, p));
        let states = self.layers.each().iter().fold(embedded, |xs, layer| texts.through(layer, &xs, p));
        texts.rows.unpack(&states)
    }
}

/// Which places of a batch hold words.
struct Texts {
    rows: Rows,
    /// What is added to the scores of attention.
    mask: Tensor,
}

impl Texts {
    fn of(tokens: &Tensor) -> Self {
        let hidden = hidden(tokens, PAD);
        Self { rows: Rows::seen(&hidden), mask: padding_mask(&hidden, Kind::Float) }
    }

    /// The rows after a layer.
    fn through(&self, layer: &OneBlock<Layer>, xs: &Tensor, p: f64) -> Tensor {
        let (rows, mask) = (self.rows.shared(), self.mask.shallow_clone());
        layer.forward(&[xs], move |layer, xs| layer.forward(&xs[0], &rows, Mask::Added(&mask), p))
    }
}

/// Computes the logits at the masked places only: `[masked places, vocab_size]`.
impl Model<MaskedBatch> for Bert {
    type Output = Logits;

    fn forward_batch(&self, batch: &MaskedBatch, mode: Mode) -> Result<Logits, Cause> {
        let p = if mode == Mode::Train { self.dropout } else { 0.0 };
        let states = self.states(&batch.tokens, &batch.types, p);
        Ok(self.head.forward(&at_places(&states, &batch.places)?)?)
    }
}

/// The states `[masked places, hidden_size]` of `[texts, places, hidden_size]`.
fn at_places(states: &Tensor, places: &Tensor) -> Result<Tensor, TchError> {
    states.f_flatten(0, 1)?.f_index_select(0, places)
}

fn init() -> Init {
    Init::Randn { mean: 0.0, stdev: STDEV }
}
