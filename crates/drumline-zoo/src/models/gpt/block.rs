//! A block: attention, then two dense layers, each added to what goes in, behind a norm of its own.

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

    /// `p` is the probability of dropout.
    pub(super) fn forward(&self, xs: &Tensor, p: f64) -> Tensor {
        let xs = sum_with_dropout(xs, &self.attn.forward(&self.ln_1.forward(xs), p), p);
        sum_with_dropout(&xs, &self.mlp(&xs), p)
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
