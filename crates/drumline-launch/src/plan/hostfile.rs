//! Parses hosts and their slots, in the grammar of DeepSpeed's hostfile and filters.
//!
//! ```text
//!   worker-0 slots=4    # a comment             worker-0@worker-1:0,2
//!   worker-1 slots=4                            └ all slots  └ slots 0 and 2
//! ```
//! Pure functions: texts in, lists out.

use std::collections::{BTreeSet, HashSet};

/// One host and its slots (GPUs) that are used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostSlots {
    /// Its name, as `ssh` takes it.
    pub name: String,
    /// Its slots, in order.
    pub slots: Vec<usize>,
}

/// Why a hostfile or filter is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HostfileError {
    /// A line that does not follow the grammar.
    #[error("line {line} of the hostfile is `{text}`; try HOST slots=N")]
    Line {
        /// The line number, from 1.
        line: usize,
        /// The text of the line.
        text: String,
    },
    /// A host is listed twice.
    #[error("line {line} of the hostfile names {name} again; try one line with all its slots")]
    Duplicate {
        /// The line number, from 1.
        line: usize,
        /// The host.
        name: String,
    },
    /// No host at all.
    #[error("the hostfile names no host; try a line HOST slots=N")]
    Empty,
    /// A filter that does not follow the grammar.
    #[error("`{0}` is not a choice of hosts; try HOST@HOST:0,1")]
    Filter(String),
    /// A filter names an unknown host.
    #[error("there is no host {name} to choose from; try one of {known}")]
    NoHost {
        /// The name in the filter.
        name: String,
        /// The known hosts.
        known: String,
    },
    /// A filter names an unknown slot.
    #[error("{name} has no slot {slot}; try one of {known:?}")]
    NoSlot {
        /// The host.
        name: String,
        /// The slot in the filter.
        slot: usize,
        /// The known slots.
        known: Vec<usize>,
    },
    /// No slot is left.
    #[error("`{0}` leaves no slot on any host; try excluding fewer")]
    NothingLeft(String),
}

/// Parses a hostfile.
pub fn parse_hostfile(text: &str) -> Result<Vec<HostSlots>, HostfileError> {
    let mut hosts: Vec<HostSlots> = Vec::new();
    for (index, whole) in text.lines().enumerate() {
        let line = index + 1;
        let content = whole.split('#').next().unwrap_or_default().trim();
        if content.is_empty() {
            continue;
        }
        let host = host_of(content).ok_or_else(|| HostfileError::Line { line, text: content.to_string() })?;
        if hosts.iter().any(|other| other.name == host.name) {
            return Err(HostfileError::Duplicate { line, name: host.name });
        }
        hosts.push(host);
    }
    if hosts.is_empty() { Err(HostfileError::Empty) } else { Ok(hosts) }
}

fn host_of(line: &str) -> Option<HostSlots> {
    let mut words = line.split_whitespace();
    let name = words.next()?;
    let slots = words.next()?.strip_prefix("slots=")?.parse().ok()?;
    let fits = words.next().is_none() && !name.starts_with('-') && (1..=MOST_SLOTS).contains(&slots);
    fits.then(|| HostSlots { name: name.to_string(), slots: (0..slots).collect() })
}

/// More slots than any machine has: a mistyped number must not fill the memory.
const MOST_SLOTS: usize = 65_535;

/// The hosts and slots that the filter names, in the filter's order of hosts.
pub fn include_slots(hosts: &[HostSlots], filter: &str) -> Result<Vec<HostSlots>, HostfileError> {
    let chosen = parse_filter(hosts, filter)?;
    Ok(chosen.into_iter().map(|(host, slots)| HostSlots { name: host.name.clone(), slots }).collect())
}

/// The hosts and slots that the filter does not name; a host without slots is left out.
pub fn exclude_slots(hosts: &[HostSlots], filter: &str) -> Result<Vec<HostSlots>, HostfileError> {
    let gone = parse_filter(hosts, filter)?;
    let keeps = |host: &HostSlots, slot: &usize| {
        !gone.iter().any(|(other, slots)| other.name == host.name && slots.contains(slot))
    };
    let rest = hosts.iter().map(|host| {
        let slots = host.slots.iter().copied().filter(|slot| keeps(host, slot)).collect();
        HostSlots { name: host.name.clone(), slots }
    });
    let left: Vec<_> = rest.filter(|host| !host.slots.is_empty()).collect();
    if left.is_empty() { Err(HostfileError::NothingLeft(filter.to_string())) } else { Ok(left) }
}

