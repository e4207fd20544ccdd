//! Causal self-attention: each place attends to itself and earlier places.

use drumline_torch::mask_layer;
use tch::nn::Path;
use tch::{Device, Kind, Tensor};

use super::cache::LayerCache;
use super::conv1d::Conv1d;
use super::{GptOptions, STDEV};
use crate::models::checkpointing::{drawn_product, product};
use crate::models::transformer::{KeysValues, Mask, attend};

/// The layer. One product computes queries, keys and values.
#[derive(Debug)]
pub(super) struct Attention {
    c_attn: Conv1d,
    c_proj: Conv1d,
    n_head: i64,
}

/// Queries, keys and values, each `[texts, heads, places, head size]`.
type Heads = [Tensor; 3];

impl Attention {
    pub(super) fn new(path: &Path<'_>, options: &GptOptions, stdev_back: f64) -> Self {
        let &GptOptions { n_embd, n_head, .. } = options;
        let c_attn = Conv1d::new(path / "c_attn", n_embd, 3 * n_embd, STDEV);
        let c_proj = Conv1d::new(path / "c_proj", n_embd, n_embd, stdev_back);
        Self { c_attn, c_proj, n_head }
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
