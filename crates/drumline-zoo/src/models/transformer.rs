//! The encoder-decoder Transformer of "Attention is all you need", for translation.
//!
//! ```text
//!   source ids ─▶ src_embed + waves ─▶ encoder ─▶ Memory ─┐
//!   target ids ─▶ tgt_embed + waves ──────────────────────┴▶ decoder ─▶ generator ─▶ logits
//! ```
//! Ids are i64 `[sentences, places]`, padded. Tensors have the names of PyTorch's `nn.TransformerEncoder` (as
//! `encoder`) and `nn.TransformerDecoder` (as `decoder`), and `src_embed.weight`, `tgt_embed.weight` and
//! `generator.weight`. Shared embeddings have only the name `tgt_embed.weight`. [`weights`](crate::weights) reads and
//! writes them.
//!
//! Read in this order: `rows`, `attention`, `layer`, `stack`, `embedding`, `pairs`, `layers`. Decoding token by token is in
//! [`decode`](crate::decode).

mod attention;
mod embedding;
mod layer;
mod layers;
mod linear;
mod pairs;
mod rows;
mod stack;

use drumline::data::Cause;
use drumline::engine::tensor::{Keeps, Variable};
use drumline::trainer::{Mode, Model};
use tch::Tensor;
use tch::nn::Path;

pub use layer::NormPlace;
pub use layers::layers;
pub(crate) use layers::num_layers;
pub use pairs::{Pairs, Specials, padded};
pub use stack::Memory;

pub(crate) use attention::{
    KeysValues, Mask, Sources, attend, attend_with, hidden, joined, padding_mask, split,
};
pub(crate) use embedding::{Embedding, EmbeddingShape};
pub(crate) use layer::LayerShape;
pub(crate) use linear::{By, CutLinear, LayerNorm, Linear, ok};
pub(crate) use rows::Rows;
pub(crate) use stack::{DecoderStack, Encoder, StackShape};

use stack::Encoded;

use crate::error::ZooError;
use crate::models::checkpointing::Checkpointing;
use crate::models::logits::{Classes, Logits, OutputLayer};
use crate::models::options::{check_dropout, check_heads, check_sizes};
use crate::models::ranks::ModelRanks;

/// The sizes of a Transformer, with NJUNMT's names. The default is the base model.
#[derive(Debug, Clone, PartialEq)]
pub struct TransformerOptions {
    /// Number of encoder layers, and of decoder layers.
    pub n_layers: i64,
    /// Number of attention heads.
    pub n_head: i64,
    /// Size of a word vector; must equal `d_model`.
    pub d_word_vec: i64,
    /// Size of the hidden states.
    pub d_model: i64,
    /// Size of the feed-forward layers.
    pub d_inner_hid: i64,
    /// Probability of dropout, in all places.
    pub dropout: f64,
    /// Whether the output layer shares the target embedding.
    pub proj_share_weight: bool,
    /// Whether source and target share one embedding.
    pub share_embeddings: bool,
    /// Where the layers' norms are.
    pub norm: NormPlace,
    /// Size of the source vocabulary.
    pub src_vocab: i64,
    /// Size of the target vocabulary.
    pub tgt_vocab: i64,
    /// The padding id.
    pub pad: i64,
    /// What is kept of layers for backward.
    pub checkpoint: Checkpointing,
}

impl Default for TransformerOptions {
    fn default() -> Self {
        Self {
            n_layers: 6,
            n_head: 8,
            d_word_vec: 512,
            d_model: 512,
            d_inner_hid: 2048,
            dropout: 0.1,
            proj_share_weight: true,
            share_embeddings: false,
            norm: NormPlace::After,
            src_vocab: 30000,
            tgt_vocab: 30000,
            pad: 0,
            checkpoint: Checkpointing::None,
        }
    }
}

