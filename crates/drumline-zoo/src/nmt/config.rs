//! NJUNMT's configuration: its sections, keys and defaults.
//!
//! Keys for which NJUNMT has no default are required. Keys that NJUNMT does not have are marked "ours".

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use drumline::config::deepspeed::SchedulerPlan;

use crate::config::check::{at_least_1, invalid};
use crate::config::section::section;
use crate::config::setting::{Setting, choice};
use crate::config::table::{Table, public_table, sections};
use crate::config::{
    ConfigError, Cuts, DeviceKind, Fp16, Heads, Optim, OptimizerName, Parallel, PrecisionKind, Run,
    SharedKeys, TaskConfig, Test, Train, Value, check_amsgrad_of, check_scheduler,
};
use crate::models::Checkpointing;
use crate::models::transformer::num_layers;

choice! {
    /// The tokens of a vocabulary.
    VocabularyKind, "word or bpe" {
        /// Words between spaces.
        Word = "word",
        /// Word pieces: the text is already split (`@@`), or `codes` splits it.
        Bpe = "bpe",
    }
}

/// One of `vocabularies`: `{type: word, dict_path: …, max_n_words: -1}`.
#[derive(Debug, Clone, PartialEq)]
pub struct VocabularyKeys {
    /// `type`
    pub kind: VocabularyKind,
    /// `dict_path`: NJUNMT's JSON, or a line for each word.
    pub dict_path: PathBuf,
    /// `max_n_words`: only the most frequent words; -1 for all.
    pub max_n_words: i64,
    /// `codes`, or `bpe_codes`: how words are split, if the text is not split yet: subword-nmt's codes, or a `.json`
    /// file of Hugging Face's tokenizers.
    pub codes: Option<PathBuf>,
}

impl Setting for VocabularyKeys {
    fn expects() -> String {
        "a map of type (word or bpe), dict_path (a file), max_n_words (-1: all) and codes (a file)".into()
    }

    fn schema() -> serde_json::Value {
        let path = PathBuf::schema();
        serde_json::json!({
            "type": "object",
            "properties": {
                "type": VocabularyKind::schema(),
                "dict_path": path,
                "max_n_words": i64::schema(),
                "codes": Option::<PathBuf>::schema(),
                "bpe_codes": Option::<PathBuf>::schema(),
            },
            "required": ["dict_path"],
            "additionalProperties": false,
        })
    }

    fn read(value: &Value) -> Option<Self> {
        let Value::Section(pairs) = value else { return None };
        let known = ["type", "dict_path", "max_n_words", "codes", "bpe_codes"];
        if pairs.iter().any(|(key, _)| !known.contains(&key.as_str())) {
            return None;
        }
        let of = |name: &str| pairs.iter().find(|(key, _)| key == name).map(|(_, value)| &value.value);
        Some(Self {
            kind: of("type").map_or(Some(VocabularyKind::Word), VocabularyKind::read)?,
            dict_path: PathBuf::read(of("dict_path")?)?,
            max_n_words: of("max_n_words").map_or(Some(-1), i64::read)?,
            codes: of("codes").or(of("bpe_codes")).map_or(Some(None), Option::read)?,
        })
    }

    fn write(&self) -> Value {
        let codes = self.codes.as_ref().map(|codes| ("codes", codes.write()));
        let pairs = [
            ("type", self.kind.write()),
            ("dict_path", self.dict_path.write()),
            ("max_n_words", Value::Int(self.max_n_words)),
        ];
        Value::section(pairs.into_iter().chain(codes))
    }
}

choice! {
    /// What `batch_size` counts.
    BatchingKey, "samples or tokens" {
        /// Sentences.
        Samples = "samples",
        /// Tokens, including padding.
        Tokens = "tokens",
    }
}

