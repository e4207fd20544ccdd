//! A network by its name, with the weights of `MODEL.WEIGHTS` or fresh ones.

use std::sync::Arc;

use drumline::{ProcessGroup, SyncBatchNorm, SyncGroup};
use tch::Tensor;
use tch::nn::{BatchNormConfig, Init, ModuleT, VarStore};

use crate::config::Config;
use crate::models::{ModelOptions, Norm, build};
use crate::weights;

/// Any network: a box of one is none in tch's eyes.
#[derive(Debug)]
pub(in crate::program) struct Net(Box<dyn ModuleT>);

impl ModuleT for Net {
    fn forward_t(&self, images: &Tensor, train: bool) -> Tensor {
        self.0.forward_t(images, train)
    }
}

/// Builds the network in `store`; called by all ranks of `group`.
pub(in crate::program) fn model(
    config: &Config,
    store: &VarStore,
    group: &ProcessGroup,
) -> anyhow::Result<Net> {
    let norm = if config.model.syncbn { over_all_ranks(group)? } else { Norm::Batch };
    let options = ModelOptions { num_classes: config.model.num_classes as i64, norm };
    let net = build(&config.model.arch, &store.root(), &options)?;
    if let Some(file) = &config.model.weights {
        weights::load(store, file)?;
    }
    Ok(Net(net))
}

/// Batch norm whose batch is that of all ranks.
fn over_all_ranks(group: &ProcessGroup) -> anyhow::Result<Norm> {
    let sync = SyncGroup::new(group)?;
    let config = BatchNormConfig { ws_init: Init::Const(1.0), ..BatchNormConfig::default() };
    Ok(Norm::With(Arc::new(move |path, channels| {
        Box::new(SyncBatchNorm::new(path, channels, config, &sync))
    })))
}
