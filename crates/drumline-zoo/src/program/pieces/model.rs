//! A network by its name, with the weights of `MODEL.WEIGHTS` or fresh ones.

use anyhow::ensure;
use tch::nn::VarStore;

use crate::config::Config;
pub(in crate::program) use crate::models::Net;
use crate::models::{ModelOptions, build};
use crate::weights;

/// Builds the network in `store`.
pub(in crate::program) fn model(config: &Config, store: &VarStore) -> anyhow::Result<Net> {
    ensure!(!config.model.syncbn, "MODEL.SYNCBN is not in this build; try MODEL.SYNCBN False");
    let options = ModelOptions { num_classes: config.model.num_classes as i64, ..ModelOptions::default() };
    let net = build(&config.model.arch, &store.root(), &options)?;
    if let Some(file) = &config.model.weights {
        weights::load(store, file)?;
    }
    Ok(net)
}
