//! The SGD options and the learning rate schedule of `OPTIM`.

use drumline::schedule::{Distribuuuu, EpochCurve, LrSchedule};
use drumline_torch::SgdOptions;

use super::config::{ImageConfig, ImageOptim};
use crate::config::{LrPolicy, Optim};

pub(super) fn sgd_options(config: &ImageConfig) -> SgdOptions {
    let Optim { base_lr: lr, momentum, weight_decay, .. } = config.shared.optim;
    let ImageOptim { dampening, nesterov, .. } = config.optim;
    SgdOptions { lr, momentum, dampening, nesterov, weight_decay, ..SgdOptions::default() }
}

/// The learning rate of each epoch.
pub(super) fn schedule(config: &ImageConfig) -> anyhow::Result<LrSchedule> {
    let (optim, shared) = (&config.optim, &config.shared.optim);
    let policy = Distribuuuu {
        lr_policy: match optim.lr_policy {
            LrPolicy::Cos => EpochCurve::Cos,
            LrPolicy::Steps => EpochCurve::Steps,
        },
        max_epoch: shared.max_epoch,
        min_lr: shared.min_lr,
        steps: optim.steps.clone(),
        lr_mult: optim.lr_mult,
        warmup_factor: optim.warmup_factor,
        warmup_epochs: optim.warmup_epochs,
    };
    Ok(LrSchedule::new(shared.base_lr, drumline::schedule::LrPolicy::Distribuuuu(policy))?)
}

#[cfg(test)]
mod tests {
    use drumline::schedule::{At, Schedule};

    use super::*;

    #[test]
    fn the_learning_rate_warms_up_and_then_decays() {
        let cos = ImageConfig::load(None, &["OPTIM.BASE_LR", "0.2", "OPTIM.MAX_EPOCH", "100"]).unwrap();
        let rate =
            |config: &ImageConfig, epoch: f64| schedule(config).unwrap().lr(At { epoch, ..At::default() });
        assert!((rate(&cos, 0.0) - 0.02).abs() < 1e-12);
        assert!((rate(&cos, 50.0) - 0.1).abs() < 1e-12);
        let mut steps = cos;
        (steps.optim.lr_policy, steps.optim.steps) = (LrPolicy::Steps, vec![0, 30, 60]);
        assert!((rate(&steps, 30.0) - 0.02).abs() < 1e-12);
    }
}
