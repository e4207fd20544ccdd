//! A network by its name, with the weights of `MODEL.WEIGHTS` or fresh ones.

use std::sync::Arc;

use drumline::{ProcessGroup, SyncBatchNorm, SyncGroup};
use tch::nn::{BatchNormConfig, Init, VarStore};

use crate::config::Config;
use crate::models::{Model, ModelOptions, Norm, build};
use crate::weights;

/// Builds the network in `store`; called by all ranks of `group`.
pub(in crate::program) fn model(
    config: &Config,
    store: &VarStore,
    group: &ProcessGroup,
) -> anyhow::Result<Model> {
    let norm = if config.model.syncbn { over_all_ranks(group)? } else { Norm::Batch };
    let options = ModelOptions { num_classes: config.model.num_classes as i64, norm };
    let net = build(&config.model.arch, &store.root(), &options)?;
    if let Some(file) = &config.model.weights {
        match config.model.new_classifier {
            true => weights::load_backbone(store, file)?,
            false => weights::load(store, file)?,
        }
    }
    Ok(net)
}

/// Batch norm whose batch is that of all ranks.
fn over_all_ranks(group: &ProcessGroup) -> anyhow::Result<Norm> {
    let sync = SyncGroup::new(group)?;
    let config = BatchNormConfig { ws_init: Init::Const(1.0), ..BatchNormConfig::default() };
    Ok(Norm::With(Arc::new(move |path, channels| {
        Box::new(SyncBatchNorm::new(path, channels, config, &sync))
    })))
}
