//! A set of CPUs, in the kernel's notation: `0-3,8`.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use rustix::thread::CpuSet;
use serde::{Deserialize, Serialize};

/// CPUs by their numbers.
///
/// ```
/// use drumline_launch::placing::Cores;
///
/// let cores: Cores = "0-3,8".parse()?;
/// assert_eq!((cores.len(), cores.to_string()), (5, "0-3,8".to_string()));
/// # Ok::<(), drumline_launch::placing::CoresError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Cores(BTreeSet<usize>);

/// The highest CPU number that can be bound to.
const HIGHEST: usize = CpuSet::MAX_CPU - 1;

impl Cores {
    /// The number of CPUs.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether the set contains this CPU.
    pub fn contains(&self, cpu: usize) -> bool {
        self.0.contains(&cpu)
    }

    /// The CPU numbers, in order.
    pub fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        self.0.iter().copied()
    }

    pub(crate) fn to_set(&self) -> CpuSet {
        let mut set = CpuSet::new();
        self.iter().filter(|cpu| *cpu <= HIGHEST).for_each(|cpu| set.set(cpu));
        set
    }

    /// The lowest CPU number.
    pub fn first(&self) -> Option<usize> {
        self.0.first().copied()
    }
}

impl FromIterator<usize> for Cores {
    fn from_iter<I: IntoIterator<Item = usize>>(cpus: I) -> Self {
        Self(cpus.into_iter().collect())
    }
}

impl fmt::Display for Cores {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut ranges: Vec<(usize, usize)> = Vec::new();
        for cpu in self.iter() {
            match ranges.last_mut() {
                Some((_, last)) if *last + 1 == cpu => *last = cpu,
                _ => ranges.push((cpu, cpu)),
            }
        }
        let range = |(first, last): (usize, usize)| {
            if first == last { first.to_string() } else { format!("{first}-{last}") }
        };
        f.write_str(&ranges.into_iter().map(range).collect::<Vec<_>>().join(","))
    }
}

/// The text is not a list of CPUs.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a list of cores from 0 to {HIGHEST}; try 0-3,8")]
pub struct CoresError(String);

impl FromStr for Cores {
    type Err = CoresError;

    fn from_str(text: &str) -> Result<Self, CoresError> {
        let wrong = || CoresError(text.to_string());
        let number =
            |text: &str| text.trim().parse::<usize>().ok().filter(|cpu| *cpu <= HIGHEST).ok_or_else(wrong);
        let mut cpus = BTreeSet::new();
        for range in text.split(',').filter(|_| !text.trim().is_empty()) {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            let first = number(first)?;
            let last = number(last)?;
            if first > last {
                return Err(wrong());
            }
            cpus.extend(first..=last);
        }
        Ok(Self(cpus))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_parsed_and_formatted() {
        for (text, written) in
            [("", ""), ("0\n", "0"), ("0-1", "0-1"), ("3,1,2", "1-3"), ("0-3,8,10-11", "0-3,8,10-11")]
        {
            assert_eq!(text.parse::<Cores>().unwrap().to_string(), written, "{text:?}");
        }
        for text in ["a", "3-1", "0-", ",", "0,,1", "0-99999999999", "-1", "1024"] {
            assert!(text.parse::<Cores>().is_err(), "{text:?}");
        }
    }
}
