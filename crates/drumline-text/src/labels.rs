//! Names of classes or tags, and their numbers.

use serde::{Deserialize, Serialize};
use std::collections::{BTreeSet, HashMap};

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
