//! The learning rate schedules of NJUNMT.

use anyhow::Context;
use drumline::schedule::{At, InverseSqrt, LrPolicy, LrSchedule, Noam, ReduceOnPlateau};
use drumline::trainer::DistTrainer;

use super::bitext::NumberedPairs;
use super::config::{NmtConfig, ScheduleMethod};
use crate::config::NamedSchedule;
use crate::models::Net;
use crate::models::transformer::Transformer;

/// NJUNMT multiplies Noam's learning rate by this factor.
const NOAM: f64 = 10.0;

type NmtTrainer<'a> = DistTrainer<'a, Net<Transformer, NumberedPairs>, NumberedPairs>;

/// Adds the learning rate schedule to the trainer, if one is configured.
pub(crate) fn with_learning_rate<'a>(
    trainer: NmtTrainer<'a>,
    config: &NmtConfig,
) -> anyhow::Result<NmtTrainer<'a>> {
    if let Some(plan) = &config.optimizer.scheduler {
        return Ok(trainer.schedule(NamedSchedule::new(plan.clone())));
    }
    let (base, scheduler) = (config.optimizer.learning_rate, &config.scheduler);
    let (min_lr, warmup_steps) = (scheduler.min_lr.max(0.0), scheduler.warmup_steps);
    let policy = match config.optimizer.schedule_method {
        None => return Ok(trainer),
        Some(ScheduleMethod::Loss) => {
            let plateau = ReduceOnPlateau::patience(scheduler.patience).scale(scheduler.scale);
            let plateau = plateau.min_lr(min_lr).every(config.training.loss_valid_freq);
            return Ok(trainer.schedule(plateau));
        }
        Some(ScheduleMethod::Linear) => {
            let schedule = linear(base, min_lr, scheduler.decay_steps)?;
            return Ok(trainer.schedule(schedule));
        }
        Some(ScheduleMethod::Noam) => {
            let d_model = scheduler.d_model.unwrap_or(config.model.d_model) as u64;
            LrPolicy::Noam(Noam { d_model, warmup_steps, factor: NOAM, min_lr })
        }
        Some(ScheduleMethod::Isqrt) => LrPolicy::InverseSqrt(InverseSqrt {
            warmup_steps,
            // In NJUNMT, the learning rate never falls without `decay_steps`.
            decay_steps: Some(scheduler.decay_steps.unwrap_or(u64::MAX)),
            init_lr: scheduler.init_lr,
            min_lr,
        }),
    };
    Ok(trainer.schedule(LrSchedule::new(base, policy)?))
}

/// Falls linearly from the base learning rate to `min_lr`, which it reaches at the last step.
fn linear(base: f64, min_lr: f64, decay_steps: Option<u64>) -> anyhow::Result<impl Fn(At) -> f64> {
    let steps = decay_steps.filter(|steps| *steps > 0).context(
        "optimizer_configs.scheduler_configs.decay_steps is not given, and schedule_method linear needs it; try the number \
         of all steps",
    )?;
    Ok(move |at: At| {
        let left = 1.0 - (at.step + 1) as f64 / steps as f64;
        (base - min_lr) * left.max(0.0) + min_lr
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_linear_schedule_falls_to_its_minimum() {
        let rate = linear(1.0, 0.2, Some(4)).unwrap();
        let rates: Vec<_> = (0..5).map(|step| rate(At { step, ..At::default() })).collect();
        for (rate, expected) in rates.iter().zip([0.8, 0.6, 0.4, 0.2, 0.2]) {
            assert!((rate - expected).abs() < 1e-12, "{rates:?}");
        }
        let refused = linear(1.0, 0.2, None).err().unwrap().to_string();
        assert!(refused.contains("decay_steps is not given"), "{refused}");
    }
}
