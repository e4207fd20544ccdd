//! What can be wrong with a configuration, and where it was given.

use std::fmt;
use std::io;
use std::path::PathBuf;

/// Where a value was given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// A line of a file, from 1.
    File {
        /// The file.
        path: PathBuf,
        /// The line.
        line: u64,
    },
    /// A `KEY VALUE` pair.
    CommandLine,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File { path, line } => write!(f, "{}:{line}", path.display()),
            Self::CommandLine => f.write_str("the command line"),
        }
    }
}

/// Why a configuration cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The file is not YAML, or not a map of keys.
    #[error("{place}: {what}")]
    Yaml {
        /// Where.
        place: Place,
        /// What is wrong there.
        what: String,
    },
    /// There is no such key.
    #[error("{place}: unknown key {key}{advice}")]
    Unknown {
        /// The key as it was given.
        key: String,
        /// Where.
        place: Place,
        /// `; try …`, or nothing if no key is like it.
        advice: String,
    },
    /// The key takes something else.
    #[error("{place}: {key}: expected {expects}, got {got}")]
    Value {
        /// The key.
        key: String,
        /// What was given.
        got: String,
        /// What it takes.
        expects: String,
        /// Where.
        place: Place,
    },
    /// A key at the end of the command line.
    #[error("{key} has no value; try {}", with_value(key))]
    NoValue {
        /// The key.
        key: String,
    },
    /// Values that cannot be used, or not together.
    #[error("{key} {what}")]
    Unfit {
        /// The key that is to be changed.
        key: &'static str,
        /// What is wrong with it, and what to try.
        what: String,
    },
    /// The resolved configuration cannot be written.
    #[error("cannot write the configuration to {}: {source}; try another OUT_DIR", path.display())]
    Save {
        /// Where it was to go.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
}

/// A key with its value as they are given; an equals sign is what others have between them.
fn with_value(key: &str) -> String {
    match key.split_once('=') {
        Some((key, value)) if !value.is_empty() => format!("{key} {value}"),
        _ => format!("{} VALUE", key.trim_end_matches('=')),
    }
}
