//! Encoder and decoder layers with the tensor names of PyTorch's `nn.TransformerEncoderLayer` and
//! `nn.TransformerDecoderLayer`.

use tch::Tensor;
use tch::nn::Path;

use super::attention::{Attention, KeysValues, Mask, Source};
use super::linear::{By, CutLinear, LayerNorm, Linear};
use super::rows::Rows;
use crate::error::ZooError;
use crate::models::dropout::{relu_dropout, sum_with_dropout};
use crate::models::ranks::ModelRanks;

/// Where the norms are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum NormPlace {
    /// Post-norm: after each residual sum, as in "Attention is all you need".
    #[default]
    After,
    /// Pre-norm: before each sublayer, and once at the end. Deeper models train without a long warm-up.
    Before,
}

/// The sizes of a layer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LayerShape {
    pub(crate) d_model: i64,
    pub(crate) n_head: i64,
    pub(crate) d_inner_hid: i64,
    pub(crate) norm: NormPlace,
}

/// A residual connection around a sublayer, with a norm before or after it.
#[derive(Debug)]
struct Residual {
    norm: LayerNorm,
    place: NormPlace,
}

impl Residual {
    fn new(path: Path<'_>, shape: &LayerShape) -> Self {
        Self { norm: LayerNorm::new(path, shape.d_model), place: shape.norm }
    }

    fn around(&self, xs: &Tensor, p: f64, part: impl FnOnce(&Tensor) -> Tensor) -> Tensor {
        match self.place {
            NormPlace::After => self.norm.forward(&sum_with_dropout(xs, &part(xs), p)),
            NormPlace::Before => sum_with_dropout(xs, &part(&self.norm.forward(xs)), p),
        }
    }
}

/// Two linear layers with ReLU between them.
#[derive(Debug)]
struct FeedForward {
    linear1: Linear,
    linear2: Linear,
    inner: i64,
    ranks: ModelRanks,
}

impl FeedForward {
    fn new(ranks: &ModelRanks, path: &Path<'_>, shape: &LayerShape) -> Result<Self, ZooError> {
        let LayerShape { d_model, d_inner_hid: inner, .. } = *shape;
        let init = Linear::xavier(d_model, inner);
        let linear1 = CutLinear { inputs: d_model, outputs: inner, init, by: By::Outputs(1) };
        let linear2 = CutLinear { inputs: inner, outputs: d_model, init, by: By::Inputs };
        Ok(Self {
            linear1: Linear::part(ranks, &(path / "linear1"), linear1)?,
            linear2: Linear::part(ranks, &(path / "linear2"), linear2)?,
            inner,
            ranks: ranks.clone(),
        })
    }

    fn forward(&self, xs: &Tensor, p: f64) -> Tensor {
        let hidden = self.linear1.forward(xs);
        let hidden = if self.ranks.tp.is_cut() {
            self.ranks.dropout(&hidden.relu(), self.inner, p)
        } else {
            relu_dropout(&hidden, p)
        };
        self.linear2.forward(&hidden)
    }
}

/// An encoder layer.
#[derive(Debug)]
pub(crate) struct EncoderLayer {
    self_attn: Attention,
    feed_forward: FeedForward,
    norms: [Residual; 2],
}

impl EncoderLayer {
    pub(crate) fn new(ranks: &ModelRanks, path: &Path<'_>, shape: &LayerShape) -> Result<Self, ZooError> {
        Ok(Self {
            self_attn: Attention::new(ranks, &(path / "self_attn"), shape.d_model, shape.n_head)?,
            feed_forward: FeedForward::new(ranks, path, shape)?,
            norms: ["norm1", "norm2"].map(|name| Residual::new(path / name, shape)),
        })
    }

    pub(crate) fn forward(&self, xs: &Tensor, rows: &Rows, mask: Mask<'_>, p: f64) -> Tensor {
        let xs = self.norms[0].around(xs, p, |xs| self.self_attn.within(xs, rows, mask, p));
        self.norms[1].around(&xs, p, |xs| self.feed_forward.forward(xs, p))
    }
}

/// A decoder layer.
#[derive(Debug)]
pub(crate) struct DecoderLayer {
    pub(crate) self_attn: Attention,
    pub(crate) multihead_attn: Attention,
    feed_forward: FeedForward,
    norms: [Residual; 3],
}

impl DecoderLayer {
    pub(crate) fn new(ranks: &ModelRanks, path: &Path<'_>, shape: &LayerShape) -> Result<Self, ZooError> {
        let attention = |name: &str| Attention::new(ranks, &(path / name), shape.d_model, shape.n_head);
        Ok(Self {
            self_attn: attention("self_attn")?,
            multihead_attn: attention("multihead_attn")?,
            feed_forward: FeedForward::new(ranks, path, shape)?,
            norms: ["norm1", "norm2", "norm3"].map(|name| Residual::new(path / name, shape)),
        })
    }

    /// Computes all rows at once. Each row attends to the earlier rows of its sentence.
    pub(crate) fn forward(&self, xs: &Tensor, rows: &Rows, source: Source<'_>, p: f64) -> Tensor {
        let xs = self.norms[0].around(xs, p, |xs| self.self_attn.within(xs, rows, Mask::Causal, p));
        self.after_self(&xs, rows, source, p)
    }

    fn after_self(&self, xs: &Tensor, rows: &Rows, source: Source<'_>, p: f64) -> Tensor {
        let xs = self.norms[1].around(xs, p, |xs| self.multihead_attn.across(xs, rows, source, p));
        self.norms[2].around(&xs, p, |xs| self.feed_forward.forward(xs, p))
    }

    /// Computes the next place of each row. `xs` is `[rows, size]`, with the same number of rows for each source
    /// sentence. `past` appends the new place to the cached ones and returns all of them.
    pub(crate) fn next(
        &self,
        xs: &Tensor,
        source: Source<'_>,
        past: impl FnOnce(KeysValues) -> KeysValues,
    ) -> Tensor {
        let xs = self.norms[0].around(xs, 0.0, |xs| self.self_attn.within_next(xs, past));
        // The rows of a sentence attend to the same source, so they are treated as places of one attention, and the
        // source is not repeated.
        let sentences = source.mask.size()[0];
        self.after_self(&xs, &Rows::all(sentences, xs.size()[0] / sentences), source, 0.0)
    }
}
