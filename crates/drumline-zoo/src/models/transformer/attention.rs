//! Multi-head attention with the tensor names of PyTorch's `nn.MultiheadAttention`.
//!
//! ```text
//!   xs ─▶ in_proj: queries | keys | values ─▶ heads apart ─▶ softmax(q·k + mask)·v ─▶ heads together ─▶ out_proj
//! ```
//! Queries may come from another sequence than keys and values (cross-attention), and keys and values may be cached
//! between calls. `decode` uses both.

use drumline::engine::tensor::AttentionShape;
use tch::nn::Path;
use tch::{Kind, Tensor};

use super::linear::{By, CutLinear, Linear};
use super::rows::Rows;
use crate::error::ZooError;
use crate::models::checkpointing::product;
use crate::models::dropout::dropout;
use crate::models::ranks::ModelRanks;

/// Which keys a query attends to.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Mask<'a> {
    /// All keys.
    None,
    /// Keys up to the query's own place.
    Causal,
    /// A tensor that is added to the scores `[batch, 1, 1, keys]`; see [`padding_mask`].
    Added(&'a Tensor),
}

/// The value that is added to the scores of hidden keys.
const HIDDEN: f64 = f64::NEG_INFINITY;

/// Which places of `tokens` are padding. The first place is never hidden, so an empty sentence counts as one padding
/// word, and its result does not depend on the rest of the batch.
pub(crate) fn hidden(tokens: &Tensor, pad: i64) -> Tensor {
    let hidden = tokens.eq(pad);
    if tokens.size()[1] > 0 {
        let _ = hidden.select(1, 0).fill_(0);
    }
    hidden
}

/// The tensor that is added to the scores, with -∞ for hidden keys.
pub(crate) fn padding_mask(hidden: &Tensor, kind: Kind) -> Tensor {
    let added = Tensor::zeros(hidden.size(), (kind, hidden.device())).masked_fill_(hidden, HIDDEN);
    added.unsqueeze(1).unsqueeze(1)
}

/// Keys and values `[batch, heads, places, head size]`.
#[derive(Debug)]
pub(crate) struct KeysValues {
    pub(crate) keys: Tensor,
    pub(crate) values: Tensor,
}

/// The source that a decoder layer attends to.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Source<'a> {
    pub(crate) kept: &'a KeysValues,
    pub(crate) mask: &'a Tensor,
}

/// The source for all layers of a decoder.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sources<'a> {
    pub(crate) kept: &'a [KeysValues],
    pub(crate) mask: &'a Tensor,
}

#[derive(Debug)]
pub(crate) struct Attention {
    in_proj: Linear,
    out_proj: Linear,
    /// This rank's heads.
    n_head: i64,
    ranks: ModelRanks,
}

impl Attention {
    pub(crate) fn new(
        ranks: &ModelRanks,
        path: &Path<'_>,
        d_model: i64,
        n_head: i64,
    ) -> Result<Self, ZooError> {
        let init = Linear::xavier(d_model, 3 * d_model);
        let in_proj = CutLinear { inputs: d_model, outputs: 3 * d_model, init, by: By::Outputs(3) };
        let init = Linear::xavier(d_model, d_model);
        let out_proj = CutLinear { inputs: d_model, outputs: d_model, init, by: By::Inputs };
        Ok(Self {
            in_proj: Linear::part_named(ranks, path, in_proj, ["in_proj_weight", "in_proj_bias"])?,
            out_proj: Linear::part(ranks, &(path / "out_proj"), out_proj)?,
            n_head: AttentionShape::heads_of_rank(n_head, ranks.tp.size())?,
            ranks: ranks.clone(),
        })
    }

    fn attend(&self, queries: &Tensor, kept: &KeysValues, mask: Mask<'_>, p: f64) -> Tensor {
        let heads = self.n_head * self.ranks.tp.size() as i64;
        attend_with(queries, kept, mask, p, &|probs| self.ranks.dropout(probs, heads, p))
    }

    /// Self-attention: rows `xs` attend to the rows of their sentence.
    pub(crate) fn within(&self, xs: &Tensor, rows: &Rows, mask: Mask<'_>, p: f64) -> Tensor {
        let (queries, kept) = self.project(xs, rows);
        self.join(&self.attend(&queries, &kept, mask, p), rows)
    }

