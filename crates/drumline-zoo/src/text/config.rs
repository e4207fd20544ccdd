//! The configuration of a run on text. Keys that pictures have as well mean the same as there.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use drumline_text::Vocabulary;

use super::figures;
use super::net;
use crate::config::check::{at_least_1, unfit};
use crate::config::section::{Section, section};
use crate::config::setting::choice;
use crate::config::table::{self, Table};
use crate::config::{ConfigError, Entry, Fp16, Run};
use crate::nmt::config::OptimizerName;

choice! {
    /// What is said of a text.
    Task, "classify or tag" {
        /// One label for the whole of it.
        Classify = "classify",
        /// A tag for each word.
        Tag = "tag",
    }
}

choice! {
    /// What reads the words.
    NetName, "bilstm or transformer" {
        /// Two recurrent nets, one for each direction.
        BiLstm = "bilstm",
        /// The encoder of a Transformer.
        Transformer = "transformer",
    }
}

choice! {
    /// What the learning rate does after the warm-up.
    AfterWarmup, "linear or constant" {
        /// Falls evenly to zero.
        Linear = "linear",
        /// Stays.
        Constant = "constant",
    }
}

section! {
    /// `TEXT`: the files, and what is read of them.
    Text "TEXT" {
        /// One label for each text, or a tag for each word
        "TASK" task: Task = Task::Classify;
        /// File to train on: .csv, .tsv or .jsonl; for tags, CoNLL columns under any name
        "TRAIN" train: PathBuf = PathBuf::new();
        /// File to evaluate on after each epoch, and to choose the best model by
        "DEV" dev: Option<PathBuf> = None;
        /// File for drumline test; that of TEXT.DEV unless given
        "TEST" test: Option<PathBuf> = None;
        /// Fields with text: one, or two to be compared
        "FIELDS" fields: Vec<String> = vec!["text".into()];
        /// Field with the label
        "LABEL" label: String = "label".into();
        /// Names of the columns of a CSV or TSV file that does not begin with them
        "HEADERS" headers: Vec<String> = Vec::new();
        /// Tags: column of the words, from 0
        "WORD_COLUMN" word_column: usize = 0;
        /// Tags: column of the tags
        "TAG_COLUMN" tag_column: usize = 3;
        /// Tags: lines that begin so are passed over
        "COMMENT" comment: Option<String> = None;
        /// Words in lower case
        "LOWER" lower: bool = false;
        /// Rarer words count as unknown
        "MIN_COUNT" min_count: u64 = 1;
        /// Size of the vocabulary, four ids of its own included
        "MAX_N_WORDS" max_n_words: Option<usize> = None;
        /// Longer texts are cut; tags: in training only
        "MAX_LEN" max_len: Option<usize> = None;
    }
}

section! {
    /// `MODEL`: the network.
    TextModel "MODEL" {
        /// What reads the words
        "NET" net: NetName = NetName::BiLstm;
        /// Size of a word's vector
        "D_WORD_VEC" d_word_vec: usize = 128;
        /// Layers
        "N_LAYERS" n_layers: usize = 1;
        /// bilstm: size of each direction
        "D_HIDDEN" d_hidden: usize = 128;
        /// transformer: heads of attention
        "N_HEAD" n_head: usize = 4;
        /// transformer: size within feed-forward layers
        "D_INNER_HID" d_inner_hid: usize = 256;
        /// Probability of dropout
        "DROPOUT" dropout: f64 = 0.1;
        /// safetensors file with the first weights
        "WEIGHTS" weights: Option<PathBuf> = None;
    }
}

section! {
    /// `TRAIN`: how it is trained.
    TextTrain "TRAIN" {
        /// Texts in a batch of each rank
        "BATCH_SIZE" batch_size: usize = 32;
        /// Texts of like length come together
        "BUCKET" bucket: bool = true;
        /// A new order in each epoch
        "SHUFFLE" shuffle: bool = true;
        /// Batches whose gradients are added up before each step, on each rank
        "ACCUMULATE" accumulate: usize = 1;
        /// Go on from the last checkpoint in OUT_DIR
        "AUTO_RESUME" auto_resume: bool = true;
        /// Resume although the data set is another than at the checkpoint, by its length or fingerprint
        "ACCEPT_NEW_DATA" accept_new_data: bool = false;
        /// Threads that make batches, for each rank
        "WORKERS" workers: usize = 1;
        /// Steps from one line of progress to the next
        "PRINT_FREQ" print_freq: usize = 30;
        /// The figure that says which model is best: acc, f1_macro, …, -loss; null: acc, for spans f1_span
        "METRIC_KEY" metric_key: Option<String> = None;
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
    TextTest "TEST" {
        /// Texts in a batch of each rank
        "BATCH_SIZE" batch_size: usize = 200;
    }
}

section! {
    /// `OPTIM`: the optimizer and its learning rate.
    TextOptim "OPTIM" {
        /// Number of epochs
        "MAX_EPOCH" max_epoch: u64 = 10;
        /// The optimizer
        "METHOD" method: OptimizerName = OptimizerName::Adamw;
        /// Learning rate
        "BASE_LR" base_lr: f64 = 1e-3;
        /// Part of all steps in which the learning rate grows; from 1 on, so many steps
        "WARMUP" warmup: f64 = 0.1;
        /// What the learning rate does then
        "SCHEDULE" schedule: AfterWarmup = AfterWarmup::Linear;
        /// sgd: momentum
        "MOMENTUM" momentum: f64 = 0.9;
        /// Weight decay
        "WEIGHT_DECAY" weight_decay: f64 = 0.01;
        /// Largest norm of the gradient
        "GRAD_CLIP" grad_clip: Option<f64> = None;
    }
}

/// All keys of a run on text, by section.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct TextConfig {
    /// `TEXT`
    pub text: Text,
    /// `MODEL`
    pub model: TextModel,
    /// `TRAIN`
    pub train: TextTrain,
    /// `TEST`
    pub test: TextTest,
    /// `OPTIM`
    pub optim: TextOptim,
    /// `FP16`
    pub fp16: Fp16,
    /// `OUT_DIR`, `CFG_DEST`, `RNG_SEED`, `DEVICE`
    pub run: Run,
}

