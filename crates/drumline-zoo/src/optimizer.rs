//! The optimizer that a configuration asks for by name, whatever is trained.

use drumline::trainer::{Batch, DistTrainer, Model};
use drumline_torch::{Adam, AdamOptions, AdamW, Sgd, SgdOptions};
use tch::nn::VarStore;

use crate::nmt::config::OptimizerName;
use crate::precision::Numbers;

/// What the keys say of it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OptimizerKeys {
    pub(crate) name: OptimizerName,
    pub(crate) lr: f64,
    pub(crate) weight_decay: f64,
    /// Of sgd.
    pub(crate) momentum: f64,
    /// Of adam and adamw.
    pub(crate) betas: (f64, f64),
    /// Of adam and adamw.
    pub(crate) eps: f64,
    /// In which numbers.
    pub(crate) numbers: Numbers,
}

/// With that optimizer, of all parameters of `store`.
pub(crate) fn with_optimizer<'a, M: Model<B> + ?Sized, B: Batch>(
    trainer: DistTrainer<'a, M, B>,
    keys: OptimizerKeys,
    store: &VarStore,
) -> anyhow::Result<DistTrainer<'a, M, B>> {
    let OptimizerKeys { name, lr, weight_decay, momentum, betas, eps, numbers } = keys;
    let adam = AdamOptions { lr, betas, eps, weight_decay: Some(weight_decay), ..AdamOptions::default() };
    let sgd = SgdOptions { lr, weight_decay, momentum, ..SgdOptions::default() };
    Ok(match name {
        OptimizerName::Adam => numbers.with_optimizer(trainer, store, |all| Adam::new(all, adam))?,
        OptimizerName::Adamw => numbers.with_optimizer(trainer, store, |all| AdamW::new(all, adam))?,
        OptimizerName::Sgd => numbers.with_optimizer(trainer, store, |all| Sgd::new(all, sgd))?,
    })
}
