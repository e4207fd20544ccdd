//! GPT-2: a decoder-only Transformer that predicts the next token at each place.
//!
//! ```text
//!   tokens ─▶ wte + wpe ─▶ n_layer × ( + attn(ln_1) , + mlp(ln_2) ) ─▶ ln_f ─▶ head (wte again) ─▶ logits
//!                                                                         └▶ loss, in chunks of the logits
//! ```
//! Tokens are i64 `[texts, places]`. Tensors have the names and layout of Hugging Face's `GPT2Model`: `wte.weight`,
//! `h.0.attn.c_attn.weight` (`[inputs, outputs]`), …; [`gpt::weights`](crate::gpt::weights) reads and writes its files.
//! The forward pass reads no tensor value on the host, and only shapes decide what it does, so it can be recorded as a
//! CUDA graph.
//!
//! A model may be cut among ranks ([`ModelRanks`]): parts of its layers, and of the places of its texts.
//!
//! Read in this order: `conv1d`, `embedding`, `attention`, `block`, `head`, `cache`, `cut`, `layers`.

mod attention;
mod block;
mod cache;
mod conv1d;
mod cut;
mod embedding;
mod head;
mod layers;

use drumline::data::Cause;
use drumline::trainer::{Mode, Model};
use tch::nn::Path;
use tch::{Device, Tensor};

pub use cache::KvCache;
pub use head::{Projection, linear_cross_entropy};
pub use layers::layers;
pub(crate) use layers::num_layers;

use block::{Block, Residual};
use cut::Pass;
use embedding::GptEmbedding;
use head::Head;

use crate::error::ZooError;
use crate::models::checkpointing::{Blocks, Checkpointing, masks_of};
use crate::models::options::{check_dropout, check_heads, check_sizes};
use crate::models::ranks::ModelRanks;
use crate::models::transformer::LayerNorm;

/// The standard deviation of GPT-2's initial weights.
const STDEV: f64 = 0.02;

/// The sizes of a GPT-2, with Hugging Face's names. The default is the smallest of OpenAI's models, with 124 million
/// parameters.
#[derive(Debug, Clone, PartialEq)]
pub struct GptOptions {
    /// Number of blocks.
    pub n_layer: i64,
    /// Number of attention heads.
    pub n_head: i64,
    /// Size of the hidden states.
    pub n_embd: i64,
    /// Longest text, in tokens.
    pub n_positions: i64,
    /// Number of tokens in the vocabulary.
    pub vocab_size: i64,
    /// The rows of the embedding are padded to a multiple of this, which is faster on GPUs. Padding rows are never
    /// predicted.
    pub vocab_multiple: i64,
    /// Probability of dropout, in all places.
    pub dropout: f64,
    /// Number of chunks in which the loss of a batch is computed. With 1, all logits exist at once.
    pub loss_chunks: i64,
    /// What is kept of blocks for backward.
    pub checkpoint: Checkpointing,
}

impl Default for GptOptions {
    fn default() -> Self {
        Self {
            n_layer: 12,
            n_head: 12,
            n_embd: 768,
            n_positions: 1024,
            vocab_size: 50257,
            vocab_multiple: 1,
            dropout: 0.0,
            loss_chunks: 1,
            checkpoint: Checkpointing::None,
        }
    }
}

impl GptOptions {
    /// Returns an error if the sizes do not define a valid model.
    pub fn check(&self) -> Result<(), ZooError> {
        check_sizes(&[
            ("n_layer", self.n_layer),
            ("n_head", self.n_head),
            ("n_embd", self.n_embd),
            ("n_positions", self.n_positions),
            ("vocab_size", self.vocab_size),
            ("vocab_multiple", self.vocab_multiple),
            ("loss_chunks", self.loss_chunks),
        ])?;
        check_heads("n_embd", self.n_embd, self.n_head)?;
        check_dropout(self.dropout)
    }

    /// The same for a model that is cut among ranks.
    fn check_on(&self, ranks: &ModelRanks) -> Result<(), ZooError> {
        self.check()?;
        if ranks.cp.is_cut() && self.dropout > 0.0 {
            let what = format!("dropout is {}, which ring attention among ranks of cp has not", self.dropout);
            return Err(ZooError::Unsuitable { what, fix: "0".to_owned() });
        }
        Ok(())
    }

    /// The number of embedding rows, including padding rows.
    pub fn padded_vocab(&self) -> i64 {
        (self.vocab_size + self.vocab_multiple - 1) / self.vocab_multiple * self.vocab_multiple
    }
}

/// A GPT-2.
///
/// ```
/// use drumline_zoo::models::gpt::{Gpt, GptOptions};
/// use tch::nn::VarStore;
/// use tch::{Device, Tensor};
///
/// let store = VarStore::new(Device::Cpu);
/// let small = GptOptions { n_layer: 2, n_head: 2, n_embd: 16, n_positions: 8, vocab_size: 30, ..Default::default() };
/// let model = Gpt::new(&store.root(), &small)?;
/// let tokens = Tensor::from_slice2(&[[4i64, 5, 6], [7, 8, 0]]);
/// assert_eq!(model.logits(&tokens).size(), [2, 3, 30]);
/// assert_eq!(store.variables()["h.1.attn.c_attn.weight"].size(), [16, 48]);
/// # Ok::<(), drumline_zoo::ZooError>(())
/// ```
#[derive(Debug)]
pub struct Gpt {
    embedding: GptEmbedding,
    blocks: Blocks<Block>,
    ln_f: LayerNorm,
    head: Head,
    options: GptOptions,
    ranks: ModelRanks,
}

impl Gpt {
    /// Creates the model under `path` with GPT-2's initial weights.
    pub fn new(path: &Path<'_>, options: &GptOptions) -> Result<Self, ZooError> {
        Self::on(&ModelRanks::default(), path, options)
    }

