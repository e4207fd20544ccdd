//! A block: self-attention, then a feed-forward network, each with a norm before it and a residual connection.

use drumline_torch::{
    BranchEnd, TorchError, layer_norm_cuda, sum_layer_norm_cuda, sums_with_layer_norm_cuda,
};
use tch::Tensor;
use tch::nn::Path;

use super::attention::Attention;
use super::cache::LayerCache;
use super::conv1d::Conv1d;
use super::{GptOptions, STDEV};
use crate::models::dropout::sum_with_dropout;
use crate::models::transformer::LayerNorm;

#[derive(Debug)]
pub(super) struct Block {
    ln_1: LayerNorm,
    attn: Attention,
    ln_2: LayerNorm,
    c_fc: Conv1d,
    c_proj: Conv1d,
}

impl Block {
    pub(super) fn new(path: &Path<'_>, options: &GptOptions) -> Self {
        let &GptOptions { n_embd, n_layer, .. } = options;
        // Each layer adds to the residual stream twice. The initial weights are scaled so that its variance does not
        // grow with depth.
        let stdev_back = STDEV / ((2 * n_layer) as f64).sqrt();
        let mlp = path / "mlp";
        Self {
            ln_1: LayerNorm::new(path / "ln_1", n_embd),
            attn: Attention::new(&(path / "attn"), options, stdev_back),
            ln_2: LayerNorm::new(path / "ln_2", n_embd),
            c_fc: Conv1d::new(&mlp / "c_fc", n_embd, 4 * n_embd, STDEV),
            c_proj: Conv1d::new(&mlp / "c_proj", 4 * n_embd, n_embd, stdev_back),
        }
    }

    /// Maps this block's residual stream and norm to those of the next block, whose first norm is `next`. `p` is the
    /// probability of dropout.
    pub(super) fn forward(&self, xs: Normed, next: &LayerNorm, p: f64) -> Normed {
        let seen = self.attn.seen(&xs.normed, p);
        let xs = xs.plus(self.attn.c_proj(), &seen, &self.ln_2, p);
        let hidden = self.c_fc.forward(&xs.normed).gelu("tanh");
        xs.plus(&self.c_proj, &hidden, next, p)
    }

    /// The norm before attention.
    pub(super) fn first_norm(&self) -> &LayerNorm {
        &self.ln_1
    }

    /// The output for places that follow those in the cache.
    pub(super) fn next(&self, xs: &Tensor, cache: &mut LayerCache) -> Tensor {
        let xs = xs + self.attn.next(&self.ln_1.forward(xs), cache);
        &xs + self.mlp(&xs)
    }

    fn mlp(&self, xs: &Tensor) -> Tensor {
        self.c_proj.forward(&self.c_fc.forward(&self.ln_2.forward(xs)).gelu("tanh"))
    }
}

/// The residual stream, and its norm, which is a sublayer's input.
#[derive(Debug)]
pub(super) struct Normed {
    past: Tensor,
    pub(super) normed: Tensor,
}

impl Normed {
    pub(super) fn new(past: Tensor, norm: &LayerNorm) -> Self {
        let normed = expect_ok(layer_norm_cuda(&past, norm.layer())).unwrap_or_else(|| norm.forward(&past));
        Self { past, normed }
    }

    /// Adds the output of a sublayer, whose last layer is applied to `inputs`, to the residual stream.
    fn plus(self, last: &Conv1d, inputs: &Tensor, norm: &LayerNorm, p: f64) -> Self {
        let Self { past, .. } = self;
        if p == 0.0 && expect_ok(sums_with_layer_norm_cuda(&past, norm.layer())) {
            let branch = last.product(inputs);
            let end = BranchEnd { branch: &branch, bias: last.bias() };
            return match expect_ok(sum_layer_norm_cuda(&past, end, norm.layer())) {
                Some([past, normed]) => Self { past, normed },
                None => Self::new(past + branch + last.bias(), norm),
            };
        }
        Self::new(sum_with_dropout(&past, &last.forward(inputs), p), norm)
    }
}

/// Unwraps a result: a module cannot return an error. tch's modules panic too, and the trainer reports the panic.
fn expect_ok<R>(made: Result<R, TorchError>) -> R {
    made.unwrap_or_else(|error| panic!("layer norm: {error}"))
}
