//! Linear layers whose weights are cut.
//!
//! ```text
//!   ColumnLinear   xs (Replicated) ─▶ xs · own rows of Wᵀ + own bias ─▶ own features (Sharded<Features>)
//!   RowLinear      own features ─▶ own features · own columns of Wᵀ ─▶ Partial ─▶ sum or scatter ─▶ + bias, once
//! ```
//! A column layer, an activation and a row layer communicate once in forward and once in backward.

use drumline_comm::{call_site, on_behalf_of};
use tch::Tensor;
use tch::nn::{Init, Path};

use super::ranks::TensorParallel;
use super::value::{Dim, Features, Invariant, Partial, Replicated, Sequence, Sharded, TpTensor};
use super::variable::{Keeps, Variable};
use crate::error::ParallelError;

type Result<T> = std::result::Result<T, ParallelError>;

/// The sizes of a linear layer, and how its weight is drawn. Biases begin with zeros.
#[derive(Debug, Clone, Copy)]
pub struct LinearShape {
    /// Features of the input.
    pub inputs: i64,
    /// Features of the output.
    pub outputs: i64,
    /// The first weights.
    pub init: Init,
    /// The number of equal layers whose outputs this one has one after the other, such as 3 for queries, keys and values.
    pub stacked: i64,
}

impl LinearShape {
    /// One layer, with PyTorch's first weights.
    pub fn new(inputs: i64, outputs: i64) -> Self {
        let bound = 1.0 / (inputs.max(1) as f64).sqrt();
        Self { inputs, outputs, init: Init::Uniform { lo: -bound, up: bound }, stacked: 1 }
    }
}

/// A linear layer of which each rank has some of the outputs. Its tensors are those of PyTorch's `nn.Linear`.
#[derive(Debug)]
pub struct ColumnLinear {
    weight: Tensor,
    bias: Tensor,
    outputs: i64,
    stacked: i64,
}

impl ColumnLinear {
    /// Creates this rank's part of the layer.
    pub fn new(tp: &TensorParallel, path: &Path<'_>, shape: LinearShape) -> Result<Self> {
        let LinearShape { inputs, outputs, init, stacked } = shape;
        let keeps = Keeps::Stacked(0, stacked);
        let weight = Variable { name: "weight", size: &[outputs, inputs], keeps };
        let bias = Variable { name: "bias", size: &[outputs], keeps };
        Ok(Self {
            weight: tp.variable(path, weight, init)?,
            bias: tp.variable(path, bias, Init::Const(0.0))?,
            outputs,
            stacked,
        })
    }

    /// This rank's outputs.
    pub fn forward(&self, xs: &TpTensor<Replicated>) -> Result<TpTensor<Sharded<Features>>> {
        if self.stacked > 1 {
            let expected = "1; try `forward_stacked`";
            return Err(ParallelError::value("the number of stacked layers", self.stacked, expected));
        }
        TpTensor::sharded(self.product(xs)?, self.outputs, &xs.tp)
    }

    /// This rank's outputs of each of the stacked layers.
    pub fn forward_stacked(&self, xs: &TpTensor<Replicated>) -> Result<Vec<TpTensor<Sharded<Features>>>> {
        let (own, whole) = (self.product(xs)?, self.outputs / self.stacked);
        // Split in one operation, so that backward joins the gradients once.
        let layers = own.f_chunk(self.stacked, Features::of(&own))?;
        layers.into_iter().map(|layer| TpTensor::sharded(layer, whole, &xs.tp)).collect()
    }

    fn product(&self, xs: &TpTensor<Replicated>) -> Result<Tensor> {
        Ok(xs.local.f_linear(&self.weight, Some(&self.bias))?)
    }
}

/// A linear layer of which each rank has some of the inputs, and all of the bias.
#[derive(Debug)]
pub struct RowLinear {
    weight: Tensor,
    bias: Tensor,
}

impl RowLinear {
    /// Creates this rank's part of the layer.
    pub fn new(tp: &TensorParallel, path: &Path<'_>, shape: LinearShape) -> Result<Self> {
        let LinearShape { inputs, outputs, init, .. } = shape;
        let weight = Variable { name: "weight", size: &[outputs, inputs], keeps: Keeps::Along(1) };
        let bias = Variable { name: "bias", size: &[outputs], keeps: Keeps::Whole };
        let weight = tp.variable(path, weight, init)?;
        Ok(Self { weight, bias: tp.variable(path, bias, Init::Const(0.0))? })
    }

    /// This rank's part of the product, without the bias.
    pub fn product(&self, xs: &TpTensor<Sharded<Features>>) -> Result<TpTensor<Partial>> {
        Ok(TpTensor::partial(xs.local.f_linear::<&Tensor>(&self.weight, None)?, &xs.tp))
    }

    /// The output on all ranks.
    #[track_caller]
    pub fn forward(&self, xs: &TpTensor<Sharded<Features>>) -> Result<TpTensor<Invariant>> {
        let product = self.product(xs)?;
        on_behalf_of(call_site(), || product.sum())?.map(|sum| sum.f_add(&self.bias))
    }

    /// Each rank's part of the output along the sequence.
    #[track_caller]
    pub fn forward_scattered(&self, xs: &TpTensor<Sharded<Features>>) -> Result<TpTensor<Sharded<Sequence>>> {
        let product = self.product(xs)?;
        on_behalf_of(call_site(), || {
            let [bias] = xs.tp.replicate_all([&self.bias])?;
            product.scatter::<Sequence>()?.map(|sum| sum.f_add(&bias.local))
        })
    }
}
