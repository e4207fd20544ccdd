//! Linear layers and layer norms, with the first weights of PyTorch's `nn.Transformer`: Xavier's, biases at zero.

use drumline_torch::LayerNormLayer;
use tch::Tensor;
use tch::nn::{Init, Path};

/// A linear layer.
#[derive(Debug)]
pub(crate) struct Linear {
    pub(crate) weight: Tensor,
    pub(crate) bias: Tensor,
}

impl Linear {
    pub(crate) fn new(path: Path<'_>, inputs: i64, outputs: i64) -> Self {
        let weight = path.var("weight", &[outputs, inputs], Self::xavier(inputs, outputs));
        Self { weight, bias: path.zeros("bias", &[outputs]) }
    }

    pub(crate) fn forward(&self, xs: &Tensor) -> Tensor {
        xs.linear(&self.weight, Some(&self.bias))
    }

    pub(crate) fn xavier(inputs: i64, outputs: i64) -> Init {
        let bound = (6.0 / (inputs + outputs) as f64).sqrt();
        Init::Uniform { lo: -bound, up: bound }
    }
}

/// Added to the variance.
const EPS: f64 = 1e-5;

/// A layer norm over the last dimension.
#[derive(Debug)]
pub(crate) struct LayerNorm {
    weight: Tensor,
    bias: Tensor,
}

impl LayerNorm {
    pub(crate) fn new(path: Path<'_>, d_model: i64) -> Self {
        Self { weight: path.ones("weight", &[d_model]), bias: path.zeros("bias", &[d_model]) }
    }

    pub(crate) fn forward(&self, xs: &Tensor) -> Tensor {
        xs.layer_norm(self.weight.size(), Some(&self.weight), Some(&self.bias), EPS, false)
    }

    /// As the kernels of ours take it.
    pub(crate) fn layer(&self) -> LayerNormLayer<'_> {
        LayerNormLayer { weight: &self.weight, bias: &self.bias, eps: EPS }
    }
}
