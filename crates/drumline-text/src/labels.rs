//! Names of classes or tags, and their numbers.

use crate::TextError;
use crate::beside::write_whole;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeSet, HashMap};
use std::path::Path;

/// Labels and their ids, from 0, in the order of their letters: the same on all ranks that saw the same labels.
///
/// ```
/// use drumline_text::Labels;
///
/// let labels = Labels::of(["pos", "neg", "pos"]);
/// assert_eq!((labels.len(), labels.id("pos"), labels.id("none")), (2, Some(1), None));
/// assert_eq!(labels.name(0), Some("neg"));
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Vec<String>", into = "Vec<String>")]
pub struct Labels {
    names: Vec<String>,
    ids: HashMap<String, u32>,
}

impl Labels {
    /// The labels of a data set, each as often as it comes.
    pub fn of<L: Into<String>>(labels: impl IntoIterator<Item = L>) -> Self {
        let names: BTreeSet<String> = labels.into_iter().map(Into::into).collect();
        Self::from(Vec::from_iter(names))
    }

    /// How many differ.
    pub fn len(&self) -> usize {
        self.names.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.names.is_empty()
    }

    /// The number of a label.
    pub fn id(&self, name: &str) -> Option<u32> {
        self.ids.get(name).copied()
    }

    /// All, in the order of their numbers.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Read a file that [`write`](Self::write) has made: a JSON list.
    pub fn read(path: impl AsRef<Path>) -> Result<Self, TextError> {
        let path = path.as_ref();
        let bytes =
            std::fs::read(path).map_err(|source| TextError::ReadFile { path: path.to_owned(), source })?;
        let bad = |what| TextError::BadFile { path: path.to_owned(), what };
        let labels: Self = serde_json::from_slice(&bytes)
            .map_err(|error| bad(format!("is no list of labels: {error}; expected [\"name\", …]")))?;
        match labels.ids.len() == labels.names.len() {
            true => Ok(labels),
            false => Err(bad("lists a label twice; try to build it again".to_owned())),
        }
    }

    /// Write it, whole or not at all.
    pub fn write(&self, path: impl AsRef<Path>) -> Result<(), TextError> {
        let mut text = serde_json::json!(self.names).to_string();
        text.push('\n');
        write_whole(path.as_ref(), text.as_bytes())
    }

    /// The label of a number.
    pub fn name(&self, id: u32) -> Option<&str> {
        self.names.get(id as usize).map(String::as_str)
    }
}

impl From<Vec<String>> for Labels {
    fn from(names: Vec<String>) -> Self {
        let ids = names.iter().cloned().zip(0..).collect();
        Self { names, ids }
    }
}

impl From<Labels> for Vec<String> {
    fn from(labels: Labels) -> Self {
        labels.names
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_bring_back_what_was_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("labels.json");
        let labels = Labels::of(["O", "B-\"x\"", "两"]);
        labels.write(&path).unwrap();
        assert_eq!(Labels::read(&path).unwrap(), labels);
        for (text, told) in [("[\"a\", \"a\"]", "lists a label twice"), ("{}", "is no list of labels")] {
            std::fs::write(&path, text).unwrap();
            let error = Labels::read(&path).unwrap_err().to_string();
            assert!(error.contains(told) && error.contains("labels.json"), "{error}");
        }
    }
}
