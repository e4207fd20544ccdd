//! The configuration of a run that trains a GPT.

use std::collections::BTreeSet;
use std::path::PathBuf;

use crate::config::check::{at_least_1, invalid};
use crate::config::section::section;
use crate::config::table::{Table, sections, task_table};
use crate::config::{
    AfterWarmup, ConfigError, Cuts, Heads, Method, Optim, PrecisionKind, SharedKeys, Test, Train, WarmupOptim,
};
use crate::models::Checkpointing;
use crate::models::gpt::{GptOptions, num_layers};

section! {
    /// `GPT`: files of tokens.
    Tokens "GPT" {
        /// Training file, made by drumline data tokens
        "TRAIN" train: PathBuf = PathBuf::new();
        /// Evaluation file
        "DEV" dev: Option<PathBuf> = None;
        /// Tokenizer of the files: bytes, a tokenizer.json, or a folder with one or with vocab.json and merges.txt
        "TOKENIZER" tokenizer: PathBuf = "bytes".into();
    }
}

section! {
    /// `MODEL`: the network.
    GptModel "MODEL" {
        /// Number of blocks
        "N_LAYER" n_layer: usize = 12;
        /// Number of attention heads
        "N_HEAD" n_head: usize = 12;
        /// Size of the hidden states
        "N_EMBD" n_embd: usize = 768;
        /// Context length, in tokens
        "BLOCK" block: usize = 1024;
        /// The rows of the embedding are padded to a multiple of this; 64 or 128 is fast on GPUs, and our loss kernels
        /// need a multiple of 8
        "VOCAB_MULTIPLE" vocab_multiple: usize = 1;
        /// Probability of dropout
        "DROPOUT" dropout: f64 = 0.0;
        /// Chunks in which the loss of a batch is computed, which saves the memory of its logits; 1 is the fastest on a
        /// GPU
        "LOSS_CHUNKS" loss_chunks: usize = 1;
        /// Activation checkpointing: none, full, selective, offload, or N for every Nth block
        "CHECKPOINT" checkpoint: Checkpointing = Checkpointing::None;
        /// safetensors file with initial weights, with Hugging Face's names
        "WEIGHTS" weights: Option<PathBuf> = None;
    }
}

/// All keys of a run that trains a GPT, by section.
///
/// ```
/// use drumline_zoo::gpt::GptConfig;
///
/// let config = GptConfig::load(None, &["GPT.TRAIN", "a.tokens", "MODEL.N_LAYER", "2"])?;
/// assert_eq!(config.model.options(257).n_layer, 2);
/// let error = GptConfig::load(None, &["GPT.TRIAN", "a.tokens"]).unwrap_err();
/// assert!(error.to_string().ends_with("unknown key GPT.TRIAN; try GPT.TRAIN"));
/// # Ok::<(), drumline_zoo::config::ConfigError>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct GptConfig {
    /// `GPT`
    pub tokens: Tokens,
    /// `MODEL`
    pub model: GptModel,
    /// `OPTIM`, beside the shared keys
    pub method: Method,
    /// The learning rate of `OPTIM`
    pub optim: WarmupOptim,
    /// The sections that every task has
    pub shared: SharedKeys,
}

impl Default for GptConfig {
    fn default() -> Self {
        let train = Train { batch_size: 16, print_freq: 20, ..Train::default() };
        let test = Test { batch_size: 16, print_freq: train.print_freq };
        let optim = Optim {
            max_epoch: 1,
            base_lr: 6e-4,
            min_lr: 0.1,
            weight_decay: 0.1,
            grad_clip: Some(1.0),
            ..Optim::default()
        };
        Self {
            tokens: Tokens::default(),
            model: GptModel::default(),
            method: Method { betas: vec![0.9, 0.95], ..Method::default() },
            optim: WarmupOptim { warmup: 0.05, schedule: AfterWarmup::Cosine },
            shared: SharedKeys { train, test, optim, ..SharedKeys::default() },
        }
    }
}

task_table!(GptConfig, "A GPT: drumline train");

impl Table for GptConfig {
    sections!(
        tokens,
        model,
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
        self.shared.settle_print_freq(given);
        self.method.settle(given);
    }

    fn check(&self) -> Result<(), ConfigError> {
        self.shared.check()?;
        self.method.check(&self.shared)?;
        self.optim.check()?;
        self.check_model()?;
        if self.tokens.train.as_os_str().is_empty() {
            let what = "is not given; try the path of a file that drumline data tokens has made";
            return invalid("GPT.TRAIN", what);
        }
        if self.tokens.dev.is_none() { self.shared.check_evaluates("GPT.DEV") } else { Ok(()) }
    }
}

