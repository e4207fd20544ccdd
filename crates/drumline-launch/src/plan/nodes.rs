//! The number of nodes of a job: `4`, or `2:4` if it may grow and shrink.

use std::fmt;
use std::str::FromStr;

/// A range from `min` to `max` nodes, at least one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeRange {
    /// The job does not run with fewer nodes.
    pub min: usize,
    /// The job does not run with more nodes.
    pub max: usize,
}

/// The text is not a number or range of nodes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a number of nodes; try N, or MIN:MAX with 1 <= MIN <= MAX")]
pub struct NodeRangeError(String);

impl NodeRange {
    /// A range of exactly `count` nodes.
    pub fn exactly(count: usize) -> Self {
        Self { min: count, max: count }
    }

    /// Whether the number may change while the job runs.
    pub fn is_elastic(self) -> bool {
        self.min != self.max
    }
}

impl FromStr for NodeRange {
    type Err = NodeRangeError;

    fn from_str(text: &str) -> Result<Self, NodeRangeError> {
        let (min, max) = text.split_once(':').unwrap_or((text, text));
        let range = || Some(Self { min: min.trim().parse().ok()?, max: max.trim().parse().ok()? });
        let fits = |range: &Self| 0 < range.min && range.min <= range.max;
        range().filter(fits).ok_or_else(|| NodeRangeError(text.to_string()))
    }
}

impl fmt::Display for NodeRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_elastic() { write!(f, "{}:{}", self.min, self.max) } else { write!(f, "{}", self.min) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_or_a_range_of_nodes() {
        for (text, min, max) in [("1", 1, 1), ("4", 4, 4), ("2:4", 2, 4), ("3:3", 3, 3)] {
            assert_eq!(text.parse(), Ok(NodeRange { min, max }), "{text}");
        }
        for wrong in ["", "0", "0:2", "3:2", "1:2:3", "-1", "two", ":"] {
            assert!(wrong.parse::<NodeRange>().is_err(), "{wrong}");
        }
        assert_eq!(NodeRange { min: 2, max: 4 }.to_string(), "2:4");
        assert_eq!(NodeRange::exactly(2).to_string(), "2");
    }
}
