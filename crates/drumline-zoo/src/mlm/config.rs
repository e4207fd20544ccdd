//! The configuration of a run that trains a BERT.

use std::collections::BTreeSet;
use std::path::PathBuf;

use super::data::MaskedData;
use crate::config::check::invalid;
use crate::config::section::section;
use crate::config::table::{Table, sections, task_table};
use crate::config::{ConfigError, Cuts, Heads, Method, Optim, SharedKeys, Test, Train, WarmupOptim};
use crate::models::bert::{BertOptions, num_layers};
use crate::text::config::Text;

section! {
    /// `MLM`: how words are masked.
    Mlm "MLM" {
        /// Fraction of the words of each text that is predicted: of these 80 % are masked, 10 % replaced and 10 %
        /// unchanged
        "PROBABILITY" probability: f64 = 0.15;
    }
}

section! {
    /// `MODEL`: the initial weights.
    FirstWeights "MODEL" {
        /// safetensors file with initial weights, with Hugging Face's names
        "WEIGHTS" weights: Option<PathBuf> = None;
    }
}

/// All keys of a run that trains a BERT, by section.
///
/// ```
/// use drumline_zoo::mlm::MlmConfig;
///
/// let config = MlmConfig::load(None, &["TEXT.TRAIN", "a.csv", "MODEL.NUM_HIDDEN_LAYERS", "2"])?;
/// assert_eq!(config.model.num_hidden_layers, 2);
/// # Ok::<(), drumline_zoo::config::ConfigError>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct MlmConfig {
    /// `MLM`
    pub mlm: Mlm,
    /// `TEXT`
    pub text: Text,
    /// `MODEL`
    pub model: BertOptions,
    /// `MODEL`, beside its sizes
    pub first: FirstWeights,
    /// `OPTIM`, beside the shared keys
    pub method: Method,
    /// The learning rate of `OPTIM`
    pub optim: WarmupOptim,
    /// The sections that every task has
    pub shared: SharedKeys,
}

impl Default for MlmConfig {
    fn default() -> Self {
        let grad_clip = Some(1.0);
        let optim = Optim { max_epoch: 10, base_lr: 5e-4, weight_decay: 0.01, grad_clip, ..Optim::default() };
        let test = Test { print_freq: Train::default().print_freq, ..Test::default() };
        Self {
            mlm: Mlm::default(),
            text: Text::default(),
            model: BertOptions::default(),
            first: FirstWeights::default(),
            method: Method::default(),
            optim: WarmupOptim::default(),
            shared: SharedKeys { test, optim, ..SharedKeys::default() },
        }
    }
}

task_table!(MlmConfig, "A BERT, by masked language modelling: drumline train");

impl Table for MlmConfig {
    sections!(
        mlm,
        text,
        model,
        first,
        shared.train,
        shared.test,
        shared.optim,
        method,
        optim,
        shared.fp16,
        shared.parallel,
        shared.run
    );

    fn settle(&mut self, given: &BTreeSet<String>) {
        self.text.settle();
        self.shared.settle_print_freq(given);
        self.method.settle(given);
    }

    fn check(&self) -> Result<(), ConfigError> {
        self.shared.check()?;
        let count = self.model.num_attention_heads;
        let heads = Heads { key: "MODEL.NUM_ATTENTION_HEADS", count, has_cp: false };
        let cuts = Cuts { heads: Some(heads), layers: Some(num_layers(self.model.num_hidden_layers)) };
        self.shared.parallel.check_model(cuts)?;
        self.method.check(&self.shared)?;
        self.optim.check()?;
        self.text.check(&self.shared)?;
        let Self { mlm: Mlm { probability }, model, .. } = self;
        if !(*probability > 0.0 && *probability <= 1.0) {
            return invalid("MLM.PROBABILITY", format!("is {probability}; try more than 0, up to 1"));
        }
        let (places, added) = (model.max_position_embeddings, MaskedData::ADDED);
        if places <= added {
            let what =
                format!("is {places}, which leaves no place for a word beside {added} tokens; try more");
            return invalid("MODEL.MAX_POSITION_EMBEDDINGS", what);
        }
        model.check().or_else(|error| invalid("MODEL:", error.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::table::assert_in_guide;

    #[test]
    fn invalid_values_are_refused_with_advice() {
        for (pairs, words) in [
            (&[][..], "TEXT.TRAIN is not given"),
            (&["TEXT.TRAIN", "a", "MLM.PROBABILITY", "0"], "MLM.PROBABILITY is 0; try more than 0, up to 1"),
            (&["TEXT.TRAIN", "a", "TRAIN.EVAL_FREQ", "10"], "TEXT.DEV is not given"),
            (
                &["TEXT.TRAIN", "a", "MODEL.NUM_ATTENTION_HEADS", "7"],
                "MODEL: hidden_size 512 cannot be split among 7 heads",
            ),
            (
                &["TEXT.TRAIN", "a", "MODEL.MAX_POSITION_EMBEDDINGS", "2"],
                "MODEL.MAX_POSITION_EMBEDDINGS is 2, which leaves no place for a word",
            ),
            (&["TEXT.TRAIN", "a", "TEXT.LABEL", "x"], "unknown key TEXT.LABEL"),
        ] {
            let said = MlmConfig::load(None, pairs).unwrap_err().to_string();
            assert!(said.contains(words), "{pairs:?}: {said}");
        }
    }

    #[test]
    fn the_guide_has_every_key_with_its_default() {
        assert_in_guide::<MlmConfig>("docs/bert.md");
    }
}
