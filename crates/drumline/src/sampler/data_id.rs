//! Which data set a position is of.

use serde::{Deserialize, Serialize};

/// Tells data sets apart: by their length and, where the data set has one, its fingerprint.
///
/// ```
/// use drumline::DataId;
///
/// let saved = DataId { num_samples: 60, fingerprint: Some(0x1a2b) };
/// assert!(saved.is_same(DataId { num_samples: 60, fingerprint: None }), "who has no fingerprint is not asked for it");
/// assert!(!saved.is_same(DataId { num_samples: 60, fingerprint: Some(7) }));
/// assert_eq!(saved.to_string(), "60 samples with fingerprint 00001a2b");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataId {
    /// Its length.
    pub num_samples: usize,
    /// What [`Dataset::fingerprint`](crate::Dataset::fingerprint) says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fingerprint: Option<u32>,
}

impl DataId {
    /// Whether both are of one data set, as far as can be seen.
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