    /// Cross-attention: rows `xs` attend to the result of [`keys_values`](Self::keys_values).
    pub(crate) fn across(&self, xs: &Tensor, rows: &Rows, source: Source<'_>, p: f64) -> Tensor {
        let queries = self.split(&rows.unpack(&self.part(xs, 0, 1)));
        self.join(&self.attend(&queries, source.kept, Mask::Added(source.mask), p), rows)
    }

    /// Self-attention for one more place in each row of `xs`. `past` appends to the cached places and returns all of
    /// them.
    pub(crate) fn within_next(&self, xs: &Tensor, past: impl FnOnce(KeysValues) -> KeysValues) -> Tensor {
        let rows = Rows::all(xs.size()[0], 1);
        let (queries, new) = self.project(xs, &rows);
        self.join(&attend(&queries, &past(new), Mask::None, 0.0), &rows)
    }

    /// The queries, keys and values of the same places.
    fn project(&self, xs: &Tensor, rows: &Rows) -> (Tensor, KeysValues) {
        let parts = rows.unpack(&self.in_proj.forward(xs)).chunk(3, -1);
        let [queries, keys, values] = [0, 1, 2].map(|part| self.split(&parts[part]));
        (queries, KeysValues { keys, values })
    }

    /// The keys and values of source rows `xs`.
    pub(crate) fn keys_values(&self, xs: &Tensor, rows: &Rows) -> KeysValues {
        let parts = rows.unpack(&self.part(xs, 1, 2)).chunk(2, -1);
        KeysValues { keys: self.split(&parts[0]), values: self.split(&parts[1]) }
    }

    /// `count` of the three parts of the input projection, starting with `first`.
    fn part(&self, xs: &Tensor, first: i64, count: i64) -> Tensor {
        let own = self.in_proj.weight.size()[0] / 3;
        let rows = |tensor: &Tensor| tensor.narrow(0, first * own, count * own);
        let xs = &self.in_proj.enter(xs);
        product(&[xs], || xs.f_linear(&rows(&self.in_proj.weight), Some(rows(&self.in_proj.bias))))
    }

    fn split(&self, xs: &Tensor) -> Tensor {
        split(xs, self.n_head)
    }

    /// Joins the heads and applies the output projection.
    fn join(&self, heads: &Tensor, rows: &Rows) -> Tensor {
        self.out_proj.forward(&joined(heads, rows))
    }
}

/// Splits heads: `[batch, places, size]` becomes `[batch, heads, places, head size]`.
pub(crate) fn split(xs: &Tensor, n_head: i64) -> Tensor {
    let size = xs.size();
    xs.view([size[0], size[1], n_head, size[2] / n_head]).transpose(1, 2)
}

/// Joins heads to `[rows, size]`.
pub(crate) fn joined(heads: &Tensor, rows: &Rows) -> Tensor {
    rows.pack(&heads.transpose(1, 2).flatten(2, 3))
}

/// Scaled dot-product attention; `p` is the dropout of the attention weights. libtorch's fused kernel does not support
/// dropout on a CPU, and its fallback is slower than this one.
pub(crate) fn attend(queries: &Tensor, kept: &KeysValues, mask: Mask<'_>, p: f64) -> Tensor {
    attend_with(queries, kept, mask, p, &|probs| dropout(probs, p))
}

/// The same, with a function that drops attention weights.
pub(crate) fn attend_with(
    queries: &Tensor,
    kept: &KeysValues,
    mask: Mask<'_>,
    p: f64,
    drop: &dyn Fn(&Tensor) -> Tensor,
) -> Tensor {
    let KeysValues { keys, values } = kept;
    let added = match mask {
        Mask::Added(added) => Some(added.to_kind(queries.kind())),
        _ => None,
    };
    let causal = matches!(mask, Mask::Causal);
    if p == 0.0 {
        return product(&[queries, keys, values], || {
            Tensor::f_scaled_dot_product_attention(queries, keys, values, added, 0.0, causal, None, false)
        });
    }
    let size = queries.size();
    let mut scores = (queries * (size[3] as f64).powf(-0.5)).matmul(&keys.transpose(2, 3));
    if let Some(added) = added {
        scores += added;
    }
    if causal {
        scores += Tensor::full([size[2], size[2]], HIDDEN, (queries.kind(), queries.device())).triu_(1);
    }
    drop(&scores.softmax(-1, None)).matmul(values)
}
