//! What can go wrong with text: always with the file, and with the line where there is one. Lines count from 1.

use std::io;
use std::path::PathBuf;

/// An error of a text file, or of what is made of it.
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
        "cannot read the vocabulary {path:?}: {source}; try another dict_path, or build one of the training text"
    )]
    NoVocabulary {
        /// Where it should be.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Bytes that are no text.
    #[error(
        "line {line} of {path:?} is not UTF-8 from byte {at} of the line on; try `iconv -f ENCODING -t UTF-8`, or to fetch the file again"
    )]
    NotUtf8 {
        /// The file.
        path: PathBuf,
        /// The line.
        line: u64,
        /// The first byte of the line that does not fit, from 1.
        at: usize,
    },
    /// A line is not of the format.
    #[error("line {line} of {path:?} {what}")]
    BadLine {
        /// The file.
        path: PathBuf,
        /// The line.
        line: u64,
        /// What is wrong, and what to try.
        what: String,
    },
    /// A line has not the field that was asked for.
    #[error("line {line} of {path:?} has no field `{name}`; try one of: {}", known.join(", "))]
    NoField {
        /// The file.
        path: PathBuf,
        /// The line.
        line: u64,
        /// The field.
        name: String,
        /// Those that it has.
        known: Vec<String>,
    },
    /// A line has another number of columns.
    #[error("line {line} of {path:?} has {found} columns, expected {expected}")]
    Columns {
        /// The file.
        path: PathBuf,
        /// The line.
        line: u64,
        /// How many it has.
        found: usize,
        /// How many it should have, in words.
        expected: String,
    },
    /// A label that is not among those of the training data.
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
        /// Those of the training data, or the first of them.
        known: String,
    },
    /// A file is not of the format, at no line in particular.
    #[error("{path:?} {what}")]
    BadFile {
        /// The file.
        path: PathBuf,
        /// What is wrong, and what to try.
        what: String,
    },
    /// The two files of a corpus do not belong together.
    #[error(
        "{source_path:?} has {source_lines} lines and {target_path:?} has {target_lines}, expected as many: line n of one is the translation of line n of the other; try to cut them from the same text again"
    )]
    UnequalLines {
        /// The source text.
        source_path: PathBuf,
        /// Its lines.
        source_lines: u64,
        /// The target text.
        target_path: PathBuf,
        /// Its lines.
        target_lines: u64,
    },
    /// Nothing to train on.
    #[error("no sentences remain of {path:?}: {left_out}; try other data, or a larger max_len")]
    NothingRemains {
        /// The file, of a corpus the source's.
        path: PathBuf,
        /// Why not.
        left_out: String,
    },
    /// A file is not what it was when it was opened.
    #[error(
        "{path:?} has changed since it was opened; try to start again, and let nobody write to it meanwhile"
    )]
    Changed {
        /// The file.
        path: PathBuf,
    },
    /// An index behind the end.
    #[error("no sentence {index} in {path:?}, which has {len}")]
    OutOfRange {
        /// The file.
        path: PathBuf,
        /// Asked for, from 0.
        index: usize,
        /// How many there are.
        len: usize,
    },
    /// Another file would be overwritten.
    #[error("{path:?} is there, with other content, and is left as it is; try another place, or remove it")]
    InTheWay {
        /// The file.
        path: PathBuf,
    },
    /// Whoever asked for the work wants it no longer.
    #[error("stopped")]
    Stopped,
    /// A tokenizer refused a text.
    #[error("cannot split text into pieces: {what}")]
    Pieces {
        /// What it said.
        what: String,
    },
    /// No tokens of that name for BLEU.
    #[error("there is no way to split for BLEU named `{name}`; try 13a, char or none")]
    BleuTokens {
        /// The name as given.
        name: String,
    },
    /// An argument of sacreBLEU that has no counterpart here.
    #[error("BLEU is not changed by `{name}`; try -tok 13a, char or none, and -lc")]
    BleuArgument {
        /// The argument as given.
        name: String,
    },
    /// A task that cannot be made.
    #[error("cannot make the data: {what}")]
    Synth {
        /// What is wrong, and what to try.
        what: String,
    },
    /// Tokens that cannot be drawn so.
    #[error("cannot draw tokens: {what}")]
    Sampling {
        /// What is wrong, and what to try.
        what: String,
    },
}