impl TransformerOptions {
    /// Returns an error if the sizes do not define a valid model.
    pub fn check(&self) -> Result<(), ZooError> {
        let refused = |what: String, fix: String| Err(ZooError::Unsuitable { what, fix });
        let Self { n_layers, n_head, d_word_vec, d_model, d_inner_hid, dropout, .. } = *self;
        let Self { src_vocab, tgt_vocab, pad, .. } = *self;
        check_sizes(&[
            ("n_layers", n_layers),
            ("n_head", n_head),
            ("d_model", d_model),
            ("d_inner_hid", d_inner_hid),
            ("src_vocab", src_vocab),
            ("tgt_vocab", tgt_vocab),
        ])?;
        if d_word_vec != d_model {
            return refused(
                format!("d_word_vec is {d_word_vec}, but d_model {d_model}"),
                "the same for both".into(),
            );
        }
        check_heads("d_model", d_model, n_head)?;
        check_dropout(dropout)?;
        if !(0..src_vocab.min(tgt_vocab)).contains(&pad) {
            return refused(
                format!("the id of padding is {pad}, of {src_vocab} and {tgt_vocab} words"),
                "0".into(),
            );
        }
        if self.share_embeddings && src_vocab != tgt_vocab {
            let what =
                format!("source and target share word vectors, but have {src_vocab} and {tgt_vocab} words");
            return refused(what, "one vocabulary for both".into());
        }
        Ok(())
    }

    fn table(&self, vocab: i64) -> EmbeddingShape {
        EmbeddingShape { vocab, size: self.d_model, pad: self.pad }
    }

    /// An embedding of so many words.
    fn embedding(&self, ranks: &ModelRanks, path: &Path<'_>, vocab: i64) -> Result<Embedding, ZooError> {
        // The standard deviation makes the scaled vectors, and the logits of a shared embedding, about 1.
        Embedding::new(ranks, path, self.table(vocab), (self.d_model as f64).powf(-0.5))
    }

    /// The output layer `[tgt_vocab, d_model]`, without bias. Its weight is `shared` with the target embedding, or its own.
    fn generator(
        &self,
        ranks: &ModelRanks,
        path: &Path<'_>,
        shared: Option<Tensor>,
    ) -> Result<OutputLayer, ZooError> {
        let Self { d_model, tgt_vocab, .. } = *self;
        let own = Variable { name: "weight", size: &[tgt_vocab, d_model], keeps: Keeps::Along(0) };
        let weight = match shared {
            Some(weight) => weight,
            None => ranks.drawn(&(path / "generator"), own, Linear::xavier(d_model, tgt_vocab))?,
        };
        Ok(OutputLayer { weight, bias: None, classes: self.classes(ranks) })
    }

    /// The target words.
    pub(crate) fn classes(&self, ranks: &ModelRanks) -> Classes {
        Classes { count: self.tgt_vocab, tp: ranks.tp.clone() }
    }

    fn stack(&self) -> StackShape {
        let Self { n_layers, d_model, n_head, d_inner_hid, norm, checkpoint, .. } = *self;
        StackShape { n_layers, layer: LayerShape { d_model, n_head, d_inner_hid, norm }, checkpoint }
    }
}

/// A Transformer.
///
/// ```
/// use drumline_zoo::models::transformer::{Transformer, TransformerOptions};
/// use tch::nn::VarStore;
/// use tch::{Device, Tensor};
///
/// let store = VarStore::new(Device::Cpu);
/// let (d_word_vec, d_model, src_vocab, tgt_vocab) = (16, 16, 11, 13);
/// let small = TransformerOptions {
///     n_layers: 2, n_head: 4, d_word_vec, d_model, d_inner_hid: 32, src_vocab, tgt_vocab, ..Default::default()
/// };
/// let model = Transformer::new(&store.root(), &small)?;
/// // Two sentences of 3 and 2 words, and what their translations begin with.
/// let source = Tensor::from_slice2(&[[4i64, 5, 6], [7, 8, 0]]);
/// let target = Tensor::from_slice2(&[[3i64, 9], [3, 10]]);
/// assert_eq!(model.forward(&source, &target, false).size(), [2, 2, 13]);
/// assert!(store.variables().contains_key("decoder.layers.1.multihead_attn.in_proj_weight"));
/// # Ok::<(), drumline_zoo::ZooError>(())
/// ```
#[derive(Debug)]
pub struct Transformer {
    src_embed: Embedding,
    tgt_embed: Embedding,
    encoder: Encoder,
    decoder: DecoderStack,
    generator: OutputLayer,
    options: TransformerOptions,
}

