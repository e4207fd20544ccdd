//! A network by its name, with the weights of `MODEL.WEIGHTS` or fresh ones.

use anyhow::ensure;
use tch::Tensor;
use tch::nn::{ModuleT, VarStore};

use crate::config::Config;
use crate::models::{ModelOptions, build};
use crate::weights;

/// Any network: a box of one is none in tch's eyes.
#[derive(Debug)]
pub(in crate::program) struct Net(Box<dyn ModuleT>);

impl ModuleT for Net {
    fn forward_t(&self, images: &Tensor, train: bool) -> Tensor {
        self.0.forward_t(images, train)
    }
}

/// Builds the network in `store`.
pub(in crate::program) fn model(config: &Config, store: &VarStore) -> anyhow::Result<Net> {
    ensure!(!config.model.syncbn, "MODEL.SYNCBN is not in this build; try MODEL.SYNCBN False");
    let options = ModelOptions { num_classes: config.model.num_classes as i64, ..ModelOptions::default() };
    let net = build(&config.model.arch, &store.root(), &options)?;
    if let Some(file) = &config.model.weights {
        weights::load(store, file)?;
    }
    Ok(Net(net))
}
