//! The forward of a model that is cut among ranks: layers along `tp`, the places of texts along `cp`.
//!
//! ```text
//!   own places ─▶ wte ─▶ scatter ─▶ + wpe ─▶ n_layer × ( ln ─▶ gather ─▶ attn │ mlp ─▶ scatter ─▶ + ) ─▶ ln_f ─▶ gather ─▶ loss
//!      of cp      Partial         1/t of the places of this rank of cp         own heads, own features        own classes
//! ```
//! Norms, dropout and the residual stream are cut along the sequence. Placements along `tp` are types. Dropout drops the
//! elements that it drops of the whole, so that masks are those of any other mesh.

use std::sync::{Arc, Mutex, PoisonError};

use drumline::data::Cause;
use drumline::engine::ParallelError;
use drumline::engine::tensor::{
    Features, Replicated, Sequence, Sharded, TpTensor, VocabEmbedding, VocabLabels, vocab_cross_entropy,
};
use drumline_torch::{FunctionError, PartOf, TorchError, checkpoint, dropout_part};
use tch::Tensor;

use super::GptOptions;
use super::block::Block;
use super::conv1d::Conv1d;
use super::embedding::GptEmbedding;
use super::head::Head;
use crate::models::checkpointing::OneBlock;
use crate::models::ranks::ModelRanks;
use crate::models::transformer::LayerNorm;

type Result<T> = std::result::Result<T, ParallelError>;

/// Activations between the regions in which layers are cut.
type Places = TpTensor<Sharded<Sequence>>;

/// One forward.
#[derive(Debug, Clone)]
pub(super) struct Pass {
    ranks: ModelRanks,
    /// The places of the whole texts.
    len: i64,
    /// The probability of dropout.
    p: f64,
}

impl Pass {
    /// For texts of `len` places, and a probability of dropout.
    pub(super) fn new(ranks: &ModelRanks, len: i64, p: f64) -> Self {
        Self { ranks: ranks.clone(), len, p }
    }

    /// The number of places that this rank of `cp` has.
    fn own_len(&self) -> i64 {
        self.ranks.cp.cut(self.len).len_of(self.ranks.cp.rank())
    }

    /// This rank's part of activations at the places of its rank of `cp`.
    fn places(&self, own: Tensor) -> Result<Places> {
        TpTensor::sharded(own, self.own_len(), &self.ranks.tp)
    }

    fn norm(&self, layer: &LayerNorm, xs: &Places) -> Result<Places> {
        let layer = layer.layer();
        let [weight, bias] = self.ranks.tp.replicate_all([layer.weight, layer.bias])?;
        xs.map(|xs| {
            let size = weight.local().size();
            xs.f_layer_norm(size, Some(weight.local()), Some(bias.local()), layer.eps, false)
        })
    }

    /// The output of a layer that is cut by its inputs. The bias is added once, to the sum.
    fn row(&self, layer: &Conv1d, xs: &TpTensor<Sharded<Features>>) -> Result<Places> {
        let product = TpTensor::partial(layer.product(xs.local()), &self.ranks.tp);
        let [bias] = self.ranks.tp.replicate_all([layer.bias()])?;
        product.scatter::<Sequence>()?.map(|sum| sum.f_add(bias.local()))
    }

    fn dropped(&self, xs: &Places) -> Result<Places> {
        let part = PartOf { dim: 1, whole: self.len, places: self.ranks.places(self.len) };
        xs.try_map(|xs| dropout_part(xs, self.p, &part))
    }

    /// The residual stream after a block.
    fn past(&self, block: &Block, xs: &Places) -> Result<Places> {
        let Self { ranks, len, p } = self;
        let normed = self.norm(&block.ln_1, xs)?.gather()?;
        let seen = block.attn.seen_of_part(normed.local(), ranks, *len, *p)?;
        let features = seen.size()[2] * ranks.tp.size() as i64;
        let seen = TpTensor::sharded(seen, features, &ranks.tp)?;
        let xs = xs.plus(&self.dropped(&self.row(block.attn.c_proj(), &seen)?)?)?;
        let normed = self.norm(&block.ln_2, &xs)?.gather()?;
        let hidden = block.c_fc.forward(normed.local()).f_gelu("tanh").map_err(TorchError::from)?;
        let hidden = TpTensor::sharded(hidden, block.c_fc.outputs(), &ranks.tp)?;
        xs.plus(&self.dropped(&self.row(&block.c_proj, &hidden)?)?)
    }

