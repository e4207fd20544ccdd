//! From NJUNMT's keys to what a trainer is given.

use anyhow::Context;
use drumline::trainer::{
    BatchMetric, CrossEntropy, DistTrainer, LearningRate, Loss, ReduceOnPlateau, Supervised,
};
use drumline::{At, Cause, InverseSqrt, LrPolicy, LrSchedule, Noam};
use tch::Tensor;
use tch::nn::VarStore;

use super::bitext::{Codecs, NumberedPairs};
use super::config::{NmtConfig, ScheduleMethod};
use crate::error::ZooError;
use crate::models::transformer::{NormPlace, Specials, Transformer, TransformerOptions};
use crate::optimizer::OptimizerKeys;
use crate::precision::Numbers;

/// What NJUNMT multiplies Noam's learning rate by.
const NOAM: f64 = 10.0;

/// The network, with its first weights.
pub(crate) fn transformer(
    config: &NmtConfig,
    codecs: &Codecs,
    store: &VarStore,
) -> Result<Transformer, ZooError> {
    let model = &config.model;
    let options = TransformerOptions {
        n_layers: model.n_layers as i64,
        n_head: model.n_head as i64,
        d_word_vec: model.d_word_vec as i64,
        d_model: model.d_model as i64,
        d_inner_hid: model.d_inner_hid as i64,
        dropout: model.dropout,
        proj_share_weight: model.proj_share_weight,
        share_embeddings: model.share_embeddings,
        norm: NormPlace::Before,
        src_vocab: codecs.source.vocabulary().len() as i64,
        tgt_vocab: codecs.target.vocabulary().len() as i64,
        pad: Specials::default().pad,
    };
    Transformer::new(&store.root(), &options)
}

/// What trains translations.
pub(crate) type NmtTrainer<'a> = DistTrainer<'a, Transformer, NumberedPairs>;

/// The optimizer that the keys ask for.
pub(crate) fn optimizer_keys(config: &NmtConfig) -> OptimizerKeys {
    let (keys, params) = (&config.optimizer, &config.optimizer_params);
    OptimizerKeys {
        name: keys.optimizer,
        lr: keys.learning_rate,
        weight_decay: keys.weight_decay,
        momentum: params.momentum,
        betas: (params.betas[0], params.betas[1]),
        eps: params.eps,
        numbers: Numbers::of(config.run.precision, &config.fp16),
    }
}

/// With what sets the learning rate, if anything does.
pub(crate) fn with_learning_rate<'a>(
    trainer: NmtTrainer<'a>,
    config: &NmtConfig,
) -> anyhow::Result<NmtTrainer<'a>> {
    let (base, scheduler) = (config.optimizer.learning_rate, &config.scheduler);
    let (min_lr, warmup_steps) = (scheduler.min_lr.max(0.0), scheduler.warmup_steps);
    let policy = match config.optimizer.schedule_method {
        None => return Ok(trainer),
        Some(ScheduleMethod::Loss) => {
            let plateau = ReduceOnPlateau::patience(scheduler.patience).scale(scheduler.scale);
            let plateau = plateau.min_lr(min_lr).every(config.training.loss_valid_freq);
            return Ok(trainer.callback(plateau));
        }
        Some(ScheduleMethod::Linear) => {
            let schedule = linear(base, min_lr, scheduler.decay_steps)?;
            return Ok(trainer.callback(LearningRate::by(schedule)));
        }
        Some(ScheduleMethod::Noam) => {
            let d_model = scheduler.d_model.unwrap_or(config.model.d_model) as u64;
            LrPolicy::Noam(Noam { d_model, warmup_steps, factor: NOAM, min_lr })
        }
        Some(ScheduleMethod::Isqrt) => LrPolicy::InverseSqrt(InverseSqrt {
            warmup_steps,
            // NJUNMT's never falls without.
            decay_steps: Some(scheduler.decay_steps.unwrap_or(u64::MAX)),
            init_lr: scheduler.init_lr,
            min_lr,
        }),
    };
    Ok(trainer.callback(LearningRate::by(LrSchedule::new(base, policy)?)))
}

/// Evenly from the base to the least, which it has at the last step.
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

/// Label-smoothed cross-entropy, added up over the words of a sentence, and then a mean over sentences, or over words (`norm_by_words`).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TranslationLoss {
    words: CrossEntropy,
    by_words: bool,
}

impl TranslationLoss {
    /// As the keys say.
    pub fn new(config: &NmtConfig) -> Self {
        let words = CrossEntropy { label_smoothing: config.model.label_smoothing, ..CrossEntropy::default() };
        Self { words, by_words: config.training.norm_by_words }
    }
}

impl Loss<NumberedPairs, Tensor> for TranslationLoss {
    fn sum(&self, output: &Tensor, batch: &NumberedPairs) -> Result<Tensor, Cause> {
        self.words.sum(output, batch)
    }

    fn count(&self, batch: &NumberedPairs) -> Result<f64, Cause> {
        match self.by_words {
            true => Ok(batch.target().numel() as f64),
            false => Ok(batch.indices.len() as f64),
        }
    }
}

/// Words of the target that a step learns from, on all ranks.
#[derive(Debug, Default)]
pub(crate) struct Words(f64);

impl BatchMetric<NumberedPairs, Tensor> for Words {
    fn update(&mut self, _: &Tensor, batch: &NumberedPairs) -> Result<(), Cause> {
        self.0 += batch.target().numel() as f64;
        Ok(())
    }

    fn sums(&self) -> Vec<f64> {
        vec![self.0]
    }

    fn value_of(&self, sums: &[f64]) -> f64 {
        sums[0]
    }

    fn reset(&mut self) {
        self.0 = 0.0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_falls_evenly() {
        let rate = linear(1.0, 0.2, Some(4)).unwrap();
        let rates: Vec<_> = (0..5).map(|step| rate(At { epoch: 0.0, step })).collect();
        for (rate, expected) in rates.iter().zip([0.8, 0.6, 0.4, 0.2, 0.2]) {
            assert!((rate - expected).abs() < 1e-12, "{rates:?}");
        }
        let refused = linear(1.0, 0.2, None).err().unwrap().to_string();
        assert!(refused.contains("decay_steps is not given"), "{refused}");
    }
}
