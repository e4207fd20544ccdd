//! JSON as people write it by hand: a tree of values, each with its line and column.
//!
//! ```text
//!   text ─▶ scanner: white space, comments, strings, words ─▶ parse: maps, lists, limits ─▶ Node{value, at}
//! ```
//!
//! Beside JSON it accepts comments (`//`, `/* */`, `#`), trailing commas, a line's end instead of a comma, single
//! quotes, keys and texts without quotes, and `True`, `False`, `None`, `Infinity`, `NaN`. A key that appears twice in a
//! map is an error, as in DeepSpeed. This module needs no other, so that the fuzz target includes it alone.

mod parse;
mod scanner;

use std::fmt;

pub use parse::parse;

/// The largest text, in bytes.
pub const MAX_BYTES: usize = 1 << 20;

/// The most maps and lists within each other.
pub const MAX_DEPTH: usize = 64;

/// Where something begins in a text, counted from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position {
    /// The line.
    pub line: usize,
    /// The character of the line.
    pub column: usize,
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.line, self.column)
    }
}

/// A value and where it begins.
#[derive(Debug, Clone, PartialEq)]
pub struct Node {
    /// The value.
    pub value: Value,
    /// Where it begins.
    pub at: Position,
}

/// A value.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// `null` or `None`.
    Null,
    /// `true`, `True`, `false`, `False`.
    Bool(bool),
    /// A number.
    Number(Number),
    /// A text.
    Text(String),
    /// A list.
    List(Vec<Node>),
    /// A map, in the order of the text.
    Map(Vec<Entry>),
}

/// A number, as it was written and as it was understood.
#[derive(Debug, Clone, PartialEq)]
pub struct Number {
    /// Its value.
    pub value: f64,
    /// Its digits.
    pub written: String,
}

/// A key of a map with its value.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    /// The key.
    pub key: String,
    /// Where the key begins.
    pub at: Position,
    /// Its value.
    pub node: Node,
}

impl Node {
    /// The value of a key, if this is a map that has it.
    pub fn get(&self, key: &str) -> Option<&Self> {
        let Value::Map(entries) = &self.value else { return None };
        entries.iter().find(|entry| entry.key == key).map(|entry| &entry.node)
    }
}

/// The value in one line of JSON. Numbers are shown as they were written, except for those that JSON does not have.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Null => f.write_str("null"),
            Self::Bool(value) => write!(f, "{value}"),
            Self::Number(number) => f.write_str(&number.written),
            Self::Text(text) => quoted(f, text),
            Self::List(nodes) => {
                f.write_str("[")?;
                for (place, node) in nodes.iter().enumerate() {
                    write!(f, "{}{}", if place == 0 { "" } else { ", " }, node.value)?;
                }
                f.write_str("]")
            }
            Self::Map(entries) => {
                f.write_str("{")?;
                for (place, Entry { key, node, .. }) in entries.iter().enumerate() {
                    f.write_str(if place == 0 { "" } else { ", " })?;
                    quoted(f, key)?;
                    write!(f, ": {}", node.value)?;
                }
                f.write_str("}")
            }
        }
    }
}

fn quoted(f: &mut fmt::Formatter<'_>, text: &str) -> fmt::Result {
    f.write_str("\"")?;
    for letter in text.chars() {
        match letter {
            '"' | '\\' => write!(f, "\\{letter}")?,
            '\n' => f.write_str("\\n")?,
            '\t' => f.write_str("\\t")?,
            '\r' => f.write_str("\\r")?,
            letter if letter.is_control() => write!(f, "\\u{:04x}", letter as u32)?,
            letter => write!(f, "{letter}")?,
        }
    }
    f.write_str("\"")
}

/// A text that cannot be read, and where.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{at}: {problem}")]
pub struct JsonError {
    /// Where it cannot be read.
    pub at: Position,
    /// Why.
    pub problem: JsonProblem,
}

/// Why a text cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum JsonProblem {
    /// Longer than [`MAX_BYTES`].
    #[error(
        "the text has {bytes} bytes, and a configuration may have {MAX_BYTES}; try the path of another file"
    )]
    TooLong {
        /// Its length.
        bytes: usize,
    },
    /// More maps and lists within each other than [`MAX_DEPTH`].
    #[error("maps and lists are more than {MAX_DEPTH} deep; try fewer")]
    TooDeep,
    /// Nothing but white space and comments.
    #[error("there is nothing but white space; try {{\"train_batch_size\": 32}}")]
    Empty,
    /// Something else than what must stand here.
    #[error("expected {expected}, got {got}")]
    Unexpected {
        /// What must stand here.
        expected: &'static str,
        /// What stands here.
        got: String,
    },
    /// A map, list, text or comment without its end.
    #[error("{what} has no end; try {end} after it")]
    NoEnd {
        /// What begins here.
        what: &'static str,
        /// What ends it.
        end: &'static str,
    },
    /// A sequence with a backslash that does not exist.
    #[error("a text has the escape {escape}, which does not exist; try two backslashes")]
    Escape {
        /// The sequence.
        escape: String,
    },
    /// A number that is too large or is not one.
    #[error("{written} is not a number; try one such as 0.1, 500 or 5e8")]
    Number {
        /// What stands here.
        written: String,
    },
    /// The same key twice in a map.
    #[error("the key {key} appears twice, first in line {first}; try to remove one of them")]
    Duplicate {
        /// The key.
        key: String,
        /// The line in which it appears first.
        first: usize,
    },
}