impl Table for TextConfig {
    fn sections(&self) -> Vec<&dyn Section> {
        let Self { text, model, train, test, optim, fp16, run } = self;
        vec![text, model, train, test, optim, fp16, run]
    }

    fn sections_mut(&mut self) -> Vec<&mut dyn Section> {
        let Self { text, model, train, test, optim, fp16, run } = self;
        vec![text, model, train, test, optim, fp16, run]
    }

    fn settle(&mut self, _: &BTreeSet<String>) {
        if self.text.test.is_none() {
            self.text.test.clone_from(&self.text.dev);
        }
    }

    fn check(&self) -> Result<(), ConfigError> {
        self.run.check()?;
        self.fp16.check("PRECISION", self.run.precision)?;
        self.check_sizes()?;
        self.check_text()?;
        self.check_optim()?;
        // Whatever the numbers of words and classes will be.
        match net::options(self, 5, 2).check() {
            Ok(()) => Ok(()),
            Err(error) => unfit("MODEL:", error.to_string()),
        }
    }
}

impl TextConfig {
    /// The defaults, changed by the file, changed by `KEY VALUE` pairs, and checked.
    ///
    /// ```
    /// use drumline_zoo::text::TextConfig;
    ///
    /// let config = TextConfig::load(None, &["TEXT.TRAIN", "a.csv", "TEXT.DEV", "b.csv"])?;
    /// assert_eq!(config.text.test, config.text.dev);
    /// let error = TextConfig::load(None, &["TEXT.TRIAN", "a.csv"]).unwrap_err();
    /// assert!(error.to_string().ends_with("unknown key TEXT.TRIAN; try TEXT.TRAIN"));
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
        table::schema::<Self>("A net that classifies or tags text: drumline train")
    }

    /// Every key with its value, what it takes and what it is for.
    pub fn entries(&self) -> Vec<Entry> {
        table::entries(self)
    }

    fn check_sizes(&self) -> Result<(), ConfigError> {
        let Self { text, train, test, optim, .. } = self;
        at_least_1(&[
            ("TEXT.MAX_LEN", text.max_len.unwrap_or(1) as u64),
            ("TRAIN.BATCH_SIZE", train.batch_size as u64),
            ("TRAIN.ACCUMULATE", train.accumulate as u64),
            ("TRAIN.PRINT_FREQ", train.print_freq as u64),
            ("TRAIN.EARLY_STOP", train.early_stop.unwrap_or(1)),
            ("TRAIN.MAX_STEPS", train.max_steps.unwrap_or(1)),
            ("TEST.BATCH_SIZE", test.batch_size as u64),
            ("OPTIM.MAX_EPOCH", optim.max_epoch),
        ])
    }

    fn check_text(&self) -> Result<(), ConfigError> {
        let Self { text, train, .. } = self;
        if text.train.as_os_str().is_empty() {
            return unfit("TEXT.TRAIN", "is not given; try the path of a file to train on");
        }
        if text.fields.is_empty() {
            return unfit("TEXT.FIELDS", "is empty; try [text]");
        }
        let own = Vocabulary::of([]).len();
        if text.max_n_words.is_some_and(|most| most <= own) {
            let what = format!("leaves no word beside the {own} ids of its own; try more, or null");
            return unfit("TEXT.MAX_N_WORDS", what);
        }
        if text.comment.as_deref() == Some("") {
            return unfit("TEXT.COMMENT", "is empty, as every line begins; try #, or null");
        }
        if text.task == Task::Tag && text.word_column == text.tag_column {
            let what = format!("is {}, as is TEXT.WORD_COLUMN; try another column", text.tag_column);
            return unfit("TEXT.TAG_COLUMN", what);
        }
        if text.dev.is_none() && (train.early_stop.is_some() || train.metric_key.is_some()) {
            return unfit("TEXT.DEV", "is not given, and without it nothing is evaluated; try a file");
        }
        let known = figures::names(text.task);
        match &train.metric_key {
            Some(key) if !known.contains(&key.trim_start_matches('-')) => {
                unfit("TRAIN.METRIC_KEY", format!("is {key}; try one of {}", known.join(", ")))
            }
            _ => Ok(()),
        }
    }

    fn check_optim(&self) -> Result<(), ConfigError> {
        let optim = &self.optim;
        let not_negative = [
            ("OPTIM.BASE_LR", optim.base_lr),
            ("OPTIM.WARMUP", optim.warmup),
            ("OPTIM.MOMENTUM", optim.momentum),
            ("OPTIM.WEIGHT_DECAY", optim.weight_decay),
        ];
        if let Some((key, value)) = not_negative.into_iter().find(|(_, value)| *value < 0.0) {
            return unfit(key, format!("is {value}; try 0 or more"));
        }
        if optim.momentum >= 1.0 {
            return unfit("OPTIM.MOMENTUM", format!("is {}; try 0 to below 1", optim.momentum));
        }
        if optim.warmup >= 1.0 && optim.warmup.fract() != 0.0 {
            let what = format!("is {}; try a part below 1, or a whole number of steps", optim.warmup);
            return unfit("OPTIM.WARMUP", what);
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
        let given = ["TEXT.TRAIN", "a.csv"];
        for (pairs, told) in [
            (&[][..], "TEXT.TRAIN is not given"),
            (&["TEXT.TRAIN", "a.csv", "TEXT.TASK", "parse"], "expected classify or tag, got parse"),
            (&["TEXT.TRAIN", "a.csv", "TRAIN.EARLY_STOP", "2"], "TEXT.DEV is not given"),
            (&["TEXT.TRAIN", "a.csv", "TEXT.MAX_LEN", "0"], "TEXT.MAX_LEN is 0; try 1 or more"),
            (&["TEXT.TRAIN", "a.csv", "OPTIM.GRAD_CLIP", "-1"], "OPTIM.GRAD_CLIP is -1; try more than 0"),
            (&["TEXT.TRAIN", "a.csv", "MODEL.DROPOUT", "1"], "MODEL: dropout is 1"),
            (&["TEXT.TRAIN", "a.csv", "OPTIM.MOMENTUM", "1.5"], "OPTIM.MOMENTUM is 1.5; try 0 to below 1"),
            (&["TEXT.TRAIN", "a.csv", "OPTIM.WARMUP", "1.5"], "OPTIM.WARMUP is 1.5; try a part below 1"),
            (&["TEXT.TRAIN", "a.csv", "TEXT.MAX_N_WORDS", "4"], "TEXT.MAX_N_WORDS leaves no word"),
            (&["TEXT.TRAIN", "a.csv", "TEXT.COMMENT", ""], "TEXT.COMMENT is empty"),
            (
                &["TEXT.TRAIN", "a", "TEXT.TASK", "tag", "TEXT.TAG_COLUMN", "0"],
                "TEXT.TAG_COLUMN is 0, as is TEXT.WORD_COLUMN",
            ),
            (&["TEXT.TRAIN", "a.csv", "CFG_DEST", "a/b"], "try config.yaml"),
            (
                &["TEXT.TRAIN", "a", "TEXT.DEV", "b", "TRAIN.METRIC_KEY", "f1_span"],
                "TRAIN.METRIC_KEY is f1_span; try one of loss, acc, f1_micro, f1_macro",
            ),
        ] {
            let said = TextConfig::load(None, pairs).unwrap_err().to_string();
            assert!(said.contains(told), "{pairs:?}: {said}");
        }
        let config = TextConfig::load(None, &given).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("c.yaml");
        std::fs::write(&path, config.to_yaml()).unwrap();
        assert_eq!(
            TextConfig::load::<&str>(Some(&path), &[]).unwrap(),
            config,
            "what is saved is read again"
        );
    }

    #[test]
    fn the_guide_has_every_key_with_its_default() {
        let guide = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/text-classification.md");
        let guide = std::fs::read_to_string(guide).unwrap();
        let row = |entry: Entry| {
            format!("| `{}` | `{}` | {} | {} |", entry.key, entry.value, entry.expects, entry.about)
        };
        let rows: Vec<_> = TextConfig::default().entries().into_iter().map(row).collect();
        let table = guide.lines().skip_while(|line| !line.starts_with("| key | default |")).skip(2);
        let told: Vec<_> = table.take_while(|line| line.starts_with('|')).collect();
        assert_eq!(told, rows, "the table of docs/text-classification.md should be:\n{}", rows.join("\n"));
    }
}
