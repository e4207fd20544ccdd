//! Text models: one class per sentence, or a tag per word.
//!
//! ```text
//!   ids ─▶ embed ─┬▶ BiLSTM: last states of both directions ──┬▶ fc ─▶ logits of a sentence (TextClassifier)
//!                 └▶ Transformer's encoder: mean or first word┘
//!                 └▶ either: the states of all words ─────────▶ fc ─▶ logits of each word (TextTagger)
//! ```
//! Ids are i64 `[sentences, places]`, padded at the end. Both models are `tch` modules: a trainer takes them with
//! batches of (ids, classes) or (ids, tags). `CrossEntropy` ignores the tag of padding.

mod bilstm;

use tch::Tensor;
use tch::nn::{ModuleT, Path};

use super::checkpointing::Checkpointing;
use super::dropout::dropout;
use super::transformer::{Embedding, EmbeddingShape, Encoder, LayerShape, Linear, NormPlace, StackShape};
use crate::error::ZooError;
use crate::models::options::{check_dropout, check_heads, check_sizes};
use crate::models::ranks::ModelRanks;
use bilstm::BiLstm;

/// How the states of words become one vector per sentence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pool {
    /// The mean over all words.
    Mean,
    /// The first word, which should be the same token in all sentences.
    First,
}

/// The network that encodes words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TextNet {
    /// A bidirectional LSTM.
    BiLstm {
        /// Number of layers.
        n_layers: i64,
        /// Size of the hidden state in each direction.
        d_hidden: i64,
    },
    /// A Transformer encoder.
    Transformer {
        /// Number of layers.
        n_layers: i64,
        /// Number of attention heads.
        n_head: i64,
        /// Size of the feed-forward layers.
        d_inner_hid: i64,
        /// How sentences are pooled.
        pool: Pool,
    },
}

/// The sizes of a text model.
#[derive(Debug, Clone, PartialEq)]
pub struct TextOptions {
    /// The network that encodes words.
    pub net: TextNet,
    /// Number of words in the vocabulary.
    pub vocab: i64,
    /// The padding id.
    pub pad: i64,
    /// Size of a word vector.
    pub d_word_vec: i64,
    /// Number of classes or tags.
    pub num_classes: i64,
    /// Probability of dropout, in all places.
    pub dropout: f64,
    /// What is kept of a Transformer's layers for backward.
    pub checkpoint: Checkpointing,
}

impl Default for TextOptions {
    fn default() -> Self {
        Self {
            net: TextNet::BiLstm { n_layers: 1, d_hidden: 128 },
            vocab: 30000,
            pad: 0,
            d_word_vec: 128,
            num_classes: 2,
            dropout: 0.1,
            checkpoint: Checkpointing::None,
        }
    }
}

impl TextOptions {
    /// Returns an error if the sizes do not define a valid model.
    pub fn check(&self) -> Result<(), ZooError> {
        let Self { vocab, pad, d_word_vec, num_classes, dropout, .. } = *self;
        let (n_layers, width, name) = match self.net {
            TextNet::BiLstm { n_layers, d_hidden } => (n_layers, d_hidden, "d_hidden"),
            TextNet::Transformer { n_layers, d_inner_hid, .. } => (n_layers, d_inner_hid, "d_inner_hid"),
        };
        check_sizes(&[
            ("vocab", vocab),
            ("d_word_vec", d_word_vec),
            ("num_classes", num_classes),
            ("n_layers", n_layers),
            (name, width),
        ])?;
        if !(0..vocab).contains(&pad) {
            let what = format!("the id of padding is {pad}, of {vocab} words");
            return Err(ZooError::Unsuitable { what, fix: "0".to_owned() });
        }
        check_dropout(dropout)?;
        match self.net {
            TextNet::Transformer { n_head, .. } => check_heads("d_word_vec", d_word_vec, n_head),
            TextNet::BiLstm { .. } => self.checkpoint.check_no_blocks("bilstm"),
        }
    }
}

/// The word embedding and the encoder.
#[derive(Debug)]
struct Reader {
    embed: Embedding,
    net: Net,
    options: TextOptions,
}

#[derive(Debug)]
enum Net {
    BiLstm(BiLstm),
    Transformer(Encoder, Pool),
}

