//! Attention of several heads, under the names of PyTorch's `nn.MultiheadAttention`.
//!
//! ```text
//!   xs ─▶ in_proj: queries | keys | values ─▶ heads apart ─▶ softmax(q·k + mask)·v ─▶ heads together ─▶ out_proj
//! ```
//! Queries may come from elsewhere than keys and values, and these may be kept from one call to the next: `decode` does both.

use tch::nn::Path;
use tch::{Kind, Tensor};

use super::linear::Linear;
use super::rows::Rows;
use crate::models::dropout::dropout;

/// Which keys a query may see.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Mask<'a> {
    /// All.
    None,
    /// Those up to its own place.
    Causal,
    /// What is added to the scores, of shape batch × 1 × 1 × keys: that of [`padding_mask`].
    Added(&'a Tensor),
}

/// Added to the scores of what is hidden.
const HIDDEN: f64 = f64::NEG_INFINITY;

/// The places of `tokens` that are padding. The first is always seen: an empty sentence is one word of padding, whatever stands beside it in
/// the batch.
pub(crate) fn hidden(tokens: &Tensor, pad: i64) -> Tensor {
    let hidden = tokens.eq(pad);
    if tokens.size()[1] > 0 {
        let _ = hidden.select(1, 0).fill_(0);
    }
    hidden
}

/// What is added to the scores of keys, of which some are hidden.
pub(crate) fn padding_mask(hidden: &Tensor, kind: Kind) -> Tensor {
    let added = Tensor::zeros(hidden.size(), (kind, hidden.device())).masked_fill_(hidden, HIDDEN);
    added.unsqueeze(1).unsqueeze(1)
}

/// Keys and values of batch × heads × places × head's size.
#[derive(Debug)]
pub(crate) struct KeysValues {
    pub(crate) keys: Tensor,
    pub(crate) values: Tensor,
}

/// What a layer of the decoder sees of the source.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Source<'a> {
    pub(crate) kept: &'a KeysValues,
    pub(crate) mask: &'a Tensor,
}

/// The layer.
#[derive(Debug)]
pub(crate) struct Attention {
    in_proj: Linear,
    out_proj: Linear,
    n_head: i64,
}

impl Attention {
    pub(crate) fn new(path: Path<'_>, d_model: i64, n_head: i64) -> Self {
        let in_proj = Linear {
            weight: path.var("in_proj_weight", &[3 * d_model, d_model], Linear::xavier(d_model, 3 * d_model)),
            bias: path.zeros("in_proj_bias", &[3 * d_model]),
        };
        Self { in_proj, out_proj: Linear::new(&path / "out_proj", d_model, d_model), n_head }
    }

    /// Attention of the rows `xs` to those of the same sentence.
    pub(crate) fn within(&self, xs: &Tensor, rows: &Rows, mask: Mask<'_>, p: f64) -> Tensor {
        let (queries, kept) = self.project(xs, rows);
        self.join(&attend(&queries, &kept, mask, p), rows)
    }

    /// Attention of the rows `xs` to what [`keys_values`](Self::keys_values) made.
    pub(crate) fn across(&self, xs: &Tensor, rows: &Rows, source: Source<'_>, p: f64) -> Tensor {
        let queries = self.split(&rows.unpack(&self.part(xs, 0, 1)));
        self.join(&attend(&queries, source.kept, Mask::Added(source.mask), p), rows)
    }

    /// One more place for each row of `xs`, after the places that `past` keeps of it.
    pub(crate) fn within_next(&self, xs: &Tensor, past: impl FnOnce(KeysValues) -> KeysValues) -> Tensor {
        let rows = Rows::all(xs.size()[0], 1);
        let (queries, new) = self.project(xs, &rows);
        self.join(&attend(&queries, &past(new), Mask::None, 0.0), &rows)
    }

    /// Queries, and keys and values, of the same places.
    fn project(&self, xs: &Tensor, rows: &Rows) -> (Tensor, KeysValues) {
        let parts = rows.unpack(&self.in_proj.forward(xs)).chunk(3, -1);
        let [queries, keys, values] = [0, 1, 2].map(|part| self.split(&parts[part]));
        (queries, KeysValues { keys, values })
    }

    /// Of the rows `xs` of a source.
    pub(crate) fn keys_values(&self, xs: &Tensor, rows: &Rows) -> KeysValues {
        let parts = rows.unpack(&self.part(xs, 1, 2)).chunk(2, -1);
        KeysValues { keys: self.split(&parts[0]), values: self.split(&parts[1]) }
    }

    /// Some of the three parts of the first projection.
    fn part(&self, xs: &Tensor, first: i64, count: i64) -> Tensor {
        let d_model = self.in_proj.weight.size()[1];
        let rows = |tensor: &Tensor| tensor.narrow(0, first * d_model, count * d_model);
        xs.linear(&rows(&self.in_proj.weight), Some(rows(&self.in_proj.bias)))
    }

    /// batch × places × size becomes batch × heads × places × head's size.
    fn split(&self, xs: &Tensor) -> Tensor {
        let size = xs.size();
        xs.view([size[0], size[1], self.n_head, size[2] / self.n_head]).transpose(1, 2)
    }

    /// The way back, and the last projection.
    fn join(&self, heads: &Tensor, rows: &Rows) -> Tensor {
        self.out_proj.forward(&rows.pack(&heads.transpose(1, 2).flatten(2, 3)))
    }
}

/// `p` is the dropout of the weights. libtorch's fused kernel knows none on a CPU, and its way around is slower than this one.
fn attend(queries: &Tensor, kept: &KeysValues, mask: Mask<'_>, p: f64) -> Tensor {
    let KeysValues { keys, values } = kept;
    let added = match mask {
        Mask::Added(added) => Some(added.to_kind(queries.kind())),
        _ => None,
    };
    let causal = matches!(mask, Mask::Causal);
    if p == 0.0 {
        return Tensor::scaled_dot_product_attention(queries, keys, values, added, 0.0, causal, None, false);
    }
    let size = queries.size();
    let mut scores = (queries * (size[3] as f64).powf(-0.5)).matmul(&keys.transpose(2, 3));
    if let Some(added) = added {
        scores += added;
    }
    if causal {
        scores += Tensor::full([size[2], size[2]], HIDDEN, (queries.kind(), queries.device())).triu_(1);
    }
    dropout(&scores.softmax(-1, None), p).matmul(values)
}
