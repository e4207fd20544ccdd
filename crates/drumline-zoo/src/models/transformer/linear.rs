//! Linear layers and layer norms. The default initial weights are those of PyTorch's `nn.Transformer`: Xavier uniform,
//! biases zero.

use std::borrow::Borrow;

use drumline_torch::LayerNormLayer;
use tch::Tensor;
use tch::nn::{Init, Path};

use crate::models::checkpointing::product;
use crate::models::draw::drawn;

#[derive(Debug)]
pub(crate) struct Linear {
    pub(crate) weight: Tensor,
    pub(crate) bias: Tensor,
}

impl Linear {
    pub(crate) fn new(path: Path<'_>, inputs: i64, outputs: i64) -> Self {
        Self::with_init(path, inputs, outputs, Self::xavier(inputs, outputs))
    }

    pub(crate) fn with_init<'a>(path: impl Borrow<Path<'a>>, inputs: i64, outputs: i64, init: Init) -> Self {
        let path = path.borrow();
        let weight = drawn(path, "weight", &[outputs, inputs], init);
        Self { weight, bias: path.zeros("bias", &[outputs]) }
    }

    pub(crate) fn forward(&self, xs: &Tensor) -> Tensor {
        product(&[xs], || xs.f_linear(&self.weight, Some(&self.bias)))
    }

    pub(crate) fn xavier(inputs: i64, outputs: i64) -> Init {
        let bound = (6.0 / (inputs + outputs) as f64).sqrt();
        Init::Uniform { lo: -bound, up: bound }
    }
}

/// The default epsilon.
const EPS: f64 = 1e-5;

/// A layer norm over the last dimension.
#[derive(Debug)]
pub(crate) struct LayerNorm {
    weight: Tensor,
    bias: Tensor,
    eps: f64,
}

impl LayerNorm {
    pub(crate) fn new(path: Path<'_>, d_model: i64) -> Self {
        Self::with_eps(path, d_model, EPS)
    }

    pub(crate) fn with_eps<'a>(path: impl Borrow<Path<'a>>, d_model: i64, eps: f64) -> Self {
        let path = path.borrow();
        Self { weight: path.ones("weight", &[d_model]), bias: path.zeros("bias", &[d_model]), eps }
    }

    pub(crate) fn forward(&self, xs: &Tensor) -> Tensor {
        xs.layer_norm(self.weight.size(), Some(&self.weight), Some(&self.bias), self.eps, false)
    }

    /// The parameters in the form that our kernels take.
    pub(crate) fn layer(&self) -> LayerNormLayer<'_> {
        LayerNormLayer { weight: &self.weight, bias: &self.bias, eps: self.eps }
    }
}
