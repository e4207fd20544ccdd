//! NJUNMT's configuration: its sections, keys and defaults.
//!
//! Keys that it has without a default must be given; those of ours are marked.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crate::config::check::{at_least_1, unfit};
use crate::config::section::{Section, section};
use crate::config::setting::{Setting, choice};
use crate::config::table::{self, Table};
use crate::config::{ConfigError, DeviceKind, Entry, Fp16, PrecisionKind, Value};

choice! {
    /// What a vocabulary's tokens are.
    VocabularyKind, "word or bpe" {
        /// Words between spaces.
        Word = "word",
        /// Pieces of words: text that is split already (`@@`), or split by `codes`.
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
    /// `max_n_words`: the most frequent; all, if it is -1.
    pub max_n_words: i64,
    /// `codes`, or `bpe_codes`: how words are split, if they are not yet: subword-nmt's codes, or a `.json` of Hugging Face's tokenizers.
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
    /// How sentences make a batch.
    BatchingKey, "samples or tokens" {
        /// So many sentences.
        Samples = "samples",
        /// So many tokens, padding included.
        Tokens = "tokens",
    }
}

choice! {
    /// How the learning rate changes.
    ScheduleMethod, "noam, isqrt, linear or loss" {
        /// Up for `warmup_steps`, then down with the square root of the step.
        Noam = "noam",
        /// The same with a rate of one's own at the top.
        Isqrt = "isqrt",
        /// Down evenly to `min_lr` at `decay_steps`.
        Linear = "linear",
        /// Down when the validation's loss gets no better.
        Loss = "loss",
    }
}

choice! {
    /// Which weights evaluations and best models have.
    MovingAverageMethod, "sma or ema" {
        /// The mean of all steps.
        Sma = "sma",
        /// A mean that forgets.
        Ema = "ema",
    }
}

choice! {
    /// The optimizer.
    OptimizerName, "adam, adamw or sgd" {
        /// Adam.
        Adam = "adam",
        /// AdamW.
        Adamw = "adamw",
        /// SGD.
        Sgd = "sgd",
    }
}

section! {
    /// `data_configs`: files.
    DataConfigs "data_configs" {
        /// Name of the languages, such as zh-en
        "lang_pair" lang_pair: String = String::new();
        /// Two text files, line by line each other's translation
        "train_data" train_data: Vec<PathBuf> = Vec::new();
        /// Two text files for validation
        "valid_data" valid_data: Vec<PathBuf> = Vec::new();
        /// References for BLEU; with several, FILE0, FILE1, …
        "bleu_valid_reference" bleu_valid_reference: Option<PathBuf> = None;
        /// Of the source, of the target
        "vocabularies" vocabularies: Vec<VocabularyKeys> = Vec::new();
        /// Longest sentences to train on, of the source and of the target; -1: any
        "max_len" max_len: Vec<i64> = vec![-1, -1];
        /// References for each sentence
        "num_refs" num_refs: usize = 1;
        /// BLEU of characters
        "eval_at_char_level" eval_at_char_level: bool = false;
    }
}

section! {
    /// `model_configs`: the network.
    ModelConfigs "model_configs" {
        /// Its name
        "model" model: String = "Transformer".into();
        /// Layers of the encoder, and of the decoder
        "n_layers" n_layers: usize = 6;
        /// Heads of attention
        "n_head" n_head: usize = 8;
        /// Size of a word's vector
        "d_word_vec" d_word_vec: usize = 512;
        /// Size between layers
        "d_model" d_model: usize = 512;
        /// Size within feed-forward layers
        "d_inner_hid" d_inner_hid: usize = 2048;
        /// Probability of dropout
        "dropout" dropout: f64 = 0.1;
        /// The target's word vectors are the output's, too
        "proj_share_weight" proj_share_weight: bool = false;
        /// Source and target have the same word vectors; ours
        "share_embeddings" share_embeddings: bool = false;
        /// Part of the right word's weight that goes to all words
        "label_smoothing" label_smoothing: f64 = 0.1;
    }
}

section! {
    /// `optimizer_configs`: the optimizer.
    OptimizerConfigs "optimizer_configs" {
        /// Its name
        "optimizer" optimizer: OptimizerName = OptimizerName::Adam;
        /// Learning rate; with noam a factor, which NJUNMT takes ten times: its examples have 0.1 and 0.2
        "learning_rate" learning_rate: f64 = 2.0;
        /// Largest norm of the gradient; -1: any
        "grad_clip" grad_clip: f64 = -1.0;
        /// Weight decay
        "weight_decay" weight_decay: f64 = 0.0;
        /// How the learning rate changes
        "schedule_method" schedule_method: Option<ScheduleMethod> = Some(ScheduleMethod::Noam);
    }
}

section! {
    /// `optimizer_configs.optimizer_params`: PyTorch's arguments.
    OptimizerParams "optimizer_configs.optimizer_params" {
        /// How slowly means forget
        "betas" betas: Vec<f64> = vec![0.9, 0.999];
        /// Added to the denominator
        "eps" eps: f64 = 1e-8;
        /// Of sgd
        "momentum" momentum: f64 = 0.0;
    }
}

section! {
    /// `optimizer_configs.scheduler_configs`: of the method.
    SchedulerConfigs "optimizer_configs.scheduler_configs" {
        /// noam: size of the model; that of model_configs unless given
        "d_model" d_model: Option<usize> = None;
        /// noam, isqrt: steps of warm-up
        "warmup_steps" warmup_steps: u64 = 8000;
        /// isqrt: the rate is held up to this step, for ever if it is not given; linear: the last step
        "decay_steps" decay_steps: Option<u64> = None;
        /// isqrt: the first learning rate
        "init_lr" init_lr: f64 = 1e-7;
        /// loss: evaluations without a better one
        "patience" patience: u64 = 20;
        /// The least learning rate; -1: any; with loss 5e-5 unless given
        "min_lr" min_lr: f64 = -1.0;
        /// loss: factor
        "scale" scale: f64 = 0.5;
    }
}

section! {
    /// `training_configs`: the training.
    TrainingConfigs "training_configs" {
        /// Seed of weights, order and dropout
        "seed" seed: u64 = 1234;
        /// Number of epochs
        "max_epochs" max_epochs: u64 = 10000;
        /// Stop after this many steps; ours
        "max_steps" max_steps: Option<u64> = None;
        /// A new order in each epoch
        "shuffle" shuffle: bool = false;
        /// Batches of sentences of like length
        "use_bucket" use_bucket: bool = true;
        /// Sentences, or tokens, of a batch of each rank
        "batch_size" batch_size: usize = 32;
        /// What batch_size counts
        "batching_key" batching_key: BatchingKey = BatchingKey::Samples;
        /// Sentences among which like lengths are looked for
        "buffer_size" buffer_size: usize = 5000;
        /// Batches of a step, on each rank
        "update_cycle" update_cycle: usize = 1;
        /// The loss is a mean over words, not over sentences
        "norm_by_words" norm_by_words: bool = false;
        /// Sentences of a batch of the validation by loss
        "valid_batch_size" valid_batch_size: usize = 20;
        /// Checkpoints that stay
        "num_kept_checkpoints" num_kept_checkpoints: usize = 1;
        /// Best models that stay
        "num_kept_best_model" num_kept_best_model: usize = 1;
        /// Steps from line to line
        "disp_freq" disp_freq: u64 = 100;
        /// Steps from checkpoint to checkpoint
        "save_freq" save_freq: u64 = 1000;
        /// Steps from validation by loss to the next
        "loss_valid_freq" loss_valid_freq: u64 = 1000;
        /// Steps from validation by BLEU to the next
        "bleu_valid_freq" bleu_valid_freq: u64 = 1000;
        /// Steps before the first validation by BLEU
        "bleu_valid_warmup" bleu_valid_warmup: u64 = 0;
        /// Sentences of a batch of the validation by BLEU
        "bleu_valid_batch_size" bleu_valid_batch_size: usize = 5;
        /// Validations without a better one before it ends
        "early_stop_patience" early_stop_patience: u64 = 100_000;
        /// Averaged weights for validations and best models
        "moving_average_method" moving_average_method: Option<MovingAverageMethod> = None;
        /// ema: weight of each step in the mean, between 0 and 1
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
        /// Hypotheses at a time
        "beam_size" beam_size: usize = 5;
        /// Length penalty; 0 or less: none
        "alpha" alpha: f64 = 0.0;
        /// Pieces are joined, and spaces put as people write
        "postprocess" postprocess: bool = false;
        /// Flags of sacreBLEU, such as -tok none or -lc
        "sacrebleu_args" sacrebleu_args: String = String::new();
    }
}

section! {
    /// Keys of ours: what NJUNMT takes from the command line.
    RunConfigs "run_configs" {
        /// Name of the model, in what is shown
        "model_name" model_name: String = "transformer".into();
        /// Folder of checkpoints
        "saveto" saveto: PathBuf = "save".into();
        /// Folder of metrics.jsonl, log.txt and TensorBoard's files
        "log_path" log_path: PathBuf = "log".into();
        /// Folder of translations made in validations
        "valid_path" valid_path: PathBuf = "valid".into();
        /// Whether to go on from the last checkpoint in saveto; not given: yes with drumline train, no with NJUNMT's command line
        "reload" reload: Option<bool> = None;
        /// Resume although the data set is another than at the checkpoint, by its length or fingerprint
        "accept_new_data" accept_new_data: bool = false;
        /// Weights to begin with, a .safetensors file or a checkpoint
        "pretrain_path" pretrain_path: Option<PathBuf> = None;
        /// Folder that all ranks see, to exchange large objects through files; without it they go from rank to rank
        "shared_dir" shared_dir: Option<PathBuf> = None;
        /// What computes; auto takes a GPU if there is one
        "device" device: DeviceKind = DeviceKind::Auto;
        /// Numbers of the training; bf16 and fp16: in matrix products
        "precision" precision: PrecisionKind = PrecisionKind::Fp32;
        /// Threads that make batches, for each rank
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
    /// `run_configs`
    pub run: RunConfigs,
}

impl Table for NmtConfig {
    fn sections(&self) -> Vec<&dyn Section> {
        let Self { data, model, optimizer, optimizer_params, scheduler, training, bleu, fp16, run } = self;
        vec![data, model, optimizer, optimizer_params, scheduler, training, bleu, fp16, run]
    }

    fn sections_mut(&mut self) -> Vec<&mut dyn Section> {
        let Self { data, model, optimizer, optimizer_params, scheduler, training, bleu, fp16, run } = self;
        vec![data, model, optimizer, optimizer_params, scheduler, training, bleu, fp16, run]
    }

    fn settle(&mut self, given: &BTreeSet<String>) {
        self.scheduler.d_model.get_or_insert(self.model.d_model);
        let is_given = |key: &str| given.contains(key);
        if self.optimizer.schedule_method == Some(ScheduleMethod::Loss)
            && !is_given("optimizer_configs.scheduler_configs.min_lr")
        {
            self.scheduler.min_lr = 5e-5;
        }
        if !is_given("optimizer_configs.scheduler_configs.warmup_steps")
            && self.optimizer.schedule_method == Some(ScheduleMethod::Isqrt)
        {
            self.scheduler.warmup_steps = 1;
        }
    }

    fn check(&self) -> Result<(), ConfigError> {
        self.check_files()?;
        self.fp16.check("run_configs.precision", self.run.precision)?;
        self.check_sizes()
    }
}

impl NmtConfig {
    /// The defaults, changed by the file, changed by `KEY VALUE` pairs, and checked.
    pub fn load<S: AsRef<str>>(file: Option<&Path>, pairs: &[S]) -> Result<Self, ConfigError> {
        table::load(file, pairs)
    }

    /// As YAML that NJUNMT's readers and [`load`](Self::load) read.
    pub fn to_yaml(&self) -> String {
        table::to_yaml(self)
    }

    /// Every key with its value, what it takes and what it is for.
    pub fn entries(&self) -> Vec<Entry> {
        table::entries(self)
    }

    /// What a file may hold, as a JSON schema.
    pub fn schema() -> serde_json::Value {
        table::schema::<Self>("A translation: drumline train")
    }

    /// With paths that mean the same wherever they are read.
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

    /// Files that make ids of words, with the names under which a training keeps them beside its checkpoints.
    fn word_files(&mut self) -> impl Iterator<Item = (&'static str, &mut PathBuf)> {
        let sides = ["source", "target"].into_iter().zip(&mut self.data.vocabularies);
        sides.flat_map(|(side, keys)| {
            std::iter::once(&mut keys.dict_path).chain(keys.codes.as_mut()).map(move |path| (side, path))
        })
    }

    /// The same with copies of these files in `folder`, and which file is to be copied where: a model without its words is worth nothing.
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

    /// The same with the words that lie beside it in `folder`, wherever that is now.
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
            _ => unfit(key, format!("has {files} files, expected two: the source and the target")),
        };
        two("data_configs.train_data", self.data.train_data.len())?;
        if !self.data.valid_data.is_empty() {
            two("data_configs.valid_data", self.data.valid_data.len())?;
        }
        match (self.data.vocabularies.len(), self.data.max_len.len()) {
            (2, 2) => Ok(()),
            (2, found) => unfit("data_configs.max_len", format!("has {found} numbers, expected two")),
            (found, _) => unfit(
                "data_configs.vocabularies",
                format!("has {found} vocabularies, expected two: of the source and of the target"),
            ),
        }
    }

    fn check_sizes(&self) -> Result<(), ConfigError> {
        if self.model.model != "Transformer" {
            return unfit("model_configs.model", format!("is {}; try Transformer", self.model.model));
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
            return unfit("run_configs.precision", what);
        }
        let smoothing = self.model.label_smoothing;
        if !(0.0..1.0).contains(&smoothing) {
            return unfit("model_configs.label_smoothing", format!("is {smoothing}; try 0 to below 1"));
        }
        if self.optimizer.schedule_method == Some(ScheduleMethod::Loss) && self.data.valid_data.is_empty() {
            return unfit(
                "optimizer_configs.schedule_method",
                "is loss, which needs data_configs.valid_data",
            );
        }
        match self.optimizer_params.betas.len() {
            2 => Ok(()),
            _ => unfit("optimizer_configs.optimizer_params.betas", "expected two numbers; try [0.9, 0.999]"),
        }
    }
}
