//! Hugging Face's `Conv1D`: a linear layer whose weight is `[inputs, outputs]`.

use std::borrow::Borrow;

use tch::Tensor;
use tch::nn::{Init, Path};

use crate::models::checkpointing::product;
use crate::models::draw::drawn;

#[derive(Debug)]
pub(super) struct Conv1d {
    weight: Tensor,
    bias: Tensor,
}

impl Conv1d {
    /// Creates the layer. Weights are normal with standard deviation `stdev`, biases zero.
    pub(super) fn new<'a>(path: impl Borrow<Path<'a>>, inputs: i64, outputs: i64, stdev: f64) -> Self {
        let path = path.borrow();
        let weight = drawn(path, "weight", &[inputs, outputs], Init::Randn { mean: 0.0, stdev });
        Self { weight, bias: path.zeros("bias", &[outputs]) }
    }

    /// Applies the layer to `[texts, places, inputs]`.
    pub(super) fn forward(&self, xs: &Tensor) -> Tensor {
        let size = xs.size();
        // One product that includes the bias, which is faster on GPUs.
        product(&[xs], || {
            let rows = self.bias.f_addmm(&xs.f_flatten(0, 1)?, &self.weight)?;
            rows.f_view([size[0], size[1], -1])
        })
    }

    /// The product without the bias, for callers that add it in a fused operation.
    pub(super) fn product(&self, xs: &Tensor) -> Tensor {
        let size = xs.size();
        product(&[xs], || xs.f_flatten(0, 1)?.f_mm(&self.weight)?.f_view([size[0], size[1], -1]))
    }

    pub(super) fn bias(&self) -> &Tensor {
        &self.bias
    }
}
