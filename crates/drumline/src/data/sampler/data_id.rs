//! The identity of a data set.

use serde::{Deserialize, Serialize};

/// Identifies a data set by its length and, if it has one, its fingerprint.
///
/// ```
/// use drumline::data::DataId;
///
/// let saved = DataId { num_samples: 60, fingerprint: Some(0x1a2b) };
/// assert!(saved.is_same(DataId { num_samples: 60, fingerprint: None }), "only two fingerprints are compared");
/// assert!(!saved.is_same(DataId { num_samples: 60, fingerprint: Some(7) }));
/// assert_eq!(saved.to_string(), "60 samples with fingerprint 00001a2b");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataId {
    /// The length of the data set.
    pub num_samples: usize,
    /// The value of [`Dataset::fingerprint`](crate::data::Dataset::fingerprint).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fingerprint: Option<u32>,
}

impl DataId {
    /// Whether both are the same data set, as far as is known.
    pub fn is_same(self, other: Self) -> bool {
        let prints = self.fingerprint.zip(other.fingerprint);
        self.num_samples == other.num_samples && prints.is_none_or(|(one, other)| one == other)
    }
}

impl std::fmt::Display for DataId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} samples", self.num_samples)?;
        self.fingerprint.map_or(Ok(()), |print| write!(f, " with fingerprint {print:08x}"))
    }
}
