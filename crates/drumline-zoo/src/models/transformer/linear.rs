//! Linear layers and layer norms. The default initial weights are those of PyTorch's `nn.Transformer`: Xavier uniform,
//! biases zero.
//!
//! Ranks along `tp` may have parts of two layers with an activation between them: of the outputs of the first one, and of
//! the inputs of the second, whose products are summed. Activations before and after them are those of all ranks.

use std::borrow::Borrow;

use drumline::engine::ParallelError;
use drumline::engine::tensor::{Keeps, TensorParallel, TpTensor, Variable};
use drumline_torch::{LayerNormLayer, linear};
use tch::Tensor;
use tch::nn::{Init, Path};

use crate::error::ZooError;
use crate::models::checkpointing::product_of;
use crate::models::draw::drawn;
use crate::models::ranks::ModelRanks;

#[derive(Debug)]
pub(crate) struct Linear {
    pub(crate) weight: Tensor,
    pub(crate) bias: Tensor,
    cut: Cut,
}

/// What of the layer this rank has, of the ranks along `tp`.
#[derive(Debug)]
enum Cut {
    All,
    /// Some of the outputs.
    Outputs(TensorParallel),
    /// Some of the inputs, and all of the bias.
    Inputs(TensorParallel),
}

/// A layer that ranks have parts of.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CutLinear {
    pub(crate) inputs: i64,
    pub(crate) outputs: i64,
    pub(crate) init: Init,
    pub(crate) by: By,
}

/// What ranks have parts of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum By {
    /// Of the outputs of so many layers, which are one after the other.
    Outputs(i64),
    /// Of the inputs.
    Inputs,
}

/// Why these functions panic: modules cannot return errors. The trainer reports the panic.
pub(crate) fn ok<R>(made: Result<R, ParallelError>) -> R {
    made.unwrap_or_else(|error| panic!("{error}"))
}

impl Linear {
    pub(crate) fn new(path: Path<'_>, inputs: i64, outputs: i64) -> Self {
        Self::with_init(path, inputs, outputs, Self::xavier(inputs, outputs))
    }

    pub(crate) fn with_init<'a>(path: impl Borrow<Path<'a>>, inputs: i64, outputs: i64, init: Init) -> Self {
        let path = path.borrow();
        let weight = drawn(path, "weight", &[outputs, inputs], init);
        Self { weight, bias: path.zeros("bias", &[outputs]), cut: Cut::All }
    }

    /// Creates this rank's part of a layer.
    pub(crate) fn part(ranks: &ModelRanks, path: &Path<'_>, layer: CutLinear) -> Result<Self, ZooError> {
        Self::part_named(ranks, path, layer, ["weight", "bias"])
    }

    /// The same with other names of its tensors.
    pub(crate) fn part_named(
        ranks: &ModelRanks,
        path: &Path<'_>,
        layer: CutLinear,
        names: [&str; 2],
    ) -> Result<Self, ZooError> {
        let CutLinear { inputs, outputs, init, by } = layer;
        let keeps = match by {
            By::Outputs(stacked) => [Keeps::Stacked(0, stacked); 2],
            By::Inputs => [Keeps::Along(1), Keeps::Whole],
        };
        let weight = Variable { name: names[0], size: &[outputs, inputs], keeps: keeps[0] };
        let bias = Variable { name: names[1], size: &[outputs], keeps: keeps[1] };
        let cut = match by {
            _ if !ranks.tp.is_cut() => Cut::All,
            By::Outputs(_) => Cut::Outputs(ranks.tp.clone()),
            By::Inputs => Cut::Inputs(ranks.tp.clone()),
        };
        Ok(Self { weight: ranks.drawn(path, weight, init)?, bias: ranks.zeros(path, bias)?, cut })
    }

    /// The output: this rank's part of it, if ranks have parts of the outputs, and on all ranks otherwise.
    pub(crate) fn forward(&self, xs: &Tensor) -> Tensor {
        let Cut::Inputs(tp) = &self.cut else { return self.entered(&self.enter(xs)) };
        let own = product_of(&[xs], || linear(xs, &self.weight, None));
        ok(TpTensor::partial(own, tp).sum()).into_tensor() + &self.bias
    }

    /// What all ranks have, for layers with parts of the outputs: backward sums its gradients.
    pub(crate) fn enter(&self, xs: &Tensor) -> Tensor {
        match &self.cut {
            Cut::Outputs(tp) => {
                ok(TpTensor::invariant(xs.shallow_clone(), tp).replicate()).local().shallow_clone()
            }
            _ => xs.shallow_clone(),
        }
    }

    /// [`forward`](Self::forward) of what [`enter`](Self::enter) returned, for one or several layers.
    pub(crate) fn entered(&self, xs: &Tensor) -> Tensor {
        product_of(&[xs], || linear(xs, &self.weight, Some(&self.bias)))
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
