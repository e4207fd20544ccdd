//! Layers whose weight gradients can be computed apart from the rest of backward, with PyTorch's first values and names.

use drumline_torch::{embedding, linear};
use tch::Tensor;
use tch::nn::{Init, Path};

use super::layer::{Boundary, Layer, LayerError, Mode};

type Result<T> = std::result::Result<T, LayerError>;

/// Applies a layer of one tensor to the first tensor of a boundary; the others pass.
fn to_first(mut xs: Boundary, layer: impl FnOnce(&Tensor) -> Result<Tensor>) -> Result<Boundary> {
    let first = xs.first_mut().ok_or("it got no tensor")?;
    *first = layer(first)?;
    Ok(xs)
}

/// PyTorch's bound for weights and biases of layers with this many inputs.
fn bound(inputs: i64) -> Init {
    let bound = 1.0 / (inputs as f64).sqrt();
    Init::Uniform { lo: -bound, up: bound }
}

/// `x · weightᵀ + bias`, of the first tensor of a boundary.
#[derive(Debug)]
pub struct Linear {
    /// `[outputs, inputs]`.
    pub weight: Tensor,
    /// `[outputs]`.
    pub bias: Option<Tensor>,
}

impl Linear {
    /// PyTorch's `nn.Linear`.
    pub fn new(path: &Path<'_>, inputs: i64, outputs: i64) -> Result<Self> {
        let weight = path.f_var("weight", &[outputs, inputs], bound(inputs))?;
        Ok(Self { weight, bias: Some(path.f_var("bias", &[outputs], bound(inputs))?) })
    }

    /// The same with this weight, such as a tied one, and without bias.
    pub fn of(weight: Tensor) -> Self {
        Self { weight, bias: None }
    }

    /// The output for one tensor.
    pub fn apply(&self, x: &Tensor) -> Result<Tensor> {
        Ok(linear(x, &self.weight, self.bias.as_ref())?)
    }
}

impl Layer for Linear {
    fn forward(&self, xs: Boundary, _: Mode) -> Result<Boundary> {
        to_first(xs, |x| self.apply(x))
    }
}

/// A convolution over images without bias, of the first tensor of a boundary.
#[derive(Debug)]
pub struct Conv2d {
    /// `[outputs, inputs / groups, size, size]`.
    pub weight: Tensor,
    /// Stride, padding and groups.
    pub shape: drumline_torch::Conv2d,
}

impl Conv2d {
    /// PyTorch's `nn.Conv2d` with square kernels of this size.
    pub fn new(
        path: &Path<'_>,
        [inputs, outputs, size]: [i64; 3],
        shape: drumline_torch::Conv2d,
    ) -> Result<Self> {
        let inputs = inputs / shape.groups;
        let weight = path.f_var("weight", &[outputs, inputs, size, size], bound(inputs * size * size))?;
        Ok(Self { weight, shape })
    }
}

impl Layer for Conv2d {
    fn forward(&self, xs: Boundary, _: Mode) -> Result<Boundary> {
        to_first(xs, |x| Ok(self.shape.forward(x, &self.weight)?))
    }
}

/// The rows of a table at the indices that are the first tensor of a boundary.
#[derive(Debug)]
pub struct Embedding {
    /// `[rows, features]`.
    pub weight: Tensor,
}

impl Embedding {
    /// PyTorch's `nn.Embedding`.
    pub fn new(path: &Path<'_>, rows: i64, features: i64) -> Result<Self> {
        let init = Init::Randn { mean: 0.0, stdev: 1.0 };
        Ok(Self { weight: path.f_var("weight", &[rows, features], init)? })
    }

    /// The same with this weight, such as a tied one.
    pub fn of(weight: Tensor) -> Self {
        Self { weight }
    }
}

impl Layer for Embedding {
    fn forward(&self, xs: Boundary, _: Mode) -> Result<Boundary> {
        to_first(xs, |ids| Ok(embedding(&self.weight, ids)?))
    }
}
