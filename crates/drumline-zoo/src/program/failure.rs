//! Failures that all ranks know of, so that rank 0 can tell them once.

use std::collections::BTreeMap;

use drumline::Signal;

/// The same text on all ranks.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
pub(super) struct Shared {
    text: String,
}

impl Shared {
    /// A failure that every rank has found by itself, from the same numbers.
    pub(super) fn alike(text: String) -> Self {
        Self { text }
    }

    /// What the ranks have to say, each different text once; `None` if nobody failed.
    pub(super) fn of(said: &[Option<String>]) -> Option<Self> {
        let mut ranks_of: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        for (rank, text) in said.iter().enumerate() {
            if let Some(text) = text {
                ranks_of.entry(text).or_default().push(rank);
            }
        }
        // The first rank that failed is heard first.
        let mut texts: Vec<_> = ranks_of.into_iter().collect();
        texts.sort_by_key(|(_, ranks)| ranks[0]);
        let lines: Vec<_> = texts.iter().map(|(text, ranks)| line(text, ranks, said.len())).collect();
        (!lines.is_empty()).then(|| Self { text: lines.join("\n") })
    }
}

fn line(text: &str, ranks: &[usize], world_size: usize) -> String {
    match ranks {
        _ if ranks.len() == world_size => text.to_owned(),
        [rank] => format!("rank {rank}: {text}"),
        _ => {
            let ranks: Vec<_> = ranks.iter().map(ToString::to_string).collect();
            format!("ranks {}: {text}", ranks.join(", "))
        }
    }
}

/// A signal ended a process that has no launcher to tell of it: no failure, but no end of the work either.
#[derive(Debug, thiserror::Error)]
#[error("stopped by signal {}", signal.as_raw())]
pub(super) struct Stopped {
    pub(super) signal: Signal,
}

/// An error and its causes in one line; a cause that is already part of what was said is not said again.
pub(super) fn in_words(error: &anyhow::Error) -> String {
    error.chain().map(ToString::to_string).fold(String::new(), |said, cause| match said.is_empty() {
        true => cause,
        false if said.contains(&cause) => said,
        false => format!("{said}: {cause}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(texts: &[Option<&str>]) -> Option<String> {
        let texts: Vec<_> = texts.iter().map(|text| text.map(str::to_owned)).collect();
        Shared::of(&texts).map(|shared| shared.to_string())
    }

    #[test]
    fn each_text_is_told_once_with_its_ranks() {
        assert_eq!(said(&[None, None]), None);
        assert_eq!(said(&[Some("no file"), Some("no file")]).unwrap(), "no file");
        assert_eq!(said(&[None, Some("no file")]).unwrap(), "rank 1: no file");
        let mixed = said(&[None, Some("b"), Some("a"), Some("b")]).unwrap();
        assert_eq!(mixed, "ranks 1, 3: b\nrank 2: a");
    }
}
