//! What was asked for about the workers' output: plain data and the grammar of `--redirects` and `--tee`.
//!
//! ```text
//!   "3"         both streams of every local rank        0 none, 1 stdout, 2 stderr, 3 both
//!   "0:1,1:2"   stdout of local rank 0, stderr of local rank 1, nothing of the others
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// Which of a worker's streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Std {
    /// Neither.
    #[default]
    None,
    /// stdout.
    Out,
    /// stderr.
    Err,
    /// Both.
    Both,
}

/// Which streams of which local rank.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StdOf {
    /// Of a local rank that is not named.
    others: Std,
    named: BTreeMap<usize, Std>,
}

impl StdOf {
    /// The streams of one local rank.
    pub fn of(&self, local_rank: usize) -> Std {
        self.named.get(&local_rank).copied().unwrap_or(self.others)
    }

    /// Whether no stream of any rank is asked for.
    pub fn is_none(&self) -> bool {
        self.others == Std::None && self.named.values().all(|std| *std == Std::None)
    }
}

impl fmt::Display for StdOf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.named.is_empty() {
            return write!(f, "{}", self.others as u8);
        }
        let each: Vec<_> = self.named.iter().map(|(rank, std)| format!("{rank}:{}", *std as u8)).collect();
        f.write_str(&each.join(","))
    }
}

/// A text that does not follow the grammar.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no choice of streams; try 1 (stdout), 2 (stderr), 3 (both) or LOCAL_RANK:1,LOCAL_RANK:2")]
pub struct StdOfError(String);

impl FromStr for StdOf {
    type Err = StdOfError;

    fn from_str(text: &str) -> Result<Self, StdOfError> {
        let wrong = || StdOfError(text.to_string());
        if let Some(others) = std_numbered(text) {
            return Ok(Self { others, named: BTreeMap::new() });
        }
        let pair = |part: &str| {
            let (rank, std) = part.split_once(':')?;
            Some((rank.parse().ok()?, std_numbered(std)?))
        };
        let named = text.split(',').map(pair).collect::<Option<_>>().ok_or_else(wrong)?;
        Ok(Self { others: Std::None, named })
    }
}

fn std_numbered(text: &str) -> Option<Std> {
    match text {
        "0" => Some(Std::None),
        "1" => Some(Std::Out),
        "2" => Some(Std::Err),
        "3" => Some(Std::Both),
        _ => None,
    }
}

/// All that was asked for about output.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LogPlan {
    /// Where the folders of runs are; a temporary place if none.
    pub dir: Option<PathBuf>,
    /// Streams that go into a file only.
    pub redirects: StdOf,
    /// Streams that go into a file and to the console.
    pub tee: StdOf,
    /// The local ranks that are shown on the console; all if `None`.
    pub filter: Option<BTreeSet<usize>>,
    /// Rank 0 only on the console.
    pub quiet_ranks: bool,
    /// Template of what stands before each line.
    pub prefix: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_number_is_for_all_and_pairs_are_for_those_named() {
        let all: StdOf = "3".parse().unwrap();
        assert_eq!((all.of(0), all.of(9)), (Std::Both, Std::Both));
        let some: StdOf = "0:1,1:2,3:0".parse().unwrap();
        assert_eq!([0, 1, 2, 3].map(|rank| some.of(rank)), [Std::Out, Std::Err, Std::None, Std::None]);
        assert!(StdOf::default().is_none() && !some.is_none());
        for wrong in ["", "4", "0:4", "x:1", "0:1,", "0=1", "-1:1"] {
            assert!(wrong.parse::<StdOf>().is_err(), "{wrong}");
        }
    }
}
