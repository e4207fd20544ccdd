//! Layer norm of activations that are cut along the sequence.

use drumline_comm::{call_site, on_behalf_of};
use tch::Tensor;
use tch::nn::{Init, Path};

use super::ranks::TensorParallel;
use super::value::{Invariant, Sequence, Sharded, TpTensor};
use super::variable::{Keeps, Variable};
use crate::error::ParallelError;

type Result<T> = std::result::Result<T, ParallelError>;

/// PyTorch's default epsilon.
const EPS: f64 = 1e-5;

/// A layer norm over the features. All ranks have its weight and bias, and the same gradients of them.
#[derive(Debug)]
pub struct LayerNorm {
    weight: Tensor,
    bias: Tensor,
}

impl LayerNorm {
    /// Creates the layer with ones and zeros.
    pub fn new(tp: &TensorParallel, path: &Path<'_>, features: i64) -> Result<Self> {
        let size = &[features];
        let weight = Variable { name: "weight", size, keeps: Keeps::Whole };
        let bias = Variable { name: "bias", size, keeps: Keeps::Whole };
        let weight = tp.variable(path, weight, Init::Const(1.0))?;
        Ok(Self { weight, bias: tp.variable(path, bias, Init::Const(0.0))? })
    }

    /// The norm of each rank's part of the sequence: backward sums the gradients of weight and bias over ranks.
    #[track_caller]
    pub fn forward(&self, xs: &TpTensor<Sharded<Sequence>>) -> Result<TpTensor<Sharded<Sequence>>> {
        let [weight, bias] = on_behalf_of(call_site(), || xs.tp.replicate_all([&self.weight, &self.bias]))?;
        xs.map(|xs| norm(xs, &weight.local, &bias.local))
    }

    /// The norm of an activation that all ranks have.
    pub fn forward_invariant(&self, xs: &TpTensor<Invariant>) -> Result<TpTensor<Invariant>> {
        xs.map(|xs| norm(xs, &self.weight, &self.bias))
    }
}

fn norm(xs: &Tensor, weight: &Tensor, bias: &Tensor) -> std::result::Result<Tensor, tch::TchError> {
    xs.f_layer_norm(weight.size(), Some(weight), Some(bias), EPS, false)
}
