//! The configuration of a run that trains a GPT. Keys that pictures have as well mean the same as there.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crate::config::check::{at_least_1, unfit};
use crate::config::section::{Section, section};
use crate::config::setting::choice;
use crate::config::table::{self, Table};
use crate::config::{ConfigError, Entry, Fp16, PrecisionKind, Run};
use crate::models::gpt::GptOptions;

choice! {
    /// What the learning rate does after the warm-up.
    AfterWarmup, "cosine or constant" {
        /// Falls by half a cosine to a part of itself.
        Cosine = "cosine",
        /// Stays.
        Constant = "constant",
    }
}

section! {
    /// `GPT`: files of tokens.
    Tokens "GPT" {
        /// File to train on, of drumline data tokens
        "TRAIN" train: PathBuf = PathBuf::new();
        /// File to evaluate on
        "DEV" dev: Option<PathBuf> = None;
        /// What made the tokens: bytes, a tokenizer.json, or a folder with one or with vocab.json and merges.txt
        "TOKENIZER" tokenizer: PathBuf = "bytes".into();
    }
}

section! {
    /// `MODEL`: the network.
    GptModel "MODEL" {
        /// Blocks
        "N_LAYER" n_layer: usize = 12;
        /// Heads of attention
        "N_HEAD" n_head: usize = 12;
        /// Size of the vectors between blocks
        "N_EMBD" n_embd: usize = 768;
        /// Tokens of a window: as far as the model sees
        "BLOCK" block: usize = 1024;
        /// Rows of the embedding are made a multiple of this; GPUs like 64 or 128, and need 8 for our kernels of the loss
        "VOCAB_MULTIPLE" vocab_multiple: usize = 1;
        /// Probability of dropout
        "DROPOUT" dropout: f64 = 0.0;
        /// Parts in which the loss of a batch is computed, so that its logits need not be there all at once; 1 is the fastest on a GPU
        "LOSS_CHUNKS" loss_chunks: usize = 1;
        /// safetensors file with the first weights, by Hugging Face's names
        "WEIGHTS" weights: Option<PathBuf> = None;
    }
}

section! {
    /// `TRAIN`: how it is trained.
    GptTrain "TRAIN" {
        /// Windows in a batch of each rank
        "BATCH_SIZE" batch_size: usize = 16;
        /// Windows begin at other tokens in each epoch, and come in a new order; else as they lie in the file
        "SHUFFLE" shuffle: bool = true;
        /// Batches whose gradients are added up before each step, on each rank
        "ACCUMULATE" accumulate: usize = 1;
        /// Go on from the last checkpoint in OUT_DIR
        "AUTO_RESUME" auto_resume: bool = true;
        /// Resume although the data set is another than at the checkpoint, by its length or fingerprint
        "ACCEPT_NEW_DATA" accept_new_data: bool = false;
        /// Threads that make batches, for each rank
        "WORKERS" workers: usize = 1;
        /// Page-locked batches, for GPUs
        "PIN_MEMORY" pin_memory: bool = true;
        /// Steps from one line of progress to the next
        "PRINT_FREQ" print_freq: usize = 20;
        /// Steps from evaluation to evaluation, and one after the last; null: after each epoch
        "EVAL_FREQ" eval_freq: Option<u64> = None;
        /// Steps from checkpoint to checkpoint; null: after each epoch
        "SAVE_FREQ" save_freq: Option<u64> = None;
        /// Evaluations without a better one before it ends
        "EARLY_STOP" early_stop: Option<u64> = None;
        /// Event files for TensorBoard in OUT_DIR/tensorboard
        "TENSORBOARD" tensorboard: bool = true;
        /// Steps to trace for Perfetto, after the first five, in OUT_DIR/trace
        "TRACE_STEPS" trace_steps: u64 = 0;
        /// Stop after this many steps of the whole run
        "MAX_STEPS" max_steps: Option<u64> = None;
    }
}

section! {
    /// `TEST`: how it is evaluated.
    GptTest "TEST" {
        /// Windows in a batch of each rank
        "BATCH_SIZE" batch_size: usize = 16;
    }
}