choice! {
    /// The learning rate schedule.
    ScheduleMethod, "noam, isqrt, linear or loss" {
        /// Rises for `warmup_steps`, then falls with the inverse square root of the step.
        Noam = "noam",
        /// The same, with a configurable peak.
        Isqrt = "isqrt",
        /// Falls linearly to `min_lr` at `decay_steps`.
        Linear = "linear",
        /// Falls when the validation loss stops improving.
        Loss = "loss",
    }
}

choice! {
    /// The weights that evaluations and best models use.
    MovingAverageMethod, "sma or ema" {
        /// Simple moving average: the mean of all steps.
        Sma = "sma",
        /// Exponential moving average.
        Ema = "ema",
    }
}

section! {
    /// `data_configs`: files.
    DataConfigs "data_configs" {
        /// Name of the languages, such as zh-en
        "lang_pair" lang_pair: String = String::new();
        /// Two text files, which are translations of each other line by line
        "train_data" train_data: Vec<PathBuf> = Vec::new();
        /// Two text files for validation
        "valid_data" valid_data: Vec<PathBuf> = Vec::new();
        /// References for BLEU; with several, FILE0, FILE1, …
        "bleu_valid_reference" bleu_valid_reference: Option<PathBuf> = None;
        /// Vocabularies of the source and of the target
        "vocabularies" vocabularies: Vec<VocabularyKeys> = Vec::new();
        /// Longest training sentences of the source and of the target; -1: any
        "max_len" max_len: Vec<i64> = vec![-1, -1];
        /// References for each sentence
        "num_refs" num_refs: usize = 1;
        /// Compute BLEU on characters
        "eval_at_char_level" eval_at_char_level: bool = false;
    }
}

section! {
    /// `model_configs`: the network.
    ModelConfigs "model_configs" {
        /// Name of the network
        "model" model: String = "Transformer".into();
        /// Number of encoder layers, and of decoder layers
        "n_layers" n_layers: usize = 6;
        /// Number of attention heads
        "n_head" n_head: usize = 8;
        /// Size of a word vector
        "d_word_vec" d_word_vec: usize = 512;
        /// Size of the hidden states
        "d_model" d_model: usize = 512;
        /// Size of the feed-forward layers
        "d_inner_hid" d_inner_hid: usize = 2048;
        /// Probability of dropout
        "dropout" dropout: f64 = 0.1;
        /// The output layer shares the target's embedding
        "proj_share_weight" proj_share_weight: bool = false;
        /// Source and target share one embedding; ours
        "share_embeddings" share_embeddings: bool = false;
        /// Label smoothing
        "label_smoothing" label_smoothing: f64 = 0.1;
        /// Activation checkpointing: none, full, selective, offload, or N for every Nth layer; ours
        "checkpoint" checkpoint: Checkpointing = Checkpointing::None;
    }
}

section! {
    /// `optimizer_configs`: the optimizer.
    OptimizerConfigs "optimizer_configs" {
        /// Name of the optimizer
        "optimizer" optimizer: OptimizerName = OptimizerName::Adam;
        /// Learning rate; with noam a factor, which NJUNMT multiplies by 10: its examples have 0.1 and 0.2
        "learning_rate" learning_rate: f64 = 2.0;
        /// Clip the norm of the gradient to this; -1: no clipping
        "grad_clip" grad_clip: f64 = -1.0;
        /// Weight decay
        "weight_decay" weight_decay: f64 = 0.0;
        /// Learning rate schedule
        "schedule_method" schedule_method: Option<ScheduleMethod> = Some(ScheduleMethod::Noam);
        /// A schedule of DeepSpeed or PyTorch by its name, instead of schedule_method; ours
        "scheduler" scheduler: Option<SchedulerPlan> = None;
    }
}

section! {
    /// `optimizer_configs.optimizer_params`: PyTorch's arguments.
    OptimizerParams "optimizer_configs.optimizer_params" {
        /// Betas of adam
        "betas" betas: Vec<f64> = vec![0.9, 0.999];
        /// Epsilon of adam; of adagrad, by default 1e-10
        "eps" eps: f64 = 1e-8;
        /// Momentum of sgd
        "momentum" momentum: f64 = 0.0;
        /// AMSGrad with adam and adamw
        "amsgrad" amsgrad: bool = false;
    }
}

