//! The names of classes or tags, and their ids.

use crate::TextError;
use crate::beside::write_whole;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeSet, HashMap};
use std::path::Path;

/// Labels and their ids, from 0, in alphabetical order. All ranks that saw the same labels have the same ids.
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
    /// The labels of a data set. Repeated labels count once.
    pub fn of<L: Into<String>>(labels: impl IntoIterator<Item = L>) -> Self {
        let names: BTreeSet<String> = labels.into_iter().map(Into::into).collect();
        Self::from(Vec::from_iter(names))
    }

    /// The number of labels.
    pub fn len(&self) -> usize {
        self.names.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.names.is_empty()
    }

    /// The id of a label.
    pub fn id(&self, name: &str) -> Option<u32> {
        self.ids.get(name).copied()
    }

    /// All labels, in the order of their ids.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Reads a file that [`write`](Self::write) has written: a JSON list.
    pub fn read(path: impl AsRef<Path>) -> Result<Self, TextError> {
        let path = path.as_ref();
        let bytes =
            std::fs::read(path).map_err(|source| TextError::ReadFile { path: path.to_owned(), source })?;
        let bad = |what| TextError::BadFile { path: path.to_owned(), what };
        let labels: Self = serde_json::from_slice(&bytes)
            .map_err(|error| bad(format!("is not a list of labels: {error}; expected [\"name\", …]")))?;
        if labels.ids.len() != labels.names.len() {
            return Err(bad("lists a label twice; try building it again".to_owned()));
        }
        Ok(labels)
    }

    /// Writes the labels atomically, as a JSON list.
    pub fn write(&self, path: impl AsRef<Path>) -> Result<(), TextError> {
        let mut text = serde_json::json!(self.names).to_string();
        text.push('\n');
        write_whole(path.as_ref(), text.as_bytes())
    }

    /// The label of an id.
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
    fn a_file_is_read_as_it_was_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("labels.json");
        let labels = Labels::of(["O", "B-\"x\"", "两"]);
        labels.write(&path).unwrap();
        assert_eq!(Labels::read(&path).unwrap(), labels);
        for (text, expected) in [("[\"a\", \"a\"]", "lists a label twice"), ("{}", "is not a list of labels")]
        {
            std::fs::write(&path, text).unwrap();
            let error = Labels::read(&path).unwrap_err().to_string();
            assert!(error.contains(expected) && error.contains("labels.json"), "{error}");
        }
    }
}
