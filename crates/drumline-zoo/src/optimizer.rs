//! Optimizers by name, and learning rates with a warm-up counted in steps, which several tasks share.

use drumline::optim::{MasterKind, Moments, OptimizerState, ParameterGroups, no_decay_on_norms};
use drumline::schedule::Warmup;
use drumline::trainer::{Batch, DistTrainer, Model};
use drumline_torch::{
    Adafactor, AdafactorOptions, Adagrad, AdagradOptions, Adam, AdamOptions, AdamW, Lamb, LambOptions, Lion,
    LionOptions, Optimizer, Sgd, SgdOptions, StepSize, TorchError, parameters,
};
use tch::nn::VarStore;

use crate::config::{AfterWarmup, MasterWeightsKind, Method, MomentsKind, Optim, OptimizerName, WarmupOptim};
use crate::precision::Precision;

/// An optimizer by name, with the options of all of them.
#[derive(Debug, Clone)]
pub(crate) struct OptimizerOptions {
    pub(crate) name: OptimizerName,
    pub(crate) adafactor: AdafactorOptions,
    pub(crate) adagrad: AdagradOptions,
    pub(crate) adam: AdamOptions,
    pub(crate) lamb: LambOptions,
    pub(crate) lion: LionOptions,
    pub(crate) sgd: SgdOptions,
    /// How master weights are kept, if there are some.
    pub(crate) master: MasterKind,
    /// Which parameters have weight decay.
    pub(crate) groups: fn(ParameterGroups) -> ParameterGroups,
}

impl OptimizerOptions {
    /// The optimizer of this name, with weight decay on all parameters.
    pub(crate) fn named(name: OptimizerName, lr: f64, weight_decay: f64) -> Self {
        Self {
            name,
            adafactor: AdafactorOptions { lr, weight_decay, ..AdafactorOptions::default() },
            adagrad: AdagradOptions { lr, weight_decay, ..AdagradOptions::default() },
            adam: AdamOptions { lr, weight_decay: Some(weight_decay), ..AdamOptions::default() },
            lamb: LambOptions { lr, weight_decay, ..LambOptions::default() },
            lion: LionOptions { lr, weight_decay, ..LionOptions::default() },
            sgd: SgdOptions { lr, weight_decay, ..SgdOptions::default() },
            master: MasterKind::Copy,
            groups: |all| all,
        }
    }

    /// The optimizer of `OPTIM`, with weight decay on all parameters.
    pub(crate) fn new(optim: &Optim, keys: &Method) -> Self {
        let named = Self::named(keys.method, optim.base_lr, optim.weight_decay);
        let betas = (keys.betas[0], keys.betas[1]);
        let moments = match keys.moments {
            MomentsKind::F32 => Moments::F32,
            MomentsKind::Bf16 => Moments::Bf16 { seed: 0 },
            MomentsKind::EightBit => Moments::EightBit,
        };
        let step_size = if keys.relative_step { StepSize::Capped } else { StepSize::Fixed };
        let (min_coeff, max_coeff) = (keys.coeff[0], keys.coeff[1]);
        Self {
            adafactor: AdafactorOptions {
                step_size,
                scale_parameter: keys.scale_parameter,
                ..named.adafactor
            },
            adagrad: AdagradOptions {
                lr_decay: keys.lr_decay,
                initial_accumulator_value: keys.initial_accumulator,
                eps: keys.eps,
                ..named.adagrad
            },
            adam: AdamOptions { betas, eps: keys.eps, moments, amsgrad: keys.amsgrad, ..named.adam },
            lamb: LambOptions { betas, eps: keys.eps, min_coeff, max_coeff, ..named.lamb },
            lion: LionOptions { betas, ..named.lion },
            sgd: SgdOptions { momentum: optim.momentum, ..named.sgd },
            master: match keys.master {
                MasterWeightsKind::Copy => MasterKind::Copy,
                MasterWeightsKind::Split => MasterKind::Split,
            },
            ..named
        }
    }

    /// Restricts weight decay to matrices: norms and biases have none.
    pub(crate) fn without_decay_on_norms(self) -> Self {
        Self { groups: |all| no_decay_on_norms(all.into_parameters()).into(), ..self }
    }
}

/// Runs `$body` with `$make` as the function that creates the optimizer of these options.
macro_rules! with_named {
    ($options:expr, $make:ident => $body:expr) => {{
        let OptimizerOptions { name, adafactor, adagrad, adam, lamb, lion, sgd, groups, .. } = $options;
        macro_rules! of {
            ($optimizer:ident, $settings:ident) => {{
                let $make = move |all: ParameterGroups| $optimizer::new(groups(all), $settings);
                $body
            }};
        }
        match name {
            OptimizerName::Adafactor => of!(Adafactor, adafactor),
            OptimizerName::Adagrad => of!(Adagrad, adagrad),
            OptimizerName::Adam => of!(Adam, adam),
            OptimizerName::Adamw => of!(AdamW, adam),
            OptimizerName::Lamb => of!(Lamb, lamb),
            OptimizerName::Lion => of!(Lion, lion),
            OptimizerName::Sgd => of!(Sgd, sgd),
        }
    }};
}

impl OptimizerOptions {
    /// The state before the first step.
    pub(crate) fn first_state(self, store: &VarStore) -> Result<OptimizerState, TorchError> {
        with_named!(self, make => make(parameters(store).into()).map(|optimizer| optimizer.state()))
    }
}

/// Adds the optimizer for all parameters of `store` to the trainer.
pub(crate) fn with_optimizer<'a, M: Model<B> + ?Sized, B: Batch>(
    trainer: DistTrainer<'a, M, B>,
    store: &VarStore,
    precision: Precision,
    options: OptimizerOptions,
) -> Result<DistTrainer<'a, M, B>, TorchError> {
    let master = options.master;
    with_named!(options, make => precision.with_optimizer(trainer, store, master, make))
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