section! {
    /// `optimizer_configs.scheduler_configs`: the options of the schedule.
    SchedulerConfigs "optimizer_configs.scheduler_configs" {
        /// noam: size of the model; by default that of model_configs
        "d_model" d_model: Option<usize> = None;
        /// noam, isqrt: number of warm-up steps
        "warmup_steps" warmup_steps: u64 = 8000;
        /// isqrt: the learning rate stays constant up to this step, by default forever; linear: the last step
        "decay_steps" decay_steps: Option<u64> = None;
        /// isqrt: initial learning rate
        "init_lr" init_lr: f64 = 1e-7;
        /// loss: evaluations without improvement before the learning rate falls
        "patience" patience: u64 = 20;
        /// Lowest learning rate; -1: none; with loss by default 5e-5
        "min_lr" min_lr: f64 = -1.0;
        /// loss: factor of the learning rate
        "scale" scale: f64 = 0.5;
    }
}

section! {
    /// `training_configs`: the training.
    TrainingConfigs "training_configs" {
        /// Seed of weights, shuffling and dropout
        "seed" seed: u64 = 1234;
        /// Number of epochs
        "max_epochs" max_epochs: u64 = 10000;
        /// Stop after this many steps; ours
        "max_steps" max_steps: Option<u64> = None;
        /// Shuffle the data in each epoch
        "shuffle" shuffle: bool = false;
        /// Batch sentences of similar length together
        "use_bucket" use_bucket: bool = true;
        /// Batch size of each rank, in sentences or tokens
        "batch_size" batch_size: usize = 32;
        /// What batch_size counts
        "batching_key" batching_key: BatchingKey = BatchingKey::Samples;
        /// Number of sentences that are sorted by length together
        "buffer_size" buffer_size: usize = 5000;
        /// Gradient accumulation: batches per step, on each rank
        "update_cycle" update_cycle: usize = 1;
        /// The loss is a mean over words, not over sentences
        "norm_by_words" norm_by_words: bool = false;
        /// Batch size of validations by loss, in sentences
        "valid_batch_size" valid_batch_size: usize = 20;
        /// Number of checkpoints to keep
        "num_kept_checkpoints" num_kept_checkpoints: usize = 1;
        /// Number of best models to keep
        "num_kept_best_model" num_kept_best_model: usize = 1;
        /// Print progress every this many steps
        "disp_freq" disp_freq: u64 = 100;
        /// Save a checkpoint every this many steps
        "save_freq" save_freq: u64 = 1000;
        /// Validate by loss every this many steps
        "loss_valid_freq" loss_valid_freq: u64 = 1000;
        /// Validate by BLEU every this many steps
        "bleu_valid_freq" bleu_valid_freq: u64 = 1000;
        /// Steps before the first validation by BLEU
        "bleu_valid_warmup" bleu_valid_warmup: u64 = 0;
        /// Batch size of validations by BLEU, in sentences
        "bleu_valid_batch_size" bleu_valid_batch_size: usize = 5;
        /// Stop after this many validations without improvement
        "early_stop_patience" early_stop_patience: u64 = 100_000;
        /// Use averaged weights for validations and best models
        "moving_average_method" moving_average_method: Option<MovingAverageMethod> = None;
        /// ema: weight of each step in the average, between 0 and 1
        "moving_average_alpha" moving_average_alpha: f64 = 0.0;
        /// Epochs before averaging begins
        "moving_average_start_epoch" moving_average_start_epoch: u64 = 0;
    }
}

