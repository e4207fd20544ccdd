//! The errors of this crate. Each names the file, and the line if there is one. Lines count from 1.

use std::io;
use std::path::PathBuf;

/// An error in a text file, or in what is made from it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// A file cannot be read.
    #[error("cannot read {path:?}: {source}")]
    ReadFile {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A file cannot be written.
    #[error("cannot write {path:?}: {source}")]
    WriteFile {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A vocabulary cannot be read.
    #[error(
        "cannot read the vocabulary {path:?}: {source}; try another dict_path, or build one from the training text"
    )]
    NoVocabulary {
        /// Where it should be.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A line is not UTF-8.
    #[error(
        "line {line} of {path:?} is not UTF-8 at byte {at} of the line; try `iconv -f ENCODING -t UTF-8`, or download the file again"
    )]
    NotUtf8 {
        /// The file.
        path: PathBuf,
        /// The line.
        line: u64,
        /// The first byte of the line that is not UTF-8, from 1.
        at: usize,
    },
    /// A line does not have the expected format.
    #[error("line {line} of {path:?} {what}")]
    BadLine {
        /// The file.
        path: PathBuf,
        /// The line.
        line: u64,
        /// What is wrong, and what to try.
        what: String,
    },
    /// A line lacks a field that is needed.
    #[error("line {line} of {path:?} has no field `{name}`; try one of: {}", known.join(", "))]
    NoField {
        /// The file.
        path: PathBuf,
        /// The line.
        line: u64,
        /// The field.
        name: String,
        /// The fields that it has.
        known: Vec<String>,
    },
    /// A line has the wrong number of columns.
    #[error("line {line} of {path:?} has {found} columns, expected {expected}")]
    Columns {
        /// The file.
        path: PathBuf,
        /// The line.
        line: u64,
        /// How many it has.
        found: usize,
        /// How many it should have, such as `3` or `at least 4`.
        expected: String,
    },
    /// A label that the training data does not have.
    #[error(
        "line {line} of {path:?} has the label `{label}`, which the training data lacks; try one of: {known}"
    )]
    UnknownLabel {
        /// The file.
        path: PathBuf,
        /// The line.
        line: u64,
        /// The label.
        label: String,
        /// The labels of the training data, or the first of them.
        known: String,
    },
    /// A file does not have the expected format, and no single line is to blame.
    #[error("{path:?} {what}")]
    BadFile {
        /// The file.
        path: PathBuf,
        /// What is wrong, and what to try.
        what: String,
    },
    /// The two files of a corpus have different numbers of lines.
    #[error(
        "{source_path:?} has {source_lines} lines and {target_path:?} has {target_lines}, expected the same number: line n of one \
         is the translation of line n of the other; try extracting both from the same text again"
    )]
    UnequalLines {
        /// The source text.
        source_path: PathBuf,
        /// The number of its lines.
        source_lines: u64,
        /// The target text.
        target_path: PathBuf,
        /// The number of its lines.
        target_lines: u64,
    },
    /// There is nothing to train on.
    #[error("no sentences remain of {path:?}: {left_out}; try other data, or a larger max_len")]
    NothingRemains {
        /// The file; for a corpus, its source file.
        path: PathBuf,
        /// How many were left out, and why.
        left_out: String,
    },
    /// A file was changed after it was opened.
    #[error(
        "{path:?} has changed since it was opened; try starting again, and do not write to it during the run"
    )]
    Changed {
        /// The file.
        path: PathBuf,
    },
    /// An index past the end.
    #[error("there is no sentence {index} in {path:?}, which has {len}")]
    OutOfRange {
        /// The file.
        path: PathBuf,
        /// The index, from 0.
        index: usize,
        /// The number of sentences.
        len: usize,
    },
    /// The file exists with different content, and is not overwritten.
    #[error(
        "{path:?} exists with different content, and was not overwritten; try another place, or remove it"
    )]
    AlreadyExists {
        /// The file.
        path: PathBuf,
    },
    /// The caller stopped the work.
    #[error("stopped")]
    Stopped,
    /// The `tokenizers` crate returned an error.
    #[error("the tokenizer failed: {0}")]
    Tokenizer(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// A vocabulary too small for every text to have tokens.
    #[error("cannot learn {size} tokens; try at least {least}, one for each byte and the end of a text")]
    SmallVocabulary {
        /// The number of tokens that was requested.
        size: usize,
        /// The smallest possible number.
        least: usize,
    },
    /// An unknown name of a tokenizer for BLEU.
    #[error("BLEU has no tokenizer named `{name}`; try 13a, char or none")]
    BleuTokens {
        /// The name as given.
        name: String,
    },
    /// An argument of sacreBLEU that is not supported.
    #[error("unsupported sacreBLEU argument `{name}`; try -tok 13a, char or none, and -lc")]
    BleuArgument {
        /// The argument as given.
        name: String,
    },
    /// Synthetic data in which a part would be empty.
    #[error("cannot generate data of which {part} has no {item}; try at least 1")]
    EmptyPart {
        /// The part: `train`, `valid`, ….
        part: &'static str,
        /// What it would consist of: pairs, texts or stories.
        item: &'static str,
    },
    /// Sampling options that are out of range.
    #[error("cannot sample tokens: {0}")]
    Sampling(#[from] SamplingError),
}

impl TextError {
    /// An error if one of the parts of synthetic data, given by name and size, would be empty.
    pub(crate) fn if_empty(
        parts: impl IntoIterator<Item = (&'static str, usize)>,
        item: &'static str,
    ) -> Result<(), Self> {
        match parts.into_iter().find(|(_, size)| *size == 0) {
            Some((part, _)) => Err(Self::EmptyPart { part, item }),
            None => Ok(()),
        }
    }
}

/// A sampling option that is out of range.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SamplingError {
    /// The temperature is negative or not finite.
    #[error("the temperature is {0}; try 0 or more")]
    Temperature(f64),
    /// Top-k would leave no token.
    #[error("top-k is 0; try 1 or more")]
    TopK,
    /// Top-p is not a probability above 0.
    #[error("top-p is {0}; try more than 0, up to 1")]
    TopP(f64),
}
