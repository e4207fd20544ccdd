//! Why a `ds_config.json` cannot be used.

use std::fmt;
use std::io;

use crate::config::json::{JsonError, Position};

/// Why a configuration cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeepSpeedError {
    /// The file cannot be read.
    #[error("cannot read {file}: {source}; try the path of a ds_config.json")]
    Read {
        /// The file.
        file: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The text is neither JSON nor what people write instead.
    #[error("{file}:{source}")]
    Json {
        /// The file.
        file: String,
        /// Where, and why.
        #[source]
        source: JsonError,
    },
    /// The text is a value, but not a map.
    #[error("{file} is not a map of keys; try {{\"train_batch_size\": 32}}")]
    NotAMap {
        /// The file.
        file: String,
    },
    /// Values that cannot be used.
    #[error("{}", listed(file, problems))]
    Problems {
        /// The file.
        file: String,
        /// All of them, in the order of the file.
        problems: Vec<Problem>,
    },
}

/// A value that cannot be used, or a key that is missing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// The key's path.
    pub key: String,
    /// Where its value is, if it is in the file.
    pub at: Option<Position>,
    /// What is wrong, and what to try. It continues the sentence that the key begins.
    pub what: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.key, self.what)
    }
}

fn listed(file: &str, problems: &[Problem]) -> String {
    let place = |problem: &Problem| problem.at.map(|at| format!(":{at}")).unwrap_or_default();
    match problems {
        [one] => format!("{file}{}: {one}", place(one)),
        several => {
            let lines = several.iter().map(|problem| format!("\n  {file}{}: {problem}", place(problem)));
            format!("{file} has {} mistakes:{}", several.len(), lines.collect::<String>())
        }
    }
}
