//! Errors in a configuration, and where they are.

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
    #[error("cannot read the configuration {}: {source}{advice}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// `; try …`, or nothing if it exists and is a file.
        advice: String,
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
    /// The key does not exist.
    #[error("{place}: unknown key {key}{advice}")]
    Unknown {
        /// The key that was given.
        key: String,
        /// Where.
        place: Place,
        /// `; try …`.
        advice: String,
    },
    /// The value does not have the key's type.
    #[error("{place}: {key}: expected {expects}, got {got}")]
    Value {
        /// The key.
        key: String,
        /// What was given.
        got: String,
        /// What the key takes.
        expects: String,
        /// Where.
        place: Place,
    },
    /// The `ds_config.json` cannot be used.
    #[error(transparent)]
    DeepSpeed(#[from] drumline::config::deepspeed::DeepSpeedError),
    /// A key at the end of the command line.
    #[error("{key} has no value; try {}", with_value(key))]
    NoValue {
        /// The key.
        key: String,
    },
    /// A value of the right type that cannot be used, or not together with others.
    #[error("{key} {what}")]
    Invalid {
        /// The key to change.
        key: &'static str,
        /// What is wrong with the value, and what to try.
        what: String,
    },
    /// The resolved configuration cannot be written.
    #[error("cannot write the configuration to {}: {source}; try another OUT_DIR", path.display())]
    Save {
        /// The file.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
}

/// A key with its value as `KEY VALUE`, also if the user wrote `KEY=VALUE`.
fn with_value(key: &str) -> String {
    match key.split_once('=') {
        Some((key, value)) if !value.is_empty() => format!("{key} {value}"),
        _ => format!("{} VALUE", key.trim_end_matches('=')),
    }
}
