//! A network by its name, with the weights of `MODEL.WEIGHTS` or fresh ones.

use anyhow::{Context, bail, ensure};
use tch::nn::{ModuleT, VarStore};
use tch::vision::resnet;

use crate::config::Config;

/// Builds the network in `store`.
pub(in crate::program) fn model(config: &Config, store: &VarStore) -> anyhow::Result<Box<dyn ModuleT>> {
    let (path, classes) = (store.root(), config.model.num_classes as i64);
    ensure!(!config.model.syncbn, "MODEL.SYNCBN is not in this build; try MODEL.SYNCBN False");
    let net: Box<dyn ModuleT> = match config.model.arch.as_str() {
        "resnet18" => Box::new(resnet::resnet18(&path, classes)),
        "resnet34" => Box::new(resnet::resnet34(&path, classes)),
        "resnet50" => Box::new(resnet::resnet50(&path, classes)),
        other => bail!("MODEL.ARCH: no network `{other}`; try resnet18, resnet34 or resnet50"),
    };
    if let Some(file) = &config.model.weights {
        store.read_safetensors(file).with_context(|| format!("MODEL.WEIGHTS {}", file.display()))?;
    }
    Ok(net)
}