impl Reader {
    fn new(path: &Path<'_>, options: &TextOptions) -> Result<Self, ZooError> {
        options.check()?;
        let TextOptions { vocab, pad, d_word_vec: size, checkpoint, .. } = *options;
        let shape = EmbeddingShape { vocab, size, pad };
        let (net, stdev) = match options.net {
            TextNet::BiLstm { n_layers, d_hidden } => {
                (Net::BiLstm(BiLstm::new(path / "lstm", size, d_hidden, n_layers)), 1.0)
            }
            TextNet::Transformer { n_layers, n_head, d_inner_hid, pool } => {
                let layer = LayerShape { d_model: size, n_head, d_inner_hid, norm: NormPlace::After };
                let encoder = Encoder::new(
                    &ModelRanks::default(),
                    &(path / "encoder"),
                    StackShape { n_layers, layer, checkpoint },
                )?;
                (Net::Transformer(encoder, pool), (size as f64).powf(-0.5))
            }
        };
        let embed = Embedding::new(&ModelRanks::default(), path / "embed", shape, stdev)?;
        Ok(Self { embed, net, options: options.clone() })
    }

    /// The size of the output for a word, and for a sentence.
    fn size(&self) -> i64 {
        match self.options.net {
            TextNet::BiLstm { d_hidden, .. } => 2 * d_hidden,
            TextNet::Transformer { .. } => self.options.d_word_vec,
        }
    }

    /// The states of words `[sentences, places, size]`.
    fn words(&self, tokens: &Tensor, p: f64) -> Tensor {
        match &self.net {
            Net::BiLstm(lstm) => lstm.forward(&self.embedded(tokens, p), &self.lengths(tokens), p).words,
            Net::Transformer(encoder, _) => self.encoded(encoder, tokens, p),
        }
    }

    /// The pooled states `[sentences, size]`.
    fn sentences(&self, tokens: &Tensor, p: f64) -> Tensor {
        match &self.net {
            Net::BiLstm(lstm) => lstm.forward(&self.embedded(tokens, p), &self.lengths(tokens), p).last,
            Net::Transformer(encoder, Pool::First) => self.encoded(encoder, tokens, p).select(1, 0),
            Net::Transformer(encoder, Pool::Mean) => {
                let states = self.encoded(encoder, tokens, p);
                let there = tokens.ne(self.options.pad).to_kind(states.kind()).unsqueeze(1);
                let sums = there.matmul(&states).squeeze_dim(1);
                sums / self.lengths(tokens).unsqueeze(1)
            }
        }
    }

    fn embedded(&self, tokens: &Tensor, p: f64) -> Tensor {
        dropout(&self.embed.rows(tokens), p)
    }

    fn encoded(&self, encoder: &Encoder, tokens: &Tensor, p: f64) -> Tensor {
        let xs = self.embed.placed(tokens, 0, p);
        encoder.forward(&xs, tokens, self.options.pad, p).into_memory().states
    }

    /// The number of words in each sentence. An empty sentence counts as one padding word.
    fn lengths(&self, tokens: &Tensor) -> Tensor {
        tokens.ne(self.options.pad).sum_dim_intlist(1, false, tch::Kind::Int64).clamp_min(1)
    }
}

/// Predicts one class for each sentence.
///
/// ```
/// use drumline_zoo::models::text::{Pool, TextClassifier, TextNet, TextOptions};
/// use tch::nn::{ModuleT, VarStore};
/// use tch::{Device, Tensor};
///
/// let ids = Tensor::from_slice2(&[[4i64, 5, 6], [7, 8, 0]]);
/// let encoder = TextNet::Transformer { n_layers: 2, n_head: 4, d_inner_hid: 32, pool: Pool::Mean };
/// for net in [TextNet::BiLstm { n_layers: 1, d_hidden: 24 }, encoder] {
///     let store = VarStore::new(Device::Cpu);
///     let options = TextOptions { net, vocab: 20, d_word_vec: 16, num_classes: 5, ..Default::default() };
///     let model = TextClassifier::new(&store.root(), &options)?;
///     assert_eq!(model.forward_t(&ids, false).size(), [2, 5]);
/// }
/// # Ok::<(), drumline_zoo::ZooError>(())
/// ```
#[derive(Debug)]
pub struct TextClassifier {
    reader: Reader,
    fc: Linear,
}

impl TextClassifier {
    /// Creates the model under `path`.
    pub fn new(path: &Path<'_>, options: &TextOptions) -> Result<Self, ZooError> {
        let reader = Reader::new(path, options)?;
        let fc = Linear::new(path / "fc", reader.size(), options.num_classes);
        Ok(Self { reader, fc })
    }
}

