//! Batch norm that also counts its batches, as PyTorch's does.

use std::borrow::Borrow;
use std::fmt;
use std::sync::Arc;

use drumline::engine::{SyncBatchNorm, SyncGroup};
use drumline_torch::{
    Activation, BatchNormLayer, TorchError, batch_norm_cuda, batch_norm_sum_relu_cuda, is_recomputing,
};
use tch::nn::{self, Init, ModuleT, Path};
use tch::{Kind, Tensor};

/// Creates a norm layer for a number of channels, with the tensors `weight`, `bias`, `running_mean` and `running_var`
/// under the path.
pub type NormBuilder = Arc<dyn Fn(Path<'_>, i64) -> Box<dyn ModuleT> + Send + Sync>;

/// The normalisation between convolutions.
#[derive(Clone, Default)]
pub enum Norm {
    /// Batch norm over the rank's own batch.
    #[default]
    Batch,
    /// Synchronised batch norm over the batches of all ranks.
    Sync(SyncGroup),
    /// Any other norm layer.
    With(NormBuilder),
}

impl fmt::Debug for Norm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Batch => "Batch",
            Self::Sync(_) => "Sync(..)",
            Self::With(_) => "With(..)",
        })
    }
}

impl Norm {
    /// Builds the layer for a number of channels. It counts batches in `num_batches_tracked`, unless the inner layer
    /// already does.
    pub(super) fn build<'a>(&self, path: impl Borrow<Path<'a>>, channels: i64) -> NormLayer {
        let path = path.borrow();
        let layer: Box<dyn ModuleT> = match self {
            Self::Batch => Box::new(nn::batch_norm2d(path, channels, config())),
            Self::Sync(group) => Box::new(SyncBatchNorm::new(path, channels, config(), group)),
            Self::With(builder) => builder(path.clone(), channels),
        };
        let counts = path.get("running_mean").is_some() && path.get(TRACKED).is_none();
        let count =
            counts.then(|| path.add(TRACKED, Tensor::zeros([0i64; 0], (Kind::Int64, path.device())), false));
        let own = matches!(self, Self::Batch).then(|| Own::of(path)).flatten();
        NormLayer { layer, count, own }
    }
}

const TRACKED: &str = "num_batches_tracked";

fn config() -> nn::BatchNormConfig {
    nn::BatchNormConfig { ws_init: Init::Const(1.0), ..Default::default() }
}

/// A norm layer that counts its training batches, with fused operations after it.
#[derive(Debug)]
pub(super) struct NormLayer {
    layer: Box<dyn ModuleT>,
    count: Option<Tensor>,
    /// The tensors, if it is a plain batch norm.
    own: Option<Own>,
}

/// The tensors of a plain batch norm.
#[derive(Debug)]
struct Own {
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    var: Tensor,
}

impl Own {
    fn of(path: &Path<'_>) -> Option<Self> {
        let [weight, bias, mean, var] =
            ["weight", "bias", "running_mean", "running_var"].map(|name| path.get(name));
        Some(Self { weight: weight?, bias: bias?, mean: mean?, var: var? })
    }

    /// The same with copies of the running statistics: the second forward of a checkpoint must not update them again.
    fn scratch(&self) -> Self {
        Self {
            weight: self.weight.shallow_clone(),
            bias: self.bias.shallow_clone(),
            mean: self.mean.copy(),
            var: self.var.copy(),
        }
    }

    /// The batch norm in training.
    fn forward(&self, xs: &Tensor) -> Tensor {
        let (weight, bias) = (Some(&self.weight), Some(&self.bias));
        let nn::BatchNormConfig { momentum, eps, cudnn_enabled, .. } = config();
        xs.batch_norm(weight, bias, Some(&self.mean), Some(&self.var), true, momentum, eps, cudnn_enabled)
    }
}

impl NormLayer {
    /// The norm, then ReLU.
    pub(super) fn forward_relu(&self, xs: &Tensor, train: bool) -> Tensor {
        self.fused(train, |layer| batch_norm_cuda(xs, layer, Activation::Relu))
            .unwrap_or_else(|| self.plain(xs, train).relu_())
    }

    /// The norm, then the sum with another tensor, then ReLU. Returns the result twice, for the two branches that
    /// follow.
    pub(super) fn forward_add_relu(&self, xs: &Tensor, other: &Tensor, train: bool) -> [Tensor; 2] {
        self.fused(train, |layer| batch_norm_sum_relu_cuda(xs, layer, other)).unwrap_or_else(|| {
            let made = self.plain(xs, train).g_add_(other).relu_();
            [made.shallow_clone(), made]
        })
    }

    /// The norm only.
    pub(super) fn forward(&self, xs: &Tensor, train: bool) -> Tensor {
        self.fused(train, |layer| batch_norm_cuda(xs, layer, Activation::None))
            .unwrap_or_else(|| self.plain(xs, train))
    }

    /// Computes with libtorch's operations.
    fn plain(&self, xs: &Tensor, train: bool) -> Tensor {
        if train && is_recomputing() {
            return match &self.own {
                Some(own) => own.scratch().forward(xs),
                None => self.layer.forward_t(xs, train),
            };
        }
        if let Some(count) = self.count.as_ref().filter(|_| train) {
            let _ = count.shallow_clone().g_add_scalar_(1);
        }
        self.layer.forward_t(xs, train)
    }

    /// Computes with our fused kernels if they apply: on a GPU, in training.
    fn fused<R>(
        &self,
        train: bool,
        kernel: impl FnOnce(BatchNormLayer<'_>) -> Result<Option<R>, TorchError>,
    ) -> Option<R> {
        let own = self.own.as_ref().filter(|_| train)?;
        let scratch = is_recomputing().then(|| own.scratch());
        let own = scratch.as_ref().unwrap_or(own);
        let nn::BatchNormConfig { momentum, eps, .. } = config();
        let layer = BatchNormLayer {
            weight: &own.weight,
            bias: &own.bias,
            running_mean: &own.mean,
            running_var: &own.var,
            batches: self.count.as_ref().filter(|_| scratch.is_none()),
            momentum,
            eps,
        };
        // A module cannot return an error; libtorch's own methods would panic too.
        kernel(layer).unwrap_or_else(|error| panic!("batch normalisation: {error}"))
    }
}