impl Transformer {
    /// Creates the model under `path`.
    pub fn new(path: &Path<'_>, options: &TransformerOptions) -> Result<Self, ZooError> {
        Self::on(&ModelRanks::default(), path, options)
    }

    /// Creates this rank's part of a model whose layers and vocabularies are cut among ranks of `tp`, with the initial weights
    /// of the whole.
    pub fn on(ranks: &ModelRanks, path: &Path<'_>, options: &TransformerOptions) -> Result<Self, ZooError> {
        options.check()?;
        ranks.check_no_cp()?;
        let TransformerOptions { tgt_vocab, src_vocab, .. } = *options;
        let tgt_embed = options.embedding(ranks, &(path / "tgt_embed"), tgt_vocab)?;
        let src_embed = if options.share_embeddings {
            tgt_embed.shared()
        } else {
            options.embedding(ranks, &(path / "src_embed"), src_vocab)?
        };
        let encoder = Encoder::new(ranks, &(path / "encoder"), options.stack())?;
        let decoder = DecoderStack::new(ranks, &(path / "decoder"), options.stack())?;
        let shared = options.proj_share_weight.then(|| tgt_embed.weight.shallow_clone());
        let generator = options.generator(ranks, path, shared)?;
        Ok(Self { src_embed, tgt_embed, encoder, decoder, generator, options: options.clone() })
    }

    /// The options that the model was created with.
    pub fn options(&self) -> &TransformerOptions {
        &self.options
    }

    /// Encodes source sentences for the decoder.
    pub fn encode(&self, source: &Tensor) -> Memory {
        self.encode_with(source, 0.0).into_memory()
    }

    /// The logits of each next target word `[sentences, places, tgt_vocab]`. Ranks that have parts of the model call it
    /// together.
    pub fn forward(&self, source: &Tensor, target: &Tensor, train: bool) -> Tensor {
        let (size, p) = (target.size(), if train { self.options.dropout } else { 0.0 });
        let rows = Rows::all(size[0], size[1]);
        rows.unpack(&self.generate(&self.decoded(source, target, &rows, p)))
    }

    /// The decoder's output for the rows of `target`.
    fn decoded(&self, source: &Tensor, target: &Tensor, rows: &Rows, p: f64) -> Tensor {
        let source = self.encode_with(source, p);
        let xs = rows.pack(&self.tgt_embed.placed(target, 0, p));
        self.decoder.forward(xs, rows, &source, p)
    }

    fn encode_with(&self, source: &Tensor, p: f64) -> Encoded {
        let xs = self.src_embed.placed(source, 0, p);
        self.encoder.forward(&xs, source, self.options.pad, p)
    }

    /// The logits of all words, for any number of ranks.
    fn generate(&self, states: &Tensor) -> Tensor {
        ok(self.generator.forward(states).and_then(|logits| logits.whole()))
    }

    /// The source keys and values for each decoder layer.
    pub(crate) fn keys_values(&self, memory: &Memory) -> Vec<KeysValues> {
        self.decoder.keys_values(memory)
    }

    /// The logits of the next word of each row, given its last word, which is at `place`.
    pub(crate) fn next(
        &self,
        words: &Tensor,
        place: i64,
        sources: Sources<'_>,
        past: impl FnMut(usize, KeysValues) -> KeysValues,
    ) -> Tensor {
        let xs = self.tgt_embed.placed(&words.unsqueeze(1), place, 0.0).squeeze_dim(1);
        self.generate(&self.decoder.next(xs, sources, past))
    }
}

