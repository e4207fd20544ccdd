//! An encoder layer: self-attention, then a feed-forward network, each with a residual connection followed by a norm.

use tch::Tensor;
use tch::nn::Path;

use super::{BertOptions, EPS, init};
use crate::models::dropout::sum_with_dropout;
use crate::models::transformer::{KeysValues, LayerNorm, Linear, Mask, Rows, attend, joined, split};

#[derive(Debug)]
pub(super) struct Layer {
    query: Linear,
    key: Linear,
    value: Linear,
    attended: Output,
    intermediate: Linear,
    output: Output,
    heads: i64,
}

impl Layer {
    pub(super) fn new(path: &Path<'_>, options: &BertOptions) -> Self {
        let (size, inner) = (options.hidden_size as i64, options.intermediate_size as i64);
        let attention = path / "attention";
        let projection = |name: &str| Linear::with_init(&attention / "self" / name, size, size, init());
        Self {
            query: projection("query"),
            key: projection("key"),
            value: projection("value"),
            attended: Output::new(&(&attention / "output"), size, size),
            intermediate: Linear::with_init(path / "intermediate" / "dense", size, inner, init()),
            output: Output::new(&(path / "output"), inner, size),
            heads: options.num_attention_heads as i64,
        }
    }

    /// `xs` is `[rows, hidden_size]`; `p` is the probability of dropout.
    pub(super) fn forward(&self, xs: &Tensor, rows: &Rows, mask: Mask<'_>, p: f64) -> Tensor {
        let heads = |layer: &Linear| split(&rows.unpack(&layer.forward(xs)), self.heads);
        let kept = KeysValues { keys: heads(&self.key), values: heads(&self.value) };
        let seen = joined(&attend(&heads(&self.query), &kept, mask, p), rows);
        let xs = self.attended.forward(&seen, xs, p);
        self.output.forward(&self.intermediate.forward(&xs).gelu("none"), &xs, p)
    }
}

/// The end of a sublayer: a dense layer, the residual sum, and a norm.
#[derive(Debug)]
struct Output {
    dense: Linear,
    norm: LayerNorm,
}

impl Output {
    fn new(path: &Path<'_>, inputs: i64, size: i64) -> Self {
        let dense = Linear::with_init(path / "dense", inputs, size, init());
        Self { dense, norm: LayerNorm::with_eps(path / "LayerNorm", size, EPS) }
    }

    fn forward(&self, xs: &Tensor, base: &Tensor, p: f64) -> Tensor {
        self.norm.forward(&sum_with_dropout(base, &self.dense.forward(xs), p))
    }
}