section! {
    /// `training_configs.bleu_valid_configs`: beam search in validations.
    BleuValidConfigs "training_configs.bleu_valid_configs" {
        /// Longest translation
        "max_steps" max_steps: usize = 150;
        /// Beam size
        "beam_size" beam_size: usize = 5;
        /// Length penalty; 0 or less: none
        "alpha" alpha: f64 = 0.0;
        /// Join word pieces and detokenise
        "postprocess" postprocess: bool = false;
        /// Flags of sacreBLEU, such as -tok none or -lc
        "sacrebleu_args" sacrebleu_args: String = String::new();
    }
}

section! {
    /// Keys of ours for what NJUNMT takes from its command line.
    RunConfigs "run_configs" {
        /// Name of the model, for messages
        "model_name" model_name: String = "transformer".into();
        /// Folder of checkpoints
        "saveto" saveto: PathBuf = "save".into();
        /// Folder of metrics.jsonl, log.txt and TensorBoard's files
        "log_path" log_path: PathBuf = "log".into();
        /// Folder of translations made in validations
        "valid_path" valid_path: PathBuf = "valid".into();
        /// Whether to resume from the last checkpoint in saveto; not given: yes with drumline train, no with NJUNMT's
        /// command line
        "reload" reload: Option<bool> = None;
        /// Resume even if the dataset's length or fingerprint differs from the checkpoint's
        "accept_new_data" accept_new_data: bool = false;
        /// Initial weights, a .safetensors file or a checkpoint
        "pretrain_path" pretrain_path: Option<PathBuf> = None;
        /// Folder that all ranks see, to exchange large objects through files; by default they are sent from rank to
        /// rank
        "shared_dir" shared_dir: Option<PathBuf> = None;
        /// Device to compute on; auto: a GPU if there is one
        "device" device: DeviceKind = DeviceKind::Auto;
        /// Precision of the training; bf16 and fp16: in matrix products
        "precision" precision: PrecisionKind = PrecisionKind::Fp32;
        /// Folder for a CSV file of the loss and one of the learning rate, as DeepSpeed's csv_monitor writes them
        "csv" csv: Option<PathBuf> = None;
        /// Threads that load batches, for each rank
        "workers" workers: usize = 1;
    }
}

/// All keys of a translation run, by section.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct NmtConfig {
    /// `data_configs`
    pub data: DataConfigs,
    /// `model_configs`
    pub model: ModelConfigs,
    /// `optimizer_configs`
    pub optimizer: OptimizerConfigs,
    /// `optimizer_configs.optimizer_params`
    pub optimizer_params: OptimizerParams,
    /// `optimizer_configs.scheduler_configs`
    pub scheduler: SchedulerConfigs,
    /// `training_configs`
    pub training: TrainingConfigs,
    /// `training_configs.bleu_valid_configs`
    pub bleu: BleuValidConfigs,
    /// `FP16`
    pub fp16: Fp16,
    /// `PARALLEL`
    pub parallel: Parallel,
    /// `run_configs`
    pub run: RunConfigs,
}

impl Table for NmtConfig {
    sections!(data, model, optimizer, optimizer_params, scheduler, training, bleu, fp16, parallel, run);

    fn settle(&mut self, given: &BTreeSet<String>) {
        self.scheduler.d_model.get_or_insert(self.model.d_model);
        let is_given = |key: &str| given.contains(key);
        if self.optimizer.schedule_method == Some(ScheduleMethod::Loss)
            && !is_given("optimizer_configs.scheduler_configs.min_lr")
        {
            self.scheduler.min_lr = 5e-5;
        }
        if self.optimizer.optimizer == OptimizerName::Adagrad
            && !is_given("optimizer_configs.optimizer_params.eps")
        {
            self.optimizer_params.eps = 1e-10;
        }
        if !is_given("optimizer_configs.scheduler_configs.warmup_steps")
            && self.optimizer.schedule_method == Some(ScheduleMethod::Isqrt)
        {
            self.scheduler.warmup_steps = 1;
        }
    }

