//! The cores that a process may run on. Ranks send them to each other as ranges (`0-63,128-191`), which are short on large
//! machines too.
//!
//! They are kept as sorted, disjoint ranges, so that a large number sent by another process costs no memory.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The numbers of cores, as the first and last of each range.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub(crate) struct Cores(Vec<(usize, usize)>);

impl Cores {
    /// The cores that this thread may run on.
    pub(crate) fn of_this_thread() -> Self {
        let set = rustix::thread::sched_getaffinity(None).unwrap_or_default();
        (0..rustix::thread::CpuSet::MAX_CPU)
            .filter(|&core| set.is_set(core))
            .map(|core| (core, core))
            .collect()
    }

    /// The cores that are in any of the sets.
    pub(crate) fn union<'a>(all: impl IntoIterator<Item = &'a Self>) -> Self {
        all.into_iter().flat_map(|cores| cores.0.iter().copied()).collect()
    }

    /// The number of cores.
    pub(crate) fn len(&self) -> usize {
        self.0.iter().map(|(first, last)| (last - first).saturating_add(1)).fold(0, usize::saturating_add)
    }
}

/// Ranges in any order, with overlaps.
impl FromIterator<(usize, usize)> for Cores {
    fn from_iter<I: IntoIterator<Item = (usize, usize)>>(ranges: I) -> Self {
        let mut ranges: Vec<_> = ranges.into_iter().collect();
        ranges.sort_unstable();
        let mut apart: Vec<(usize, usize)> = Vec::new();
        for (first, last) in ranges {
            match apart.last_mut() {
                Some(before) if first <= before.1.saturating_add(1) => before.1 = before.1.max(last),
                _ => apart.push((first, last)),
            }
        }
        apart.shrink_to_fit();
        Self(apart)
    }
}

impl fmt::Display for Cores {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (first, last)) in self.0.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            if first == last {
                write!(f, "{comma}{first}")?;
            } else {
                write!(f, "{comma}{first}-{last}")?;
            }
        }
        Ok(())
    }
}

impl From<Cores> for String {
    fn from(cores: Cores) -> String {
        cores.to_string()
    }
}

/// A text that is no list of cores.
#[derive(Debug, thiserror::Error)]
#[error("expected cores such as `0-3,8`, got `{0}`")]
pub(crate) struct BadCores(String);

impl TryFrom<String> for Cores {
    type Error = BadCores;

    fn try_from(text: String) -> Result<Self, BadCores> {
        let parse = |part: &str| {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let range = (first.parse().ok()?, last.parse().ok()?);
            (range.0 <= range.1).then_some(range)
        };
        let parts = text.split(',').filter(|part| !part.is_empty());
        let all = parts.map(parse).collect::<Option<Self>>();
        all.ok_or(BadCores(text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cores(text: &str) -> Cores {
        text.to_owned().try_into().unwrap()
    }

    #[test]
    fn ranges_there_and_back() {
        for text in ["", "0", "0-63,128-191", "1,3,5-6"] {
            assert_eq!(cores(text).to_string(), text);
        }
        assert_eq!(cores("6,5,3,1-1,2-3").to_string(), "1-3,5-6");
        assert_eq!(cores("0-63,128-191").len(), 128);
        for wrong in ["3-1", "a", "1-", "-", "1-2-3"] {
            let error = Cores::try_from(wrong.to_owned()).unwrap_err().to_string();
            assert!(error.contains("`0-3,8`"), "{wrong}");
        }
    }

    #[test]
    fn a_core_of_two_counts_once() {
        assert_eq!(Cores::union([&cores("0-3"), &cores("2-5"), &cores("9")]).len(), 7);
        assert_eq!(Cores::union([]).len(), 0);
        let all = format!("0-{}", usize::MAX);
        assert_eq!(Cores::union([&cores(&all), &cores("1")]).len(), usize::MAX, "no number is too large");
    }

    #[test]
    fn the_cores_of_a_large_machine_are_a_short_text() {
        let all: Cores = (0..256).map(|core| (core, core)).collect();
        assert_eq!(serde_json::to_string(&all).unwrap(), "\"0-255\"");
        assert!(Cores::of_this_thread().len() >= 1);
    }
}
