//! The translation loss, and the number of target words.

use drumline::data::Cause;
use drumline::trainer::{BatchMetric, CrossEntropy, Loss, Supervised};
use tch::Tensor;

use super::bitext::NumberedPairs;
use super::config::NmtConfig;
use crate::models::Logits;
use crate::words::WordLoss;

/// Label-smoothed cross-entropy, summed over the words of a sentence. The mean is over sentences, or over words with
/// `norm_by_words`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TranslationLoss {
    words: WordLoss,
    by_words: bool,
}

impl TranslationLoss {
    /// The loss that a configuration asks for.
    pub fn new(config: &NmtConfig) -> Self {
        let words = CrossEntropy { label_smoothing: config.model.label_smoothing, ..CrossEntropy::default() };
        Self { words: WordLoss(words), by_words: config.training.norm_by_words }
    }
}

impl Loss<NumberedPairs, Logits> for TranslationLoss {
    fn sum(&self, output: &Logits, batch: &NumberedPairs) -> Result<Tensor, Cause> {
        self.words.sum(output, batch)
    }

    fn count(&self, batch: &NumberedPairs) -> Result<f64, Cause> {
        let count = if self.by_words { batch.target().numel() } else { batch.indices.len() };
        Ok(count as f64)
    }
}

/// A metric: the number of target words in a step, over all ranks.
#[derive(Debug, Default)]
pub(crate) struct TargetWords(f64);

impl BatchMetric<NumberedPairs, Logits> for TargetWords {
    fn update(&mut self, _: &Logits, batch: &NumberedPairs) -> Result<(), Cause> {
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