    /// This rank's part of the embedded tokens.
    pub(super) fn embedded(
        &self,
        embedding: &GptEmbedding,
        options: &GptOptions,
        tokens: &Tensor,
    ) -> std::result::Result<Tensor, Cause> {
        let Self { ranks, len, .. } = self;
        let words = VocabEmbedding::of(&embedding.wte, options.padded_vocab(), &ranks.tp);
        let words = words.forward(&ranks.cp.own(tokens, 1)?)?.scatter::<Sequence>()?;
        let [table] = ranks.tp.replicate_all([&embedding.wpe])?;
        let rows = ranks.places(*len).into_iter();
        let rows = rows.map(|range| table.local().f_narrow(0, range.start, range.end - range.start));
        let rows =
            rows.chain([table.local().f_narrow(0, 0, 0)]).collect::<std::result::Result<Vec<_>, _>>()?;
        let rows = Tensor::f_cat(&rows, 0)?;
        Ok(self.dropped(&words.map(|words| words.f_add(&rows))?)?.local().shallow_clone())
    }

    /// This rank's part of the residual stream after a block, of that before it.
    pub(super) fn through(&self, block: &OneBlock<Block>, xs: &Tensor) -> std::result::Result<Tensor, Cause> {
        let pass = self.clone();
        let through = move |block: &Block, xs: &[Tensor]| -> std::result::Result<Tensor, FunctionError> {
            let xs = pass.places(xs[0].shallow_clone())?;
            Ok(pass.past(block, &xs)?.local().shallow_clone())
        };
        block.try_forward(&[xs], through)
    }

    /// The sum of the losses at the places of this rank of `cp`, the same on all ranks along `tp`, of this rank's part of the
    /// residual stream and the targets of whole texts.
    pub(super) fn loss(
        &self,
        ln_f: &LayerNorm,
        head: &Head,
        options: &GptOptions,
        [xs, targets]: [&Tensor; 2],
    ) -> std::result::Result<Tensor, Cause> {
        let xs = self.places(xs.shallow_clone())?;
        let states = self.norm(ln_f, &xs)?.gather()?.map(|states| states.f_flatten(0, 1))?;
        let targets = self.ranks.cp.own(targets, 1)?.f_reshape([-1])?;
        let chunks = options.loss_chunks;
        if !self.ranks.tp.is_cut() {
            return Ok(head.loss(states.local(), &targets, chunks)?);
        }
        let head = VocabEmbedding::of(head.weight(), options.padded_vocab(), &self.ranks.tp);
        let vocab = options.vocab_size;
        if chunks == 1 {
            return Ok(loss_of(&head, &states, &targets, vocab)?);
        }
        let head = Arc::new(Mutex::new(head));
        let mut sums = Vec::new();
        for (rows, classes) in states.local().f_chunk(chunks, 0)?.iter().zip(targets.f_chunk(chunks, 0)?) {
            let (head, kept) = (Arc::clone(&head), states.clone());
            // Logits are computed again in backward, so that only those of one chunk exist at a time.
            let of_chunk = move |rows: &[Tensor]| {
                let head = head.lock().unwrap_or_else(PoisonError::into_inner);
                let rows = kept.map(|_| Ok(rows[0].shallow_clone()))?;
                Ok(loss_of(&head, &rows, &classes, vocab)?)
            };
            sums.push(checkpoint(of_chunk, &[rows])?);
        }
        Ok(Tensor::f_stack(&sums, 0)?.f_sum(sums[0].kind())?)
    }
}

/// The sum of the losses of rows of states.
fn loss_of(
    head: &VocabEmbedding,
    states: &TpTensor<Replicated>,
    targets: &Tensor,
    vocab: i64,
) -> Result<Tensor> {
    let labels = VocabLabels { classes: targets, num_classes: Some(vocab), ignored: None, smoothing: 0.0 };
    Ok(vocab_cross_entropy(&head.logits(states)?, labels)?.into_tensor())
}