    fn check(&self) -> Result<(), ConfigError> {
        if self.optimizer_params.amsgrad {
            let key = "optimizer_configs.optimizer_params.amsgrad";
            check_amsgrad_of(self.optimizer.optimizer, key, "optimizer_configs.optimizer")?;
        }
        self.check_files()?;
        self.fp16.check("run_configs.precision", self.run.precision)?;
        self.parallel.check()?;
        let heads = Heads { key: "model_configs.n_head", count: self.model.n_head, has_cp: false };
        let cuts = Cuts { heads: Some(heads), layers: Some(num_layers(self.model.n_layers)) };
        self.parallel.check_model(cuts)?;
        self.shared().check_micro_batches()?;
        check_scheduler("optimizer_configs.scheduler", self.optimizer.scheduler.as_ref())?;
        self.check_sizes()
    }
}

public_table!(NmtConfig);

impl TaskConfig for NmtConfig {
    const TITLE: &'static str = "A translation: drumline train";

    /// Maps NJUNMT's keys to the sections that all tasks share.
    fn shared(&self) -> SharedKeys {
        let Self { optimizer, optimizer_params, scheduler, training, run, .. } = self;
        SharedKeys {
            train: Train {
                batch_size: training.batch_size,
                shuffle: training.shuffle,
                accumulate: training.update_cycle,
                auto_resume: run.reload.unwrap_or(true),
                accept_new_data: run.accept_new_data,
                workers: run.workers,
                print_freq: training.disp_freq as usize,
                save_freq: Some(training.save_freq),
                early_stop: Some(training.early_stop_patience),
                max_steps: training.max_steps,
                csv: run.csv.clone(),
                ..Train::default()
            },
            test: Test { batch_size: training.valid_batch_size, print_freq: training.disp_freq as usize },
            optim: Optim {
                max_epoch: training.max_epochs,
                base_lr: optimizer.learning_rate,
                min_lr: scheduler.min_lr.max(0.0),
                momentum: optimizer_params.momentum,
                weight_decay: optimizer.weight_decay,
                grad_clip: Some(optimizer.grad_clip).filter(|norm| *norm > 0.0),
                scheduler: None,
            },
            fp16: self.fp16.clone(),
            parallel: self.parallel.clone(),
            run: Run {
                out_dir: run.saveto.clone(),
                rng_seed: Some(training.seed),
                device: run.device,
                precision: run.precision,
                ..Run::default()
            },
        }
    }

    fn set_device(&mut self, device: DeviceKind) {
        self.run.device = device;
    }
}

impl NmtConfig {
    /// Makes all paths absolute, so that the configuration can be read from any folder.
    pub(crate) fn absolute(&self) -> Self {
        let mut config = self.clone();
        let data = &mut config.data;
        let vocabularies = data.vocabularies.iter_mut();
        let files =
            vocabularies.flat_map(|keys| std::iter::once(&mut keys.dict_path).chain(keys.codes.as_mut()));
        let files = files.chain(&mut data.train_data).chain(&mut data.valid_data);
        for path in files.chain(data.bleu_valid_reference.as_mut()) {
            if let Ok(absolute) = std::path::absolute(&*path) {
                *path = absolute;
            }
        }
        config
    }

    /// The vocabulary and codes files, with the names of their copies beside the checkpoints.
    fn word_files(&mut self) -> impl Iterator<Item = (&'static str, &mut PathBuf)> {
        let sides = ["source", "target"].into_iter().zip(&mut self.data.vocabularies);
        sides.flat_map(|(side, keys)| {
            std::iter::once(&mut keys.dict_path).chain(keys.codes.as_mut()).map(move |path| (side, path))
        })
    }

    /// The configuration with the paths of copies in `folder`, and the files to copy as (from, to). A model cannot be
    /// used without its vocabularies.
    pub(crate) fn kept_in(&self, folder: &Path) -> (Self, Vec<(PathBuf, PathBuf)>) {
        let (mut kept, mut copies) = (self.absolute(), Vec::new());
        for (side, path) in kept.word_files() {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let is_kept = name.starts_with(&format!("{side}."));
            let copy = folder.join(if is_kept { name } else { format!("{side}.{name}") });
            copies.push((std::mem::replace(path, copy.clone()), copy));
        }
        (kept.absolute(), copies)
    }

