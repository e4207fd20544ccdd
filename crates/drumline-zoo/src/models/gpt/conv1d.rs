//! Hugging Face's `Conv1D`: a linear layer whose weight is `[inputs, outputs]`.

use drumline::engine::tensor::{Keeps, Variable};
use drumline_torch::addmm;
use tch::Tensor;
use tch::nn::{Init, Path};

use crate::error::ZooError;
use crate::models::checkpointing::product_of;
use crate::models::ranks::ModelRanks;

#[derive(Debug)]
pub(super) struct Conv1d {
    weight: Tensor,
    bias: Tensor,
    outputs: i64,
}

/// The sizes of the whole layer.
#[derive(Debug, Clone, Copy)]
pub(super) struct ConvShape {
    pub(super) inputs: i64,
    pub(super) outputs: i64,
    /// The standard deviation of the first weights.
    pub(super) stdev: f64,
    pub(super) cut: By,
}

/// What ranks along `tp` have parts of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum By {
    /// Of the outputs of so many layers, which are one after the other.
    Outputs(i64),
    /// Of the inputs: all have the bias, which is added once.
    Inputs,
}

impl Conv1d {
    /// Creates this rank's part of the layer. Weights are normal, biases zero.
    pub(super) fn new(ranks: &ModelRanks, path: &Path<'_>, shape: ConvShape) -> Result<Self, ZooError> {
        let ConvShape { inputs, outputs, stdev, cut } = shape;
        let keeps = match cut {
            By::Outputs(stacked) => [Keeps::Stacked(1, stacked), Keeps::Stacked(0, stacked)],
            By::Inputs => [Keeps::Along(0), Keeps::Whole],
        };
        let weight = Variable { name: "weight", size: &[inputs, outputs], keeps: keeps[0] };
        let bias = Variable { name: "bias", size: &[outputs], keeps: keeps[1] };
        let weight = ranks.drawn(path, weight, Init::Randn { mean: 0.0, stdev })?;
        Ok(Self { weight, bias: ranks.zeros(path, bias)?, outputs })
    }

    /// Applies the layer to `[texts, places, inputs]`.
    pub(super) fn forward(&self, xs: &Tensor) -> Tensor {
        let size = xs.size();
        // One product that includes the bias, which is faster on GPUs.
        product_of(&[xs], || {
            let rows = addmm(Some(&self.bias), &xs.f_flatten(0, 1)?, &self.weight)?;
            Ok(rows.f_view([size[0], size[1], -1])?)
        })
    }

    /// The product without the bias, for callers that add it in a fused operation.
    pub(super) fn product(&self, xs: &Tensor) -> Tensor {
        let size = xs.size();
        product_of(&[xs], || {
            let rows = addmm(None, &xs.f_flatten(0, 1)?, &self.weight)?;
            Ok(rows.f_view([size[0], size[1], -1])?)
        })
    }

    pub(super) fn bias(&self) -> &Tensor {
        &self.bias
    }

    /// The outputs of the whole layer.
    pub(super) fn outputs(&self) -> i64 {
        self.outputs
    }
}