impl GptModel {
    /// The model options for a vocabulary of `vocab_size` tokens.
    pub fn options(&self, vocab_size: u32) -> GptOptions {
        GptOptions {
            n_layer: self.n_layer as i64,
            n_head: self.n_head as i64,
            n_embd: self.n_embd as i64,
            n_positions: self.block as i64,
            vocab_size: i64::from(vocab_size),
            vocab_multiple: self.vocab_multiple as i64,
            dropout: self.dropout,
            loss_chunks: self.loss_chunks as i64,
            checkpoint: self.checkpoint,
        }
    }
}

impl GptConfig {
    fn check_model(&self) -> Result<(), ConfigError> {
        let (model, parallel) = (&self.model, &self.shared.parallel);
        let heads = Heads { key: "MODEL.N_HEAD", count: model.n_head, has_cp: true };
        parallel.check_model(Cuts { heads: Some(heads), layers: Some(num_layers(model.n_layer)) })?;
        if parallel.cp > 1 && model.dropout > 0.0 {
            let (dropout, cp) = (model.dropout, parallel.cp);
            let what = format!("is {dropout}, which ring attention with PARALLEL.CP {cp} has not; try 0");
            return invalid("MODEL.DROPOUT", what);
        }
        if self.shared.run.precision == PrecisionKind::Fp16 && model.loss_chunks > 1 {
            let chunks = model.loss_chunks;
            let what = format!("is {chunks}, expected 1 with PRECISION fp16; try bf16, or smaller batches");
            return invalid("MODEL.LOSS_CHUNKS", what);
        }
        at_least_1(&[
            ("MODEL.N_LAYER", model.n_layer as u64),
            ("MODEL.N_HEAD", model.n_head as u64),
            ("MODEL.N_EMBD", model.n_embd as u64),
            ("MODEL.BLOCK", model.block as u64),
            ("MODEL.VOCAB_MULTIPLE", model.vocab_multiple as u64),
            ("MODEL.LOSS_CHUNKS", model.loss_chunks as u64),
        ])?;
        // Checks the sizes. The number of tokens is not known yet, and any number will do.
        match model.options(2).check() {
            Ok(()) => Ok(()),
            Err(error) => invalid("MODEL:", error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::config::table::assert_in_guide;

    #[test]
    fn invalid_values_are_refused_with_advice() {
        for (pairs, words) in [
            (&[][..], "GPT.TRAIN is not given"),
            (&["GPT.TRAIN", "a", "TRAIN.EVAL_FREQ", "10"], "GPT.DEV is not given"),
            (&["GPT.TRAIN", "a", "TRAIN.SAVE_FREQ", "0"], "TRAIN.SAVE_FREQ is 0; try 1 or more"),
            (&["GPT.TRAIN", "a", "MODEL.N_HEAD", "5"], "MODEL: n_embd 768 cannot be split among 5 heads"),
            (&["GPT.TRAIN", "a", "MODEL.LOSS_CHUNKS", "0"], "MODEL.LOSS_CHUNKS is 0; try 1 or more"),
            (
                &["GPT.TRAIN", "a", "MODEL.LOSS_CHUNKS", "4", "PRECISION", "fp16"],
                "expected 1 with PRECISION fp16",
            ),
            (&["GPT.TRAIN", "a", "OPTIM.BETAS", "[0.9]"], "OPTIM.BETAS is [0.9]; try two"),
            (&["GPT.TRAIN", "a", "OPTIM.GRAD_CLIP", "0"], "OPTIM.GRAD_CLIP is 0; try more than 0"),
            (&["GPT.TRAIN", "a", "OPTIM.SCHEDULE", "noam"], "expected linear, cosine or constant, got noam"),
        ] {
            let said = GptConfig::load(None, pairs).unwrap_err().to_string();
            assert!(said.contains(words), "{pairs:?}: {said}");
        }
        let config = GptConfig::load(None, &["GPT.TRAIN", "a"]).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("c.yaml");
        std::fs::write(&path, config.to_yaml()).unwrap();
        assert_eq!(
            GptConfig::load::<&str>(Some(&path), &[]).unwrap(),
            config,
            "a saved configuration is read back"
        );
    }

    #[test]
    fn the_gpt2_config_matches_the_gpu_benchmark() {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../config/gpt2.yaml");
        let config = GptConfig::load::<&str>(Some(&file), &[]).unwrap();
        let options = config.model.options(50257);
        assert_eq!((config.shared.run.precision, options.loss_chunks), (PrecisionKind::Bf16Master, 1));
        assert_eq!(options.padded_vocab(), 50304, "a multiple of what a thread of the loss's kernels reads");
        let GptOptions { vocab_multiple, .. } = options;
        assert_eq!(
            options,
            GptOptions { vocab_multiple, ..GptOptions::default() },
            "otherwise GPT-2's sizes"
        );
    }

    #[test]
    fn the_guide_has_every_key_with_its_default() {
        assert_in_guide::<GptConfig>("docs/gpt.md");
    }
}