    /// Uses the vocabulary files that lie in `folder`, which may have moved since training.
    pub(crate) fn found_in(mut self, folder: &Path) -> Self {
        for (_, path) in self.word_files() {
            let beside = path.file_name().map(|name| folder.join(name)).filter(|beside| beside.is_file());
            *path = beside.unwrap_or_else(|| path.clone());
        }
        self
    }

    fn check_files(&self) -> Result<(), ConfigError> {
        let two = |key, files: usize| match files {
            2 => Ok(()),
            _ => invalid(key, format!("has {files} files, expected two: the source and the target")),
        };
        two("data_configs.train_data", self.data.train_data.len())?;
        if !self.data.valid_data.is_empty() {
            two("data_configs.valid_data", self.data.valid_data.len())?;
        }
        match (self.data.vocabularies.len(), self.data.max_len.len()) {
            (2, 2) => Ok(()),
            (2, found) => invalid("data_configs.max_len", format!("has {found} numbers, expected two")),
            (found, _) => invalid(
                "data_configs.vocabularies",
                format!("has {found} vocabularies, expected two: of the source and of the target"),
            ),
        }
    }

    fn check_sizes(&self) -> Result<(), ConfigError> {
        if self.model.model != "Transformer" {
            return invalid("model_configs.model", format!("is {}; try Transformer", self.model.model));
        }
        let training = &self.training;
        at_least_1(&[
            ("training_configs.max_epochs", training.max_epochs),
            ("training_configs.max_steps", training.max_steps.unwrap_or(1)),
            ("training_configs.batch_size", training.batch_size as u64),
            ("training_configs.valid_batch_size", training.valid_batch_size as u64),
            ("training_configs.bleu_valid_batch_size", training.bleu_valid_batch_size as u64),
            ("training_configs.update_cycle", training.update_cycle as u64),
            ("training_configs.num_kept_checkpoints", training.num_kept_checkpoints as u64),
            ("training_configs.num_kept_best_model", training.num_kept_best_model as u64),
            ("training_configs.bleu_valid_configs.max_steps", self.bleu.max_steps as u64),
            ("training_configs.buffer_size", training.buffer_size as u64),
            ("training_configs.disp_freq", training.disp_freq),
            ("training_configs.save_freq", training.save_freq),
            ("training_configs.loss_valid_freq", training.loss_valid_freq),
            ("training_configs.bleu_valid_freq", training.bleu_valid_freq),
            ("training_configs.early_stop_patience", training.early_stop_patience),
            ("training_configs.bleu_valid_configs.beam_size", self.bleu.beam_size as u64),
            ("optimizer_configs.scheduler_configs.warmup_steps", self.scheduler.warmup_steps),
            ("data_configs.num_refs", self.data.num_refs as u64),
        ])?;
        if self.run.precision == PrecisionKind::Bf16Master && training.moving_average_method.is_some() {
            let what = "is bf16-master, in whose few bits an average does not move; try bf16";
            return invalid("run_configs.precision", what);
        }
        let smoothing = self.model.label_smoothing;
        if !(0.0..1.0).contains(&smoothing) {
            return invalid("model_configs.label_smoothing", format!("is {smoothing}; try 0 to below 1"));
        }
        if self.optimizer.schedule_method == Some(ScheduleMethod::Loss) && self.data.valid_data.is_empty() {
            return invalid(
                "optimizer_configs.schedule_method",
                "is loss, which needs data_configs.valid_data",
            );
        }
        match self.optimizer_params.betas.len() {
            2 => Ok(()),
            _ => {
                invalid("optimizer_configs.optimizer_params.betas", "expected two numbers; try [0.9, 0.999]")
            }
        }
    }
}

#[cfg(test)]
mod tests;
