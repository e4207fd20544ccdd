//! A block: self-attention, then a feed-forward network, each with a norm before it and a residual connection.

use drumline_torch::{
    BranchEnd, TorchError, layer_norm_cuda, sum_layer_norm_cuda, sums_with_layer_norm_cuda,
};
use tch::Tensor;
use tch::nn::Path;

use super::attention::Attention;
use super::cache::LayerCache;
use super::conv1d::{By, Conv1d, ConvShape};
use super::{GptOptions, STDEV};
use crate::error::ZooError;
use crate::models::checkpointing::product_of;
use crate::models::dropout::sum_with_dropout;
use crate::models::ranks::ModelRanks;
use crate::models::transformer::LayerNorm;

#[derive(Debug)]
pub(super) struct Block {
    pub(super) ln_1: LayerNorm,
    pub(super) attn: Attention,
    pub(super) ln_2: LayerNorm,
    pub(super) c_fc: Conv1d,
    pub(super) c_proj: Conv1d,
}

impl Block {
    pub(super) fn new(ranks: &ModelRanks, path: &Path<'_>, options: &GptOptions) -> Result<Self, ZooError> {
        let &GptOptions { n_embd, n_layer, .. } = options;
        // Each layer adds to the residual stream twice. The initial weights are scaled so that its variance does not
        // grow with depth.
        let stdev_back = STDEV / ((2 * n_layer) as f64).sqrt();
        let mlp = path / "mlp";
        let c_fc = ConvShape { inputs: n_embd, outputs: 4 * n_embd, stdev: STDEV, cut: By::Outputs(1) };
        let c_proj = ConvShape { inputs: 4 * n_embd, outputs: n_embd, stdev: stdev_back, cut: By::Inputs };
        Ok(Self {
            ln_1: LayerNorm::new(path / "ln_1", n_embd),
            attn: Attention::new(ranks, &(path / "attn"), options, stdev_back)?,
            ln_2: LayerNorm::new(path / "ln_2", n_embd),
            c_fc: Conv1d::new(ranks, &(&mlp / "c_fc"), c_fc)?,
            c_proj: Conv1d::new(ranks, &(&mlp / "c_proj"), c_proj)?,
        })
    }

    /// Maps the residual stream before this block to that after it. If the norm that follows is known, its result is
    /// computed with the last sum. `p` is the probability of dropout.
    pub(super) fn forward(&self, xs: Residual, next: Option<&LayerNorm>, p: f64) -> Residual {
        let (past, normed) = xs.normed(&self.ln_1);
        let seen = self.attn.seen(&normed, p);
        let xs =
            Residual::sum(&past, Branch { last: self.attn.c_proj(), inputs: &seen, p }, Some(&self.ln_2));
        let (past, normed) = xs.normed(&self.ln_2);
        let hidden = self.c_fc.forward(&normed).gelu("tanh");
        Residual::sum(&past, Branch { last: &self.c_proj, inputs: &hidden, p }, next)
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

/// The residual stream. Its norm is a sublayer's input, and may have been computed with the last sum.
#[derive(Debug)]
pub(super) struct Residual {
    pub(super) past: Tensor,
    normed: Option<Tensor>,
}

/// The end of a sublayer: its last layer, the inputs of that layer, and the probability of dropout after it.
#[derive(Clone, Copy)]
struct Branch<'a> {
    last: &'a Conv1d,
    inputs: &'a Tensor,
    p: f64,
}

impl Residual {
    pub(super) fn new(past: Tensor) -> Self {
        Self { past, normed: None }
    }

    /// The stream and its norm.
    pub(super) fn normed(self, norm: &LayerNorm) -> (Tensor, Tensor) {
        let Self { past, normed } = self;
        let norm = || expect_ok(layer_norm_cuda(&past, norm.layer())).unwrap_or_else(|| norm.forward(&past));
        let normed = normed.unwrap_or_else(norm);
        (past, normed)
    }

    /// Adds the output of a sublayer to the stream.
    fn sum(past: &Tensor, branch: Branch<'_>, norm: Option<&LayerNorm>) -> Self {
        let Branch { last, inputs, p } = branch;
        let Some(norm) = norm else {
            let branch = last.forward(inputs);
            // A checkpoint ends with this sum, and does not compute it again.
            return Self::new(product_of(&[past, &branch], || {
                drumline_torch::sum_with_dropout(past, &branch, p)
            }));
        };
        if !expect_ok(sums_with_layer_norm_cuda(past, norm.layer(), p)) {
            return Self::new(sum_with_dropout(past, &last.forward(inputs), p));
        }
        let branch = last.product(inputs);
        let end = BranchEnd { branch: &branch, bias: last.bias(), dropout: p };
        match expect_ok(sum_layer_norm_cuda(past, end, norm.layer())) {
            Some([past, normed]) => Self { past, normed: Some(normed) },
            None => Self::new(sum_with_dropout(past, &(branch + last.bias()), p)),
        }
    }
}

/// Unwraps a result: a module cannot return an error. tch's modules panic too, and the trainer reports the panic.
fn expect_ok<R>(made: Result<R, TorchError>) -> R {
    made.unwrap_or_else(|error| panic!("layer norm: {error}"))
}
