//! The configuration of a run on text.

use std::collections::BTreeSet;
use std::path::PathBuf;

use drumline_text::Vocabulary;

use super::figures;
use super::net;
use crate::config::check::{at_least_1, invalid};
use crate::config::section::section;
use crate::config::setting::choice;
use crate::config::table::{Table, sections, task_table};
use crate::config::{ConfigError, Cuts, Method, Optim, SharedKeys, Test, Train, WarmupOptim};
use crate::models::Checkpointing;

choice! {
    /// What a run on text predicts.
    TextTask, "classify or tag" {
        /// One label for the whole text.
        Classify = "classify",
        /// A tag for each word.
        Tag = "tag",
    }
}

choice! {
    /// The network that encodes the words.
    NetName, "bilstm or transformer" {
        /// A bidirectional LSTM.
        BiLstm = "bilstm",
        /// A Transformer encoder.
        Transformer = "transformer",
    }
}

section! {
    /// `TEXT`: the files, and how they are read.
    Text "TEXT" {
        /// Training file: .csv, .tsv or .jsonl; for tags, CoNLL columns under any name
        "TRAIN" train: PathBuf = PathBuf::new();
        /// Evaluation file, for the end of each epoch and the choice of the best model
        "DEV" dev: Option<PathBuf> = None;
        /// File for drumline test; by default that of TEXT.DEV
        "TEST" test: Option<PathBuf> = None;
        /// Fields with text: one, or two to be compared
        "FIELDS" fields: Vec<String> = vec!["text".into()];
        /// Names of the columns of a CSV or TSV file without a header
        "HEADERS" headers: Vec<String> = Vec::new();
        /// Convert words to lower case
        "LOWER" lower: bool = false;
        /// Rarer words count as unknown
        "MIN_COUNT" min_count: u64 = 1;
        /// Size of the vocabulary, including four special ids
        "MAX_N_WORDS" max_n_words: Option<usize> = None;
        /// Longer texts are cut; tags: in training only
        "MAX_LEN" max_len: Option<usize> = None;
    }
}

section! {
    /// `TEXT`: what is predicted, and where the files have it.
    TextLabels "TEXT" {
        /// One label for each text, or a tag for each word
        "TASK" task: TextTask = TextTask::Classify;
        /// Field with the label
        "LABEL" label: String = "label".into();
        /// Tags: column of the words, from 0
        "WORD_COLUMN" word_column: usize = 0;
        /// Tags: column of the tags
        "TAG_COLUMN" tag_column: usize = 3;
        /// Tags: lines that begin with this are skipped
        "COMMENT" comment: Option<String> = None;
    }
}

section! {
    /// `MODEL`: the network.
    TextModel "MODEL" {
        /// Network that encodes the words
        "NET" net: NetName = NetName::BiLstm;
        /// Size of a word vector
        "D_WORD_VEC" d_word_vec: usize = 128;
        /// Number of layers
        "N_LAYERS" n_layers: usize = 1;
        /// bilstm: hidden size of each direction
        "D_HIDDEN" d_hidden: usize = 128;
        /// transformer: number of attention heads
        "N_HEAD" n_head: usize = 4;
        /// transformer: size of the feed-forward layers
        "D_INNER_HID" d_inner_hid: usize = 256;
        /// Probability of dropout
        "DROPOUT" dropout: f64 = 0.1;
        /// transformer: activation checkpointing: none, full, selective, offload, or N for every Nth layer
        "CHECKPOINT" checkpoint: Checkpointing = Checkpointing::None;
        /// safetensors file with initial weights
        "WEIGHTS" weights: Option<PathBuf> = None;
    }
}

section! {
    /// `TRAIN`: how batches are formed, and which model is the best.
    TextTrain "TRAIN" {
        /// Batch texts of similar length together
        "BUCKET" bucket: bool = true;
        /// Metric that selects the best model: acc, f1_macro, …, -loss; null: acc, for spans f1_span
        "METRIC_KEY" metric_key: Option<String> = None;
    }
}

