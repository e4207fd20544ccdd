//! A block: attention, then two dense layers, each added to what goes in, behind a norm of its own.

use drumline_torch::{
    BranchEnd, TorchError, layer_norm_cuda, sum_layer_norm_cuda, sums_with_layer_norm_cuda,
};
use tch::Tensor;
use tch::nn::Path;

use super::attention::Attention;
use super::cache::Kept;
use super::conv1d::Conv1d;
use super::{GptOptions, STDEV};
use crate::models::dropout::sum_with_dropout;
use crate::models::transformer::LayerNorm;

/// The block.
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
        // Twice in each layer something is added up: the sum should not grow with their number.
        let stdev_back = STDEV / ((2 * n_layer) as f64).sqrt();
        let mlp = path / "mlp";
        Self {
            ln_1: LayerNorm::new(path / "ln_1", n_embd),
            attn: Attention::new(&(path / "attn"), options, stdev_back),
            ln_2: LayerNorm::new(path / "ln_2", n_embd),
            c_fc: Conv1d::new(&mlp / "c_fc", (n_embd, 4 * n_embd), STDEV),
            c_proj: Conv1d::new(&mlp / "c_proj", (4 * n_embd, n_embd), stdev_back),
        }
    }

    /// From what goes past the block and its norm to the same of the `next` one; `p` is the probability of dropout.
    pub(super) fn forward(&self, xs: Normed, next: &LayerNorm, p: f64) -> Normed {
        let seen = self.attn.seen(&xs.normed, p);
        let xs = xs.plus(self.attn.c_proj(), &seen, &self.ln_2, p);
        let hidden = self.c_fc.forward(&xs.normed).gelu("tanh");
        xs.plus(&self.c_proj, &hidden, next, p)
    }

    /// The norm before it.
    pub(super) fn first_norm(&self) -> &LayerNorm {
        &self.ln_1
    }

    /// Of places that follow those that were kept.
    pub(super) fn next(&self, xs: &Tensor, kept: &mut Kept) -> Tensor {
        let xs = xs + self.attn.next(&self.ln_1.forward(xs), kept);
        &xs + self.mlp(&xs)
    }

    fn mlp(&self, xs: &Tensor) -> Tensor {
        self.c_proj.forward(&self.c_fc.forward(&self.ln_2.forward(xs)).gelu("tanh"))
    }
}

/// What goes past a block, and its norm, which goes into it.
#[derive(Debug)]
pub(super) struct Normed {
    past: Tensor,
    pub(super) normed: Tensor,
}

impl Normed {
    pub(super) fn new(past: Tensor, norm: &LayerNorm) -> Self {
        let normed = told(layer_norm_cuda(&past, norm.layer())).unwrap_or_else(|| norm.forward(&past));
        Self { past, normed }
    }

    /// With the end of a branch added: what its last layer makes of `inputs`.
    fn plus(self, last: &Conv1d, inputs: &Tensor, norm: &LayerNorm, p: f64) -> Self {
        let Self { past, .. } = self;
        if p == 0.0 && told(sums_with_layer_norm_cuda(&past, norm.layer())) {
            let branch = last.product(inputs);
            let end = BranchEnd { branch: &branch, bias: last.bias() };
            return match told(sum_layer_norm_cuda(&past, end, norm.layer())) {
                Some([past, normed]) => Self { past, normed },
                None => Self::new(past + branch + last.bias(), norm),
            };
        }
        Self::new(sum_with_dropout(&past, &last.forward(inputs), p), norm)
    }
}

/// A model's parts return no errors; those of tch panic as well, and the trainer tells it.
fn told<R>(made: Result<R, TorchError>) -> R {
    made.unwrap_or_else(|error| panic!("layer norm: {error}"))
}
