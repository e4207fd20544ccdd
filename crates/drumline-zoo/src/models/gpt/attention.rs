//! Causal self-attention: each place attends to itself and earlier places.

use drumline::engine::ParallelError;
use drumline::engine::context::{self, ring_attention};
use drumline::engine::tensor::AttentionShape;
use drumline_torch::mask_layer;
use tch::nn::Path;
use tch::{Device, Kind, Tensor};

use super::cache::LayerCache;
use super::conv1d::{By, Conv1d, ConvShape};
use super::{GptOptions, STDEV};
use crate::error::ZooError;
use crate::models::checkpointing::{drawn_product, product};
use crate::models::ranks::ModelRanks;
use crate::models::transformer::{KeysValues, Mask, attend, attend_with};

/// The layer. One product computes queries, keys and values.
#[derive(Debug)]
pub(super) struct Attention {
    c_attn: Conv1d,
    c_proj: Conv1d,
    /// This rank's heads.
    n_head: i64,
}

/// Queries, keys and values, each `[texts, heads, places, head size]`.
type Heads = [Tensor; 3];

impl Attention {
    pub(super) fn new(
        ranks: &ModelRanks,
        path: &Path<'_>,
        options: &GptOptions,
        stdev_back: f64,
    ) -> Result<Self, ZooError> {
        let &GptOptions { n_embd, n_head, .. } = options;
        let n_head = AttentionShape::heads_of_rank(n_head, ranks.tp.size())?;
        let shape = ConvShape { inputs: n_embd, outputs: n_embd, stdev: stdev_back, cut: By::Inputs };
        let c_attn = ConvShape { outputs: 3 * n_embd, stdev: STDEV, cut: By::Outputs(3), ..shape };
        let c_attn = Conv1d::new(ranks, &(path / "c_attn"), c_attn)?;
        Ok(Self { c_attn, c_proj: Conv1d::new(ranks, &(path / "c_proj"), shape)?, n_head })
    }

    /// The attention output before `c_proj`. `p` is the dropout of the attention weights: on a GPU that of libtorch's fused
    /// kernels, which draw it from the generator; elsewhere it is drawn by position.
    pub(super) fn seen(&self, xs: &Tensor, p: f64) -> Tensor {
        let [queries, keys, values] = self.heads(xs);
        let fused = || {
            let no_mask = None::<Tensor>;
            Tensor::f_scaled_dot_product_attention(&queries, &keys, &values, no_mask, p, true, None, false)
        };
        let inputs = [&queries, &keys, &values];
        let seen = match xs.device() {
            _ if p == 0.0 => product(&inputs, fused),
            Device::Cpu => {
                let _masks = mask_layer("attn", 0);
                let kept = KeysValues { keys, values };
                attend(&queries, &kept, Mask::Causal, p)
            }
            _ => drawn_product(&inputs, fused),
        };
        joined(&seen)
    }

    /// The same of this rank's heads of `xs`, which are its places of texts of `len` places.
    pub(super) fn seen_of_part(
        &self,
        xs: &Tensor,
        ranks: &ModelRanks,
        len: i64,
        p: f64,
    ) -> Result<Tensor, ParallelError> {
        let [queries, keys, values] = self.heads(xs);
        let seen = if ranks.cp.is_cut() {
            let heads = context::Heads { queries: &queries, keys: &keys, values: &values };
            ring_attention(&ranks.cp, heads, len, context::Mask::Causal)?
        } else {
            let _masks = mask_layer("attn", 0);
            let kept = KeysValues { keys, values };
            let all_heads = self.n_head * ranks.tp.size() as i64;
            attend_with(&queries, &kept, Mask::Causal, p, &|probs| ranks.dropout(probs, all_heads, p))
        };
        Ok(joined(&seen))
    }

    /// The output projection.
    pub(super) fn c_proj(&self) -> &Conv1d {
        &self.c_proj
    }

    /// The output for places that follow those in the cache.
    pub(super) fn next(&self, xs: &Tensor, cache: &mut LayerCache) -> Tensor {
        let [queries, keys, values] = self.heads(xs);
        let before = cache.len();
        let (keys, values) = cache.extended(&keys, &values);
        let new = queries.size()[2];
        let mask = (new > 1).then(|| {
            let all = (Kind::Bool, queries.device());
            Tensor::ones([new, before + new], all).tril(before)
        });
        let seen =
            Tensor::scaled_dot_product_attention(&queries, &keys, &values, mask, 0.0, false, None, false);
        self.c_proj.forward(&joined(&seen))
    }

    fn heads(&self, xs: &Tensor) -> Heads {
        let all = self.c_attn.forward(xs);
        let size = all.size();
        // Split in one operation, so that backward joins the gradients once.
        let parts = all.split(size[2] / 3, 2);
        [0, 1, 2].map(|part: usize| parts[part].view([size[0], size[1], self.n_head, -1]).transpose(1, 2))
    }
}

/// Joins the heads: `[texts, places, size]`.
fn joined(heads: &Tensor) -> Tensor {
    heads.transpose(1, 2).flatten(2, 3)
}