/// All keys of a run on text, by section.
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
#[derive(Debug, Clone, PartialEq)]
pub struct TextConfig {
    /// `TEXT`
    pub text: Text,
    /// `TEXT`: the keys about labels
    pub labels: TextLabels,
    /// `MODEL`
    pub model: TextModel,
    /// `TRAIN`, beside the shared keys
    pub train: TextTrain,
    /// `OPTIM`, beside the shared keys
    pub method: Method,
    /// The learning rate of `OPTIM`
    pub optim: WarmupOptim,
    /// The sections that every task has
    pub shared: SharedKeys,
}

impl Default for TextConfig {
    fn default() -> Self {
        let optim = Optim { max_epoch: 10, base_lr: 1e-3, weight_decay: 0.01, ..Optim::default() };
        let test = Test { print_freq: Train::default().print_freq, ..Test::default() };
        Self {
            text: Text::default(),
            labels: TextLabels::default(),
            model: TextModel::default(),
            train: TextTrain::default(),
            method: Method::default(),
            optim: WarmupOptim::default(),
            shared: SharedKeys { test, optim, ..SharedKeys::default() },
        }
    }
}

task_table!(TextConfig, "A net that classifies or tags text: drumline train");

impl Table for TextConfig {
    sections!(
        text,
        labels,
        model,
        shared.train,
        train,
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
        self.shared.parallel.check_model(Cuts::default())?;
        self.method.check(&self.shared)?;
        self.optim.check()?;
        self.text.check(&self.shared)?;
        self.check_labels()?;
        // Checks the sizes. The numbers of words and classes are not known yet, and any number will do.
        match net::options(self, 5, 2).check() {
            Ok(()) => Ok(()),
            Err(error) => invalid("MODEL:", error.to_string()),
        }
    }
}

impl Text {
    /// `TEXT.TEST` defaults to `TEXT.DEV`.
    pub(crate) fn settle(&mut self) {
        if self.test.is_none() {
            self.test.clone_from(&self.dev);
        }
    }

    /// Returns an error for values that no task on text can use.
    pub(crate) fn check(&self, shared: &SharedKeys) -> Result<(), ConfigError> {
        at_least_1(&[("TEXT.MAX_LEN", self.max_len.unwrap_or(1) as u64)])?;
        if self.train.as_os_str().is_empty() {
            return invalid("TEXT.TRAIN", "is not given; try the path of a file to train on");
        }
        if self.fields.is_empty() {
            return invalid("TEXT.FIELDS", "is empty; try [text]");
        }
        let own = Vocabulary::of([]).len();
        if self.max_n_words.is_some_and(|most| most <= own) {
            let what = format!("leaves no word beside the {own} ids of its own; try more, or null");
            return invalid("TEXT.MAX_N_WORDS", what);
        }
        if self.dev.is_none() { shared.check_evaluates("TEXT.DEV") } else { Ok(()) }
    }
}

impl TextConfig {
    fn check_labels(&self) -> Result<(), ConfigError> {
        let Self { labels, train, .. } = self;
        if labels.comment.as_deref() == Some("") {
            return invalid("TEXT.COMMENT", "is empty, as every line begins; try #, or null");
        }
        if labels.task == TextTask::Tag && labels.word_column == labels.tag_column {
            let what = format!("is {}, as is TEXT.WORD_COLUMN; try another column", labels.tag_column);
            return invalid("TEXT.TAG_COLUMN", what);
        }
        if self.text.dev.is_none() && train.metric_key.is_some() {
            return invalid("TEXT.DEV", "is not given, and without it nothing is evaluated; try a file");
        }
        let known = figures::names(labels.task);
        match &train.metric_key {
            Some(key) if !known.contains(&key.trim_start_matches('-')) => {
                invalid("TRAIN.METRIC_KEY", format!("is {key}; try one of {}", known.join(", ")))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::table::assert_in_guide;

    #[test]
    fn invalid_values_are_refused_with_advice() {
        let given = ["TEXT.TRAIN", "a.csv"];
        for (pairs, words) in [
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
            assert!(said.contains(words), "{pairs:?}: {said}");
        }
        let config = TextConfig::load(None, &given).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("c.yaml");
        std::fs::write(&path, config.to_yaml()).unwrap();
        assert_eq!(
            TextConfig::load::<&str>(Some(&path), &[]).unwrap(),
            config,
            "a saved configuration is read back"
        );
    }

    #[test]
    fn the_guide_has_every_key_with_its_default() {
        assert_in_guide::<TextConfig>("docs/text-classification.md");
    }
}
