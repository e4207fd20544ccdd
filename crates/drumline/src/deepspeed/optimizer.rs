//! The optimizer that a configuration names, and what an optimizer of the program fills in.

use drumline_torch::{
    Adagrad, AdagradOptions, Adam, AdamOptions, AdamW, BiasCorrection, Lamb, LambOptions, Lion, LionOptions,
    MasterWeights, Optimizer, ParameterGroups, Sgd, SgdOptions, TorchError, parameters, weights_in,
};
use tch::Kind;
use tch::nn::VarStore;

use crate::config::deepspeed::{
    AdagradPlan, AdamPlan, Argument, Betas, Compute, DeepSpeedPlan, Given, LambPlan, LionPlan, OptimizerPlan,
    SgdPlan,
};

/// An optimizer of any type.
pub(super) type AnyOptimizer = Box<dyn Optimizer>;

/// Makes the optimizer of a plan for all parameters. With bf16 the weights become bf16, and the optimizer steps f32
/// copies of them.
pub(super) fn make(plan: &DeepSpeedPlan, store: &VarStore) -> Result<Option<AnyOptimizer>, TorchError> {
    let Some(optimizer) = plan.optimizer else { return Ok(None) };
    let has_16_bit_weights = plan
        .precision
        .is_some_and(|precision| precision.has_16_bit_weights && precision.compute == Compute::Bf16);
    if !has_16_bit_weights {
        return made(optimizer, parameters(store).into()).map(Some);
    }
    weights_in(&parameters(store), Kind::BFloat16)?;
    let with_copies = MasterWeights::new(parameters(store), |copies| made(optimizer, copies))?;
    Ok(Some(Box::new(with_copies)))
}

fn made(plan: OptimizerPlan, parameters: ParameterGroups) -> Result<AnyOptimizer, TorchError> {
    Ok(match plan {
        OptimizerPlan::Adagrad(plan) => {
            let AdagradPlan { lr, lr_decay, weight_decay, initial_accumulator_value, eps } = plan;
            let options = AdagradOptions {
                lr,
                lr_decay,
                weight_decay,
                initial_accumulator_value,
                eps,
                ..AdagradOptions::default()
            };
            Box::new(Adagrad::new(parameters, options)?)
        }
        OptimizerPlan::Adam(plan) if plan.is_decoupled => Box::new(AdamW::new(parameters, adam(plan))?),
        OptimizerPlan::Adam(plan) => Box::new(Adam::new(parameters, adam(plan))?),
        OptimizerPlan::Sgd(SgdPlan { lr, momentum, dampening, nesterov, weight_decay }) => {
            let options =
                SgdOptions { lr, momentum, dampening, nesterov, weight_decay, ..SgdOptions::default() };
            Box::new(Sgd::new(parameters, options)?)
        }
        OptimizerPlan::Lamb(LambPlan { lr, betas, eps, weight_decay, max_coeff, min_coeff }) => {
            let bias_correction = BiasCorrection::StepSize;
            let options = LambOptions {
                lr,
                betas,
                eps,
                weight_decay,
                min_coeff,
                max_coeff,
                bias_correction,
                ..LambOptions::default()
            };
            Box::new(Lamb::new(parameters, options)?)
        }
        OptimizerPlan::Lion(LionPlan { lr, betas, weight_decay }) => Box::new(Lion::new(
            parameters,
            LionOptions { lr, betas, weight_decay, ..LionOptions::default() },
        )?),
    })
}

fn adam(AdamPlan { lr, betas, eps, weight_decay, amsgrad, .. }: AdamPlan) -> AdamOptions {
    let weight_decay = Some(weight_decay);
    AdamOptions { lr, betas, eps, weight_decay, amsgrad, ..AdamOptions::default() }
}

/// Fills what the program's own optimizer says into what is not given otherwise.
pub(super) fn fill_from(given: &mut Given, optimizer: &dyn Optimizer) {
    let state = optimizer.state();
    let setting = |name: &str| state.scalars.get(name).copied();
    let named = |what: &str, value: f64| Argument::given(format!("the optimizer's {what}"), value);
    given.lr.get_or_insert_with(|| named("lr", optimizer.lr()));
    if let Some(value) = setting("weight_decay") {
        given.weight_decay.get_or_insert_with(|| named("weight_decay", value));
    }
    if let Some(value) = setting("eps") {
        given.eps.get_or_insert_with(|| named("eps", value));
    }
    if let Some(value) = setting("momentum") {
        given.momentum.get_or_insert_with(|| named("momentum", value));
    }
    if let Some((first, second)) = setting("beta1").zip(setting("beta2")) {
        let betas = || Argument::given("the optimizer's betas", Betas(first, second));
        given.betas.get_or_insert_with(betas);
    }
}