impl ModuleT for TextClassifier {
    fn forward_t(&self, tokens: &Tensor, train: bool) -> Tensor {
        let p = if train { self.reader.options.dropout } else { 0.0 };
        self.fc.forward(&dropout(&self.reader.sentences(tokens, p), p))
    }
}

/// Predicts a tag for each word. Logits are `[sentences, places, tags]`.
///
/// ```
/// use drumline_zoo::models::text::{TextOptions, TextTagger};
/// use tch::nn::{ModuleT, VarStore};
/// use tch::{Device, Tensor};
///
/// let store = VarStore::new(Device::Cpu);
/// let options = TextOptions { vocab: 20, d_word_vec: 16, num_classes: 5, ..Default::default() };
/// let model = TextTagger::new(&store.root(), &options)?;
/// let ids = Tensor::from_slice2(&[[4i64, 5, 6], [7, 8, 0]]);
/// assert_eq!(model.forward_t(&ids, false).size(), [2, 3, 5]);
/// # Ok::<(), drumline_zoo::ZooError>(())
/// ```
#[derive(Debug)]
pub struct TextTagger {
    reader: Reader,
    fc: Linear,
}

impl TextTagger {
    /// Creates the model under `path`.
    pub fn new(path: &Path<'_>, options: &TextOptions) -> Result<Self, ZooError> {
        let reader = Reader::new(path, options)?;
        let fc = Linear::new(path / "fc", reader.size(), options.num_classes);
        Ok(Self { reader, fc })
    }
}

impl ModuleT for TextTagger {
    fn forward_t(&self, tokens: &Tensor, train: bool) -> Tensor {
        let p = if train { self.reader.options.dropout } else { 0.0 };
        self.fc.forward(&dropout(&self.reader.words(tokens, p), p))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Device;
    use tch::nn::VarStore;

    const NETS: [TextNet; 3] = [
        TextNet::BiLstm { n_layers: 2, d_hidden: 6 },
        TextNet::Transformer { n_layers: 2, n_head: 2, d_inner_hid: 16, pool: Pool::Mean },
        TextNet::Transformer { n_layers: 1, n_head: 4, d_inner_hid: 16, pool: Pool::First },
    ];

    #[test]
    fn padding_and_other_sentences_have_no_effect() {
        for net in NETS {
            let store = VarStore::new(Device::Cpu);
            let options =
                TextOptions { net, vocab: 20, d_word_vec: 8, num_classes: 3, ..TextOptions::default() };
            let classifier = TextClassifier::new(&(store.root() / "a"), &options).unwrap();
            let tagger = TextTagger::new(&(store.root() / "b"), &options).unwrap();
            let alone = Tensor::from_slice2(&[[4i64, 5]]);
            let among = Tensor::from_slice2(&[[0i64, 0, 0, 0], [4, 5, 0, 0], [6, 7, 8, 9]]);
            let close = |a: &Tensor, b: &Tensor| a.allclose(b, 1e-5, 1e-6, false);
            let classes = classifier.forward_t(&among, false);
            assert!(close(&classes.get(1), &classifier.forward_t(&alone, false).get(0)), "{net:?}");
            let tags = tagger.forward_t(&among, false);
            assert!(close(&tags.get(1).narrow(0, 0, 2), &tagger.forward_t(&alone, false).get(0)), "{net:?}");
            assert!(bool::try_from(classes.isfinite().all()).unwrap(), "an empty sentence gives no NaN");
            assert!(!close(&classes, &classifier.forward_t(&among, true)), "dropout drops: {net:?}");
        }
    }

    #[test]
    fn invalid_options_are_refused() {
        let refused = |change: fn(&mut TextOptions)| {
            let mut options = TextOptions::default();
            change(&mut options);
            let store = VarStore::new(Device::Cpu);
            TextTagger::new(&store.root(), &options).unwrap_err().to_string()
        };
        assert_eq!(refused(|o| o.vocab = 0), "vocab is 0; try 1 or more");
        assert_eq!(refused(|o| o.pad = -1), "the id of padding is -1, of 30000 words; try 0");
        let heads = refused(|o| {
            o.net = TextNet::Transformer { n_layers: 1, n_head: 3, d_inner_hid: 4, pool: Pool::Mean }
        });
        assert!(heads.starts_with("d_word_vec 128 cannot be split among 3 heads; try a multiple"), "{heads}");
    }
}
