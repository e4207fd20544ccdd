//! SGD and its learning rate, from `OPTIM`.

use drumline::{Distribuuuu, EpochCurve, LrSchedule};
use drumline_torch::{Sgd, SgdOptions, parameters};
use tch::nn::VarStore;

use crate::config::{LrPolicy, Optim};

/// Trains all parameters of `store`.
pub(in crate::program) fn sgd(store: &VarStore, optim: &Optim) -> anyhow::Result<Sgd> {
    Ok(Sgd::new(parameters(store), sgd_options(optim))?)
}

/// As the keys say.
pub(in crate::program) fn sgd_options(optim: &Optim) -> SgdOptions {
    SgdOptions {
        lr: optim.base_lr,
        momentum: optim.momentum,
        dampening: optim.dampening,
        nesterov: optim.nesterov,
        weight_decay: optim.weight_decay,
        ..SgdOptions::default()
    }
}

/// The learning rate of each epoch.
pub(in crate::program) fn schedule(optim: &Optim) -> anyhow::Result<LrSchedule> {
    let policy = Distribuuuu {
        lr_policy: match optim.lr_policy {
            LrPolicy::Cos => EpochCurve::Cos,
            LrPolicy::Steps => EpochCurve::Steps,
        },
        max_epoch: optim.max_epoch,
        min_lr: optim.min_lr,
        steps: optim.steps.clone(),
        lr_mult: optim.lr_mult,
        warmup_factor: optim.warmup_factor,
        warmup_epochs: optim.warmup_epochs,
    };
    Ok(LrSchedule::new(optim.base_lr, drumline::LrPolicy::Distribuuuu(policy))?)
}

#[cfg(test)]
mod tests {
    use drumline::{At, Schedule};

    use super::*;

    #[test]
    fn the_rate_warms_up_and_falls() {
        let optim = Optim { base_lr: 0.2, max_epoch: 100, ..Optim::default() };
        let rate = |optim: &Optim, epoch: f64| schedule(optim).unwrap().lr(At { epoch, step: 0 });
        assert!((rate(&optim, 0.0) - 0.02).abs() < 1e-12);
        assert!((rate(&optim, 50.0) - 0.1).abs() < 1e-12);
        let steps = Optim { lr_policy: LrPolicy::Steps, steps: vec![0, 30, 60], ..optim };
        assert!((rate(&steps, 30.0) - 0.02).abs() < 1e-12);
    }
}
