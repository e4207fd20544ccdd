//! Hugging Face's `Conv1D`: a linear layer whose weight is inputs × outputs.

use tch::Tensor;
use tch::nn::{Init, Path};

/// The layer.
#[derive(Debug)]
pub(super) struct Conv1d {
    weight: Tensor,
    bias: Tensor,
}

impl Conv1d {
    /// Weights begin with a deviation of `stdev`, biases at zero.
    pub(super) fn new(path: Path<'_>, (inputs, outputs): (i64, i64), stdev: f64) -> Self {
        let weight = path.var("weight", &[inputs, outputs], Init::Randn { mean: 0.0, stdev });
        Self { weight, bias: path.zeros("bias", &[outputs]) }
    }

    /// Of texts × places × inputs.
    pub(super) fn forward(&self, xs: &Tensor) -> Tensor {
        let size = xs.size();
        // One product with the bias in it, as GPUs have it.
        self.bias.addmm(&xs.flatten(0, 1), &self.weight).view([size[0], size[1], -1])
    }

    /// The same without the bias, for those who add it in passing.
    pub(super) fn product(&self, xs: &Tensor) -> Tensor {
        let size = xs.size();
        xs.flatten(0, 1).mm(&self.weight).view([size[0], size[1], -1])
    }

    pub(super) fn bias(&self) -> &Tensor {
        &self.bias
    }
}