/// Computes the logits of all target words `[words, tgt_vocab]`, without padding.
impl Model<Pairs> for Transformer {
    type Output = Logits;

    fn forward_batch(&self, batch: &Pairs, mode: Mode) -> Result<Logits, Cause> {
        let p = if mode == Mode::Train { self.options.dropout } else { 0.0 };
        let rows = Rows::at(&batch.places, &batch.target_in);
        let states = self.decoded(&batch.source, &batch.target_in, &rows, p);
        Ok(self.generator.forward(&rows.at_places(states, &batch.places))?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Device;
    use tch::nn::VarStore;

    fn small() -> TransformerOptions {
        let (d_word_vec, d_model, src_vocab, tgt_vocab) = (8, 8, 12, 12);
        TransformerOptions {
            n_layers: 2,
            n_head: 2,
            d_word_vec,
            d_model,
            d_inner_hid: 16,
            src_vocab,
            tgt_vocab,
            ..Default::default()
        }
    }

    #[test]
    fn invalid_options_are_refused() {
        let refused = |change: fn(&mut TransformerOptions)| {
            let mut options = small();
            change(&mut options);
            let store = VarStore::new(Device::Cpu);
            let error = Transformer::new(&store.root(), &options).unwrap_err().to_string();
            assert!(store.is_empty());
            error
        };
        assert!(
            refused(|o| o.n_head = 3).starts_with("d_model 8 cannot be split among 3 heads; try a multiple")
        );
        assert_eq!(refused(|o| o.d_word_vec = 4), "d_word_vec is 4, but d_model 8; try the same for both");
        assert_eq!(refused(|o| o.n_layers = 0), "n_layers is 0; try 1 or more");
        assert_eq!(refused(|o| o.dropout = 1.0), "dropout is 1; try 0 to below 1");
        assert!(refused(|o| o.pad = 12).starts_with("the id of padding is 12"));
        assert!(refused(|o| { (o.src_vocab, o.share_embeddings) = (11, true) }).contains("11 and 12 words"));
    }

    #[test]
    fn shared_tensors_are_stored_once() {
        let names = |options: &TransformerOptions| {
            let store = VarStore::new(Device::Cpu);
            Transformer::new(&store.root(), options).unwrap();
            let mut names: Vec<_> = store.variables().into_keys().collect();
            names.retain(|name| !name.contains("layers"));
            names.sort();
            names
        };
        let apart = TransformerOptions { proj_share_weight: false, norm: NormPlace::Before, ..small() };
        let all = [
            "decoder.norm.bias",
            "decoder.norm.weight",
            "encoder.norm.bias",
            "encoder.norm.weight",
            "generator.weight",
        ];
        assert_eq!(names(&apart), [&all[..], &["src_embed.weight", "tgt_embed.weight"]].concat());
        assert_eq!(names(&TransformerOptions { share_embeddings: true, ..small() }), ["tgt_embed.weight"]);
    }

    #[test]
    fn padding_and_later_words_have_no_effect() {
        let store = VarStore::new(Device::Cpu);
        let model = Transformer::new(&store.root(), &small()).unwrap();
        let source = Tensor::from_slice2(&[[4i64, 5, 6]]);
        let target = Tensor::from_slice2(&[[3i64, 7, 8]]);
        let logits = model.forward(&source, &target, false);
        let longer = model.forward(
            &Tensor::from_slice2(&[[4i64, 5, 6, 0, 0]]),
            &Tensor::from_slice2(&[[3i64, 7, 8, 9]]),
            false,
        );
        assert!(logits.allclose(&longer.narrow(1, 0, 3), 1e-5, 1e-6, false));
        assert!(!logits.allclose(&model.forward(&source, &target, true), 1e-5, 1e-6, false), "dropout drops");
    }
}
