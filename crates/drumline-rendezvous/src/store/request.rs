//! The requests to a store and their replies: plain data, the same for every implementation.

use super::error::StoreError;
use std::fmt;

/// Longest key in bytes.
pub const MAX_KEY: usize = 8 * 1024;
/// Longest value in bytes, and the most bytes that all values of one request or reply may have.
pub const MAX_VALUE: usize = 64 * 1024 * 1024;

/// One request to a store; see the [`Store`](crate::Store) method of the same name.
#[allow(missing_docs)]
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request {
    Set { key: String, value: Vec<u8> },
    Get { key: String },
    Wait { keys: Vec<String> },
    Add { key: String, delta: i64 },
    CompareSet { key: String, expected: Option<Vec<u8>>, desired: Vec<u8> },
    Append { key: String, value: Vec<u8> },
    Tail { key: String, from: u64 },
    Delete { key: String },
    NumKeys,
    List { prefix: String },
    MultiGet { keys: Vec<String> },
    MultiSet { pairs: Vec<(String, Vec<u8>)> },
}

/// The answer to one request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    /// The request was carried out.
    Done,
    /// One value.
    Bytes(Vec<u8>),
    /// A signed number.
    Number(i64),
    /// A count or a length.
    Count(u64),
    /// Yes or no.
    Flag(bool),
    /// Keys.
    Names(Vec<String>),
    /// Several values.
    Values(Vec<Vec<u8>>),
    /// The waiting client cancelled the wait.
    Cancelled,
    /// The request was not carried out, and why.
    Failed(String),
}

impl Request {
    /// Whether the answer may have to wait for another client.
    pub fn waits(&self) -> bool {
        matches!(self, Self::Get { .. } | Self::Wait { .. } | Self::Tail { .. } | Self::MultiGet { .. })
    }

    /// Whether it can change the store.
    pub fn changes(&self) -> bool {
        !self.waits() && !matches!(self, Self::NumKeys | Self::List { .. })
    }

    /// All keys of the request; for `List`, the prefix.
    pub fn keys(&self) -> Vec<&str> {
        match self {
            Self::Set { key, .. } | Self::Get { key } | Self::Add { key, .. } | Self::Delete { key } => {
                vec![key]
            }
            Self::CompareSet { key, .. } | Self::Append { key, .. } | Self::Tail { key, .. } => vec![key],
            Self::List { prefix } => vec![prefix],
            Self::Wait { keys } | Self::MultiGet { keys } => keys.iter().map(String::as_str).collect(),
            Self::MultiSet { pairs } => pairs.iter().map(|(key, _)| key.as_str()).collect(),
            Self::NumKeys => Vec::new(),
        }
    }

    /// The same wait, only for those keys that `is_missing`.
    pub(crate) fn only(&self, is_missing: impl Fn(&str) -> bool) -> Request {
        let missing = |keys: &[String]| keys.iter().filter(|key| is_missing(key)).cloned().collect();
        match self {
            Self::Wait { keys } => Self::Wait { keys: missing(keys) },
            Self::MultiGet { keys } => Self::MultiGet { keys: missing(keys) },
            other => other.clone(),
        }
    }

    /// The same request with every key put through `rename`.
    #[must_use]
    pub fn rename(mut self, rename: impl Fn(&str) -> String) -> Request {
        match &mut self {
            Self::Set { key, .. } | Self::Get { key } | Self::Add { key, .. } | Self::Delete { key } => {
                *key = rename(key);
            }
            Self::CompareSet { key, .. } | Self::Append { key, .. } | Self::Tail { key, .. } => {
                *key = rename(key)
            }
            Self::List { prefix } => *prefix = rename(prefix),
            Self::Wait { keys } | Self::MultiGet { keys } => {
                keys.iter_mut().for_each(|key| *key = rename(key))
            }
            Self::MultiSet { pairs } => pairs.iter_mut().for_each(|(key, _)| *key = rename(key)),
            Self::NumKeys => {}
        }
        self
    }

    /// Checks keys and values against the limits, before anything is sent or stored.
    pub fn check_limits(&self) -> Result<(), StoreError> {
        for key in self.keys() {
            within("a key", key.len(), MAX_KEY)?;
        }
        let bytes = match self {
            Self::Set { value, .. } | Self::Append { value, .. } => value.len(),
            Self::CompareSet { expected, desired, .. } => {
                desired.len() + expected.as_ref().map_or(0, Vec::len)
            }
            Self::MultiSet { pairs } => pairs.iter().map(|(key, value)| key.len() + value.len()).sum(),
            Self::Wait { keys } | Self::MultiGet { keys } => keys.iter().map(|key| 4 + key.len()).sum(),
            _ => 0,
        };
        within("the values of one request", bytes, MAX_VALUE)
    }
}

fn within(what: &'static str, bytes: usize, limit: usize) -> Result<(), StoreError> {
    if bytes > limit { Err(StoreError::TooLarge { what, bytes, limit }) } else { Ok(()) }
}

/// Formats the request for messages: `get of "a"`, `wait for "a", "b" and 3 more`.
impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verb = match self {
            Self::Set { .. } => "set of",
            Self::Get { .. } => "get of",
            Self::Wait { .. } => "wait for",
            Self::Add { .. } => "add to",
            Self::CompareSet { .. } => "compare_set of",
            Self::Append { .. } => "append to",
            Self::Tail { .. } => "tail of",
            Self::Delete { .. } => "delete of",
            Self::NumKeys => "num_keys",
            Self::List { .. } => "list of",
            Self::MultiGet { .. } => "multi_get of",
            Self::MultiSet { .. } => "multi_set of",
        };
        f.write_str(verb)?;
        let keys = self.keys();
        for (i, key) in keys.iter().take(3).enumerate() {
            let shown: String = key.chars().take(64).collect();
            write!(f, "{} {shown:?}", if i == 0 { "" } else { "," })?;
        }
        if keys.len() > 3 { write!(f, " and {} more", keys.len() - 3) } else { Ok(()) }
    }
}

/// Each method expects the kind of reply that the request has.
impl Reply {
    pub(crate) fn done(self) -> Result<(), StoreError> {
        match self {
            Self::Done => Ok(()),
            other => Err(other.unexpected()),
        }
    }

    pub(crate) fn bytes(self) -> Result<Vec<u8>, StoreError> {
        match self {
            Self::Bytes(bytes) => Ok(bytes),
            other => Err(other.unexpected()),
        }
    }

    pub(crate) fn number(self) -> Result<i64, StoreError> {
        match self {
            Self::Number(number) => Ok(number),
            other => Err(other.unexpected()),
        }
    }

    pub(crate) fn count(self) -> Result<u64, StoreError> {
        match self {
            Self::Count(count) => Ok(count),
            other => Err(other.unexpected()),
        }
    }

    pub(crate) fn flag(self) -> Result<bool, StoreError> {
        match self {
            Self::Flag(flag) => Ok(flag),
            other => Err(other.unexpected()),
        }
    }

    pub(crate) fn names(self) -> Result<Vec<String>, StoreError> {
        match self {
            Self::Names(names) => Ok(names),
            other => Err(other.unexpected()),
        }
    }

    pub(crate) fn values(self) -> Result<Vec<Vec<u8>>, StoreError> {
        match self {
            Self::Values(values) => Ok(values),
            other => Err(other.unexpected()),
        }
    }

    fn unexpected(self) -> StoreError {
        match self {
            Self::Failed(reason) => StoreError::Rejected { reason },
            other => StoreError::Rejected { reason: format!("unexpected reply {other:?}") },
        }
    }
}