section! {
    /// `OPTIM`: AdamW and its learning rate.
    GptOptim "OPTIM" {
        /// Number of epochs
        "MAX_EPOCH" max_epoch: u64 = 1;
        /// Learning rate
        "BASE_LR" base_lr: f64 = 6e-4;
        /// Where cosine ends, as a part of BASE_LR
        "MIN_LR" min_lr: f64 = 0.1;
        /// Part of all steps in which the learning rate grows; from 1 on, so many steps
        "WARMUP" warmup: f64 = 0.05;
        /// What the learning rate does then
        "SCHEDULE" schedule: AfterWarmup = AfterWarmup::Cosine;
        /// How slowly means forget
        "BETAS" betas: Vec<f64> = vec![0.9, 0.95];
        /// Weight decay of matrices; norms and biases have none
        "WEIGHT_DECAY" weight_decay: f64 = 0.1;
        /// Largest norm of the gradient
        "GRAD_CLIP" grad_clip: Option<f64> = Some(1.0);
    }
}

/// All keys of a run that trains a GPT, by section.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct GptConfig {
    /// `GPT`
    pub tokens: Tokens,
    /// `MODEL`
    pub model: GptModel,
    /// `TRAIN`
    pub train: GptTrain,
    /// `TEST`
    pub test: GptTest,
    /// `OPTIM`
    pub optim: GptOptim,
    /// `FP16`
    pub fp16: Fp16,
    /// `OUT_DIR`, `CFG_DEST`, `RNG_SEED`, `DEVICE`
    pub run: Run,
}

impl Table for GptConfig {
    fn sections(&self) -> Vec<&dyn Section> {
        let Self { tokens, model, train, test, optim, fp16, run } = self;
        vec![tokens, model, train, test, optim, fp16, run]
    }

    fn sections_mut(&mut self) -> Vec<&mut dyn Section> {
        let Self { tokens, model, train, test, optim, fp16, run } = self;
        vec![tokens, model, train, test, optim, fp16, run]
    }

    fn settle(&mut self, _: &BTreeSet<String>) {}

    fn check(&self) -> Result<(), ConfigError> {
        self.run.check()?;
        self.fp16.check("PRECISION", self.run.precision)?;
        self.check_sizes()?;
        self.check_optim()?;
        if self.tokens.train.as_os_str().is_empty() {
            return unfit(
                "GPT.TRAIN",
                "is not given; try the path of a file that drumline data tokens has made",
            );
        }
        if self.tokens.dev.is_none() && (self.train.early_stop.is_some() || self.train.eval_freq.is_some()) {
            return unfit("GPT.DEV", "is not given, and without it nothing is evaluated; try a file");
        }
        // Whatever the number of tokens will be.
        match self.model.options(2).check() {
            Ok(()) => Ok(()),
            Err(error) => unfit("MODEL:", error.to_string()),
        }
    }
}

impl GptModel {
    /// The model for so many tokens.
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
        }
    }
}

impl GptConfig {
    /// The defaults, changed by the file, changed by `KEY VALUE` pairs, and checked.
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
    pub fn load<S: AsRef<str>>(file: Option<&Path>, pairs: &[S]) -> Result<Self, ConfigError> {
        table::load(file, pairs)
    }

    /// As YAML that [`load`](Self::load) reads.
    pub fn to_yaml(&self) -> String {
        table::to_yaml(self)
    }

    /// What a file may hold, as a JSON schema.
    pub fn schema() -> serde_json::Value {
        table::schema::<Self>("A GPT: drumline train")
    }

    /// Every key with its value, what it takes and what it is for.
    pub fn entries(&self) -> Vec<Entry> {
        table::entries(self)
    }