    /// Creates this rank's part of a model that is cut among ranks, with the initial weights of the whole. Such a model
    /// computes losses; text is generated by a whole one.
    pub fn on(ranks: &ModelRanks, path: &Path<'_>, options: &GptOptions) -> Result<Self, ZooError> {
        options.check_on(ranks)?;
        let &GptOptions { n_layer, n_embd, vocab_size, .. } = options;
        let embedding = GptEmbedding::new(ranks, path, options)?;
        let blocks = (0..n_layer).map(|layer| Block::new(ranks, &(path / "h" / layer), options));
        let blocks = Blocks::new(blocks.collect::<Result<Vec<_>, _>>()?, options.checkpoint)?;
        let ln_f = LayerNorm::new(path / "ln_f", n_embd);
        let head = Head::new(&embedding.wte, vocab_size);
        Ok(Self { embedding, blocks, ln_f, head, options: options.clone(), ranks: ranks.clone() })
    }

    /// The options that the model was created with.
    pub fn options(&self) -> &GptOptions {
        &self.options
    }

    /// The ranks among which the model is cut.
    pub fn ranks(&self) -> &ModelRanks {
        &self.ranks
    }

    /// The device of the weights.
    pub fn device(&self) -> Device {
        self.embedding.wte.device()
    }

    /// The logits of each next token `[texts, places, rows]`. Those of padding rows are so small that they are never
    /// sampled.
    ///
    /// # Panics
    ///
    /// If the model is cut among ranks.
    pub fn logits(&self, tokens: &Tensor) -> Tensor {
        self.assert_whole();
        self.head.logits(&self.states(tokens, 0.0))
    }

    /// The sum of the cross-entropies of all next tokens; with ranks along `cp`, of those at this rank's places.
    pub fn loss(&self, tokens: &Tensor, targets: &Tensor, mode: Mode) -> Result<Tensor, Cause> {
        let p = if mode == Mode::Train { self.options.dropout } else { 0.0 };
        if self.ranks.is_cut() {
            let pass = Pass::new(&self.ranks, tokens.size()[1], p);
            let embedded = pass.embedded(&self.embedding, &self.options, tokens)?;
            let xs = self.blocks.each().iter().try_fold(embedded, |xs, block| pass.through(block, &xs))?;
            return pass.loss(&self.ln_f, &self.head, &self.options, [&xs, targets]);
        }
        let states = self.states(tokens, p).f_flatten(0, 1)?;
        Ok(self.head.loss(&states, &targets.f_reshape([-1])?, self.options.loss_chunks)?)
    }

    /// Panics unless this rank has all of the model and of its texts.
    fn assert_whole(&self) {
        let cut = [("tp", self.ranks.tp.is_cut()), ("cp", self.ranks.cp.is_cut())];
        if let Some((axis, _)) = cut.into_iter().find(|(_, is_cut)| *is_cut) {
            panic!("this model is cut along {axis}; try Gpt::new with the weights of all parts");
        }
    }

    /// The input of the head `[texts, places, n_embd]`.
    fn states(&self, tokens: &Tensor, p: f64) -> Tensor {
        let begun = Residual::new(self.embedding.forward(tokens, 0, p));
        let (_, normed) =
            (0..self.blocks.len()).fold(begun, |xs, index| self.through(index, xs, p)).normed(&self.ln_f);
        normed
    }

    /// Runs a block. A checkpoint begins with the block's own norm and ends with a sum: so it keeps one tensor, and does
    /// not compute its last product again.
    fn through(&self, index: usize, xs: Residual, p: f64) -> Residual {
        if self.blocks.is_checkpointed(index) {
            let forward = move |block: &Block, xs: &[Tensor]| {
                block.forward(Residual::new(xs[0].shallow_clone()), None, p).past
            };
            return Residual::new(self.blocks.forward(index, &[&xs.past], forward));
        }
        let (next, _masks) = (index + 1, masks_of(index));
        if next == self.blocks.len() {
            return self.blocks.get(index).forward(xs, Some(&self.ln_f), p);
        }
        let following = (!self.blocks.is_checkpointed(next)).then(|| self.blocks.get(next));
        self.blocks.get(index).forward(xs, following.as_deref().map(Block::first_norm), p)
    }

    /// An empty cache for the keys and values of texts.
    ///
    /// # Panics
    ///
    /// If the model is cut among ranks.
    pub fn cache(&self) -> KvCache {
        self.assert_whole();
        KvCache::new(self.blocks.len())
    }

    /// The logits of the token after `tokens` `[texts, places]`, which continue the tokens that the cache has seen.
    /// Together they must be at most `n_positions`. The result has one row per text.
    ///
    /// # Panics
    ///
    /// If the model is cut among ranks.
    pub fn next(&self, tokens: &Tensor, cache: &mut KvCache) -> Tensor {
        self.assert_whole();
        let mut xs = self.embedding.forward(tokens, cache.len(), 0.0);
        for (block, kept) in self.blocks.iter().zip(cache.layers()) {
            xs = block.next(&xs, kept);
        }
        self.head.logits(&self.ln_f.forward(&xs.select(1, -1)))
    }
}

/// The sum of the losses of a batch's tokens.
#[derive(Debug)]
pub struct SummedLoss(pub Tensor);

/// A batch is (tokens, next tokens), both `[texts, places]`.
impl Model<(Tensor, Tensor)> for Gpt {
    type Output = SummedLoss;

    fn forward_batch(&self, batch: &(Tensor, Tensor), mode: Mode) -> Result<SummedLoss, Cause> {
        Ok(SummedLoss(self.loss(&batch.0, &batch.1, mode)?))
    }
}

#[cfg(test)]
mod tests;
