//! What `noop` says, found again in a launcher's output, whatever the launcher has put before it.

use anyhow::{Context, ensure};
use std::collections::BTreeSet;
use std::time::Duration;

/// One line of one rank. Times are those of the monotonic clock.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Line {
    pub(crate) rank: usize,
    pub(crate) attempt: usize,
    pub(crate) what: What,
    pub(crate) at: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum What {
    Begins,
    Fails,
}

/// All of them, in the order printed.
pub(crate) fn parse(output: &str) -> Vec<Line> {
    output.lines().filter_map(parse_line).collect()
}

fn parse_line(line: &str) -> Option<Line> {
    let (_, ours) = line.rsplit_once("noop rank ")?;
    let words: Vec<_> = ours.split_whitespace().collect();
    let [rank, "attempt", attempt, what, "at", at] = words[..] else { return None };
    let what = match what {
        "begins" => What::Begins,
        "fails" => What::Fails,
        _ => return None,
    };
    let (rank, attempt) = (rank.parse().ok()?, attempt.parse().ok()?);
    Some(Line { rank, attempt, what, at: Duration::from_nanos(at.parse().ok()?) })
}

/// When the last of `world` ranks began its `attempt`; an error unless each did, once.
pub(crate) fn all_begun(lines: &[Line], attempt: usize, world: usize) -> anyhow::Result<Duration> {
    let begun: Vec<_> = lines.iter().filter(|l| (l.attempt, l.what) == (attempt, What::Begins)).collect();
    let ranks: BTreeSet<_> = begun.iter().map(|line| line.rank).collect();
    let expected: BTreeSet<_> = (0..world).collect();
    ensure!(
        begun.len() == world && ranks == expected,
        "attempt {attempt}: expected {world} ranks to begin, got {} lines of {} ranks",
        begun.len(),
        ranks.len()
    );
    begun.iter().map(|line| line.at).max().context("no rank")
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = "[rank 1]: noop rank 1 attempt 0 begins at 7000\nnoise\nnoop rank 0 attempt 0 begins at 9000\n\
                          noop rank 0 attempt 0 fails at 9500\n[default0]:noop rank 0 attempt 1 begins at 12000\nnoop rank x";

    #[test]
    fn lines_are_found_behind_any_prefix() {
        let lines = parse(OUTPUT);
        assert_eq!(lines.len(), 4);
        assert_eq!(all_begun(&lines, 0, 2).unwrap(), Duration::from_nanos(9000));
        let failed = Line { rank: 0, attempt: 0, what: What::Fails, at: Duration::from_nanos(9500) };
        assert!(lines.contains(&failed));
    }

    #[test]
    fn a_missing_and_a_doubled_rank_are_errors() {
        let lines = parse(OUTPUT);
        assert!(all_begun(&lines, 1, 2).unwrap_err().to_string().contains("got 1 lines of 1 ranks"));
        let doubled = [&lines[..], &lines[..]].concat();
        assert!(all_begun(&doubled, 0, 2).unwrap_err().to_string().contains("got 4 lines of 2 ranks"));
        assert!(all_begun(&lines, 0, 3).is_err());
    }
}
