//! An encoder layer: self-attention, then a feed-forward network, each with a residual connection followed by a norm.

use drumline::engine::tensor::AttentionShape;
use tch::Tensor;
use tch::nn::Path;

use super::{BertOptions, EPS, init};
use crate::error::ZooError;
use crate::models::dropout::sum_with_dropout;
use crate::models::ranks::ModelRanks;
use crate::models::transformer::{
    By, CutLinear, KeysValues, LayerNorm, Linear, Mask, Rows, attend_with, joined, split,
};

#[derive(Debug)]
pub(super) struct Layer {
    query: Linear,
    key: Linear,
    value: Linear,
    attended: Output,
    intermediate: Linear,
    output: Output,
    /// Those of this rank.
    heads: i64,
    all_heads: i64,
    ranks: ModelRanks,
}

impl Layer {
    pub(super) fn new(ranks: &ModelRanks, path: &Path<'_>, options: &BertOptions) -> Result<Self, ZooError> {
        let (size, inner) = (options.hidden_size as i64, options.intermediate_size as i64);
        let attention = path / "attention";
        let own = CutLinear { inputs: size, outputs: size, init: init(), by: By::Outputs(1) };
        let projection = |name: &str| Linear::part(ranks, &(&attention / "self" / name), own);
        let all_heads = options.num_attention_heads as i64;
        Ok(Self {
            query: projection("query")?,
            key: projection("key")?,
            value: projection("value")?,
            attended: Output::new(ranks, &(&attention / "output"), size, size)?,
            intermediate: Linear::part(
                ranks,
                &(path / "intermediate" / "dense"),
                CutLinear { outputs: inner, ..own },
            )?,
            output: Output::new(ranks, &(path / "output"), inner, size)?,
            heads: AttentionShape::heads_of_rank(all_heads, ranks.tp.size())?,
            all_heads,
            ranks: ranks.clone(),
        })
    }

    /// `xs` is `[rows, hidden_size]`; `p` is the probability of dropout.
    pub(super) fn forward(&self, xs: &Tensor, rows: &Rows, mask: Mask<'_>, p: f64) -> Tensor {
        let entered = self.query.enter(xs);
        let heads = |layer: &Linear| split(&rows.unpack(&layer.entered(&entered)), self.heads);
        let kept = KeysValues { keys: heads(&self.key), values: heads(&self.value) };
        let drop = |probs: &Tensor| self.ranks.dropout(probs, self.all_heads, p);
        let seen = joined(&attend_with(&heads(&self.query), &kept, mask, p, &drop), rows);
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
    fn new(ranks: &ModelRanks, path: &Path<'_>, inputs: i64, size: i64) -> Result<Self, ZooError> {
        let dense = CutLinear { inputs, outputs: size, init: init(), by: By::Inputs };
        let dense = Linear::part(ranks, &(path / "dense"), dense)?;
        Ok(Self { dense, norm: LayerNorm::with_eps(path / "LayerNorm", size, EPS) })
    }

    fn forward(&self, xs: &Tensor, base: &Tensor, p: f64) -> Tensor {
        self.norm.forward(&sum_with_dropout(base, &self.dense.forward(xs), p))
    }
}