    fn check_sizes(&self) -> Result<(), ConfigError> {
        let Self { train, test, optim, model, run, .. } = self;
        if run.precision == PrecisionKind::Fp16 && model.loss_chunks > 1 {
            return unfit(
                "MODEL.LOSS_CHUNKS",
                format!(
                    "is {}, expected 1 with PRECISION fp16; try bf16, or smaller batches",
                    model.loss_chunks
                ),
            );
        }
        at_least_1(&[
            ("TRAIN.BATCH_SIZE", train.batch_size as u64),
            ("TRAIN.ACCUMULATE", train.accumulate as u64),
            ("TRAIN.PRINT_FREQ", train.print_freq as u64),
            ("TRAIN.EVAL_FREQ", train.eval_freq.unwrap_or(1)),
            ("TRAIN.SAVE_FREQ", train.save_freq.unwrap_or(1)),
            ("TRAIN.EARLY_STOP", train.early_stop.unwrap_or(1)),
            ("TRAIN.MAX_STEPS", train.max_steps.unwrap_or(1)),
            ("TEST.BATCH_SIZE", test.batch_size as u64),
            ("OPTIM.MAX_EPOCH", optim.max_epoch),
            ("MODEL.N_LAYER", model.n_layer as u64),
            ("MODEL.N_HEAD", model.n_head as u64),
            ("MODEL.N_EMBD", model.n_embd as u64),
            ("MODEL.BLOCK", model.block as u64),
            ("MODEL.VOCAB_MULTIPLE", model.vocab_multiple as u64),
            ("MODEL.LOSS_CHUNKS", model.loss_chunks as u64),
        ])
    }

    fn check_optim(&self) -> Result<(), ConfigError> {
        let optim = &self.optim;
        let not_negative = [
            ("OPTIM.BASE_LR", optim.base_lr),
            ("OPTIM.MIN_LR", optim.min_lr),
            ("OPTIM.WARMUP", optim.warmup),
            ("OPTIM.WEIGHT_DECAY", optim.weight_decay),
        ];
        if let Some((key, value)) = not_negative.into_iter().find(|(_, value)| *value < 0.0) {
            return unfit(key, format!("is {value}; try 0 or more"));
        }
        if optim.warmup >= 1.0 && optim.warmup.fract() != 0.0 {
            let what = format!("is {}; try a part below 1, or a whole number of steps", optim.warmup);
            return unfit("OPTIM.WARMUP", what);
        }
        if optim.betas.len() != 2 || !optim.betas.iter().all(|beta| (0.0..1.0).contains(beta)) {
            return unfit(
                "OPTIM.BETAS",
                format!("is {:?}; try two from 0 to below 1, [0.9, 0.95]", optim.betas),
            );
        }
        match optim.grad_clip {
            Some(norm) if norm <= 0.0 => {
                unfit("OPTIM.GRAD_CLIP", format!("is {norm}; try more than 0, or null"))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_that_cannot_work_are_refused_with_what_to_try() {
        for (pairs, told) in [
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
            (&["GPT.TRAIN", "a", "OPTIM.SCHEDULE", "linear"], "expected cosine or constant, got linear"),
        ] {
            let said = GptConfig::load(None, pairs).unwrap_err().to_string();
            assert!(said.contains(told), "{pairs:?}: {said}");
        }
        let config = GptConfig::load(None, &["GPT.TRAIN", "a"]).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("c.yaml");
        std::fs::write(&path, config.to_yaml()).unwrap();
        assert_eq!(GptConfig::load::<&str>(Some(&path), &[]).unwrap(), config, "what is saved is read again");
    }

    #[test]
    fn the_file_of_gpt2_is_the_setup_that_is_measured_on_gpus() {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../config/gpt2.yaml");
        let config = GptConfig::load::<&str>(Some(&file), &[]).unwrap();
        let options = config.model.options(50257);
        assert_eq!((config.run.precision, options.loss_chunks), (PrecisionKind::Bf16Master, 1));
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
        let guide = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/gpt.md");
        let guide = std::fs::read_to_string(guide).unwrap();
        let row = |entry: Entry| {
            format!("| `{}` | `{}` | {} | {} |", entry.key, entry.value, entry.expects, entry.about)
        };
        let rows: Vec<_> = GptConfig::default().entries().into_iter().map(row).collect();
        let table = guide.lines().skip_while(|line| !line.starts_with("| key | default |")).skip(2);
        let told: Vec<_> = table.take_while(|line| line.starts_with('|')).collect();
        assert_eq!(told, rows, "the table of docs/gpt.md should be:\n{}", rows.join("\n"));
    }
}
