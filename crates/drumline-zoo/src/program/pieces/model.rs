//! A network by its name, with the weights of `MODEL.WEIGHTS` or fresh ones.

use drumline::{DdpOptions, ProcessGroup, SyncGroup};
use tch::nn::VarStore;

use crate::config::Config;
use crate::models::{Model, ModelOptions, Norm, build};
use crate::weights;

/// Builds the network in `store`, and says how it is made a replica; called by all ranks of `group`.
pub(in crate::program) fn model(
    config: &Config,
    store: &VarStore,
    group: &ProcessGroup,
) -> anyhow::Result<(Model, DdpOptions)> {
    let sync_group = config.model.syncbn.then(|| SyncGroup::new(group)).transpose()?;
    let norm = sync_group.clone().map_or(Norm::Batch, Norm::Sync);
    let options = ModelOptions { num_classes: config.model.num_classes as i64, norm };
    let net = build(&config.model.arch, &store.root(), &options)?;
    if let Some(file) = &config.model.weights {
        match config.model.new_classifier {
            true => weights::load_backbone(store, file)?,
            false => weights::load(store, file)?,
        }
    }
    let is_channels_last = config.model.memory_format.is_channels_last(store.device());
    let net = if is_channels_last { net.channels_last(store)? } else { net };
    Ok((net, DdpOptions { sync_group, ..DdpOptions::default() }))
}
