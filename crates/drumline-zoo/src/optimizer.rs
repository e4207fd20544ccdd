//! Optimizers by name, and learning rates with a warm-up counted in steps, which several tasks share.

use drumline::optim::{ParameterGroups, no_decay_on_norms};
use drumline::schedule::Warmup;
use drumline::trainer::{Batch, DistTrainer, Model};
use drumline_torch::{Adam, AdamOptions, AdamW, Sgd, SgdOptions, TorchError};
use tch::nn::VarStore;

use crate::config::{AfterWarmup, Optim, OptimizerName, WarmupOptim};
use crate::precision::Precision;

/// An optimizer by name, with the options of all of them.
#[derive(Debug, Clone)]
pub(crate) struct OptimizerOptions {
    pub(crate) name: OptimizerName,
    pub(crate) adam: AdamOptions,
    pub(crate) sgd: SgdOptions,
    /// Which parameters have weight decay.
    pub(crate) groups: fn(ParameterGroups) -> ParameterGroups,
}

impl OptimizerOptions {
    /// The optimizer of `OPTIM`, with weight decay on all parameters.
    pub(crate) fn new(optim: &Optim, keys: &WarmupOptim) -> Self {
        let Optim { base_lr: lr, weight_decay, momentum, .. } = *optim;
        let betas = (keys.betas[0], keys.betas[1]);
        Self {
            name: keys.method,
            adam: AdamOptions {
                lr,
                betas,
                eps: keys.eps,
                weight_decay: Some(weight_decay),
                ..AdamOptions::default()
            },
            sgd: SgdOptions { lr, weight_decay, momentum, ..SgdOptions::default() },
            groups: |all| all,
        }
    }

    /// SGD with weight decay on all parameters.
    pub(crate) fn sgd(sgd: SgdOptions) -> Self {
        Self { name: OptimizerName::Sgd, adam: AdamOptions::default(), sgd, groups: |all| all }
    }

    /// Restricts weight decay to matrices: norms and biases have none.
    pub(crate) fn without_decay_on_norms(self) -> Self {
        Self { groups: |all| no_decay_on_norms(all.into_parameters()).into(), ..self }
    }
}

/// Adds the optimizer for all parameters of `store` to the trainer.
pub(crate) fn with_optimizer<'a, M: Model<B> + ?Sized, B: Batch>(
    trainer: DistTrainer<'a, M, B>,
    store: &VarStore,
    precision: Precision,
    options: OptimizerOptions,
) -> Result<DistTrainer<'a, M, B>, TorchError> {
    let OptimizerOptions { name, adam, sgd, groups } = options;
    match name {
        OptimizerName::Adam => precision.with_optimizer(trainer, store, |all| Adam::new(groups(all), adam)),
        OptimizerName::Adamw => precision.with_optimizer(trainer, store, |all| AdamW::new(groups(all), adam)),
        OptimizerName::Sgd => precision.with_optimizer(trainer, store, |all| Sgd::new(groups(all), sgd)),
    }
}

/// The learning rate schedule of `OPTIM.WARMUP` and `OPTIM.SCHEDULE`. As in fastNLP, a warm-up of 1 or more is a number
/// of steps, and below 1 a fraction of all steps.
pub(crate) fn warmup(optim: &Optim, keys: &WarmupOptim) -> Warmup {
    let warmup = match keys.warmup {
        fraction if fraction < 1.0 => Warmup::fraction(fraction),
        steps => Warmup::steps(steps as u64),
    };
    match keys.schedule {
        AfterWarmup::Linear => warmup.then_linear(),
        AfterWarmup::Cosine => warmup.then_cosine(optim.min_lr),
        AfterWarmup::Constant => warmup,
    }
}
