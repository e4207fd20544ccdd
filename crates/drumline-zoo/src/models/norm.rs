//! Batch normalisation, with the count of batches that PyTorch keeps beside the running statistics.

use std::fmt;
use std::sync::Arc;

use drumline::{SyncBatchNorm, SyncGroup};
use tch::nn::{self, Init, ModuleT, Path};
use tch::{Kind, Tensor};

/// Makes a norm layer for so many channels, with the tensors `weight`, `bias`, `running_mean` and `running_var` under the path.
pub type NormBuilder = Arc<dyn Fn(Path<'_>, i64) -> Box<dyn ModuleT> + Send + Sync>;

/// Which normalisation goes between the convolutions.
#[derive(Clone, Default)]
pub enum Norm {
    /// Batch normalisation over the rank's own batch.
    #[default]
    Batch,
    /// Batch normalisation over the batch of all ranks.
    Sync(SyncGroup),
    /// Another layer.
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
    /// The layer for so many channels. It counts its batches in `num_batches_tracked`, unless it does so by itself.
    pub(super) fn build(&self, path: Path<'_>, channels: i64) -> Box<dyn ModuleT> {
        let layer: Box<dyn ModuleT> = match self {
            Self::Batch => Box::new(nn::batch_norm2d(&path, channels, config())),
            Self::Sync(group) => Box::new(SyncBatchNorm::new(&path, channels, config(), group)),
            Self::With(builder) => builder(path.clone(), channels),
        };
        if path.get("running_mean").is_none() || path.get(TRACKED).is_some() {
            return layer;
        }
        let count = path.add(TRACKED, Tensor::zeros([0i64; 0], (Kind::Int64, path.device())), false);
        Box::new(Counted { layer, count })
    }
}

const TRACKED: &str = "num_batches_tracked";

fn config() -> nn::BatchNormConfig {
    nn::BatchNormConfig { ws_init: Init::Const(1.0), ..Default::default() }
}

/// A norm layer that counts the batches it was trained on.
#[derive(Debug)]
struct Counted {
    layer: Box<dyn ModuleT>,
    count: Tensor,
}

impl ModuleT for Counted {
    fn forward_t(&self, xs: &Tensor, train: bool) -> Tensor {
        if train {
            let _ = self.count.shallow_clone().g_add_scalar_(1);
        }
        self.layer.forward_t(xs, train)
    }
}