fn parse_filter<'a>(
    hosts: &'a [HostSlots],
    filter: &str,
) -> Result<Vec<(&'a HostSlots, Vec<usize>)>, HostfileError> {
    let mut seen = HashSet::new();
    let part = |part: &str| {
        let (name, slots) = part.split_once(':').map_or((part, None), |(name, slots)| (name, Some(slots)));
        let host = hosts.iter().find(|host| host.name == name.trim()).ok_or_else(|| no_host(hosts, name))?;
        if !seen.insert(&host.name) {
            return Err(HostfileError::Filter(filter.to_string()));
        }
        let slots = slots.map_or(Ok(host.slots.clone()), |list| slots_of(host, list, filter))?;
        Ok((host, slots))
    };
    filter.split('@').map(part).collect()
}

fn no_host(hosts: &[HostSlots], name: &str) -> HostfileError {
    let known: Vec<_> = hosts.iter().map(|host| host.name.as_str()).collect();
    HostfileError::NoHost { name: name.to_string(), known: known.join(", ") }
}

fn slots_of(host: &HostSlots, list: &str, filter: &str) -> Result<Vec<usize>, HostfileError> {
    let numbers: Result<BTreeSet<usize>, _> = list.split(',').map(|slot| slot.trim().parse()).collect();
    let numbers = numbers.map_err(|_| HostfileError::Filter(filter.to_string()))?;
    match numbers.iter().find(|slot| !host.slots.contains(slot)) {
        Some(&slot) => {
            Err(HostfileError::NoSlot { name: host.name.clone(), slot, known: host.slots.clone() })
        }
        None => Ok(numbers.into_iter().collect()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(name: &str, slots: &[usize]) -> HostSlots {
        HostSlots { name: name.to_string(), slots: slots.to_vec() }
    }

    fn two() -> Vec<HostSlots> {
        vec![host("a", &[0, 1, 2, 3]), host("b", &[0, 1])]
    }

    #[test]
    fn a_hostfile_with_comments_and_blank_lines() {
        let text = "# all of them\n\na slots=4\n  b   slots=2 # the old one\n";
        assert_eq!(parse_hostfile(text), Ok(two()));
    }

    #[test]
    fn errors_in_hostfiles_name_the_line() {
        for (text, expected) in [
            ("a slots=1\na slots=2", "line 2 of the hostfile names a again"),
            ("\na", "line 2 of the hostfile is `a`"),
            ("a slots=0", "line 1"),
            ("a slots=99999999999", "line 1"),
            ("a slots=two", "line 1"),
            ("a slots=1 max=3", "line 1"),
            ("-oProxyCommand=x slots=1", "line 1"),
            ("# nobody\n", "names no host"),
        ] {
            let error = parse_hostfile(text).unwrap_err().to_string();
            assert!(error.contains(expected), "{text:?}: {error}");
        }
    }

    #[test]
    fn filters_name_hosts_and_slots() {
        assert_eq!(include_slots(&two(), "b"), Ok(vec![host("b", &[0, 1])]));
        assert_eq!(include_slots(&two(), "a:1,2@b"), Ok(vec![host("a", &[1, 2]), host("b", &[0, 1])]));
        assert_eq!(include_slots(&two(), "a:2,0,2"), Ok(vec![host("a", &[0, 2])]));
        assert_eq!(exclude_slots(&two(), "b"), Ok(vec![host("a", &[0, 1, 2, 3])]));
        assert_eq!(exclude_slots(&two(), "a:0@b:1"), Ok(vec![host("a", &[1, 2, 3]), host("b", &[0])]));
    }

    #[test]
    fn invalid_filters_are_errors() {
        for (filter, expected) in [
            ("c", "no host c to choose from; try one of a, b"),
            ("a:9", "a has no slot 9"),
            ("a:x", "is not a choice of hosts"),
            ("a@a", "is not a choice of hosts"),
            ("a:", "is not a choice of hosts"),
        ] {
            let error = include_slots(&two(), filter).unwrap_err().to_string();
            assert!(error.contains(expected), "{filter}: {error}");
        }
        assert!(matches!(exclude_slots(&two(), "a@b"), Err(HostfileError::NothingLeft(_))));
    }
}
