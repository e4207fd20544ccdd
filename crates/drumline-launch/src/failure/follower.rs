//! Ranks that ended because another one did: they say so, and so are not the cause.

/// What a rank's last words say about the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Blame {
    /// This rank was lost, called the group off or left it.
    Rank(usize),
    /// A connection to some rank broke.
    SomeRank,
}

/// How gloo and NCCL put it that a peer is gone; they do not say which.
const BROKEN_LINKS: [&str; 4] = [
    "Connection closed by peer",
    "Connection reset by peer",
    "remote process exited or there was a network error",
    "Application timeout caused pair closure",
];

/// Whom the last such words among `lines` blame.
pub(crate) fn blame<'a>(lines: impl DoubleEndedIterator<Item = &'a str>) -> Option<Blame> {
    lines.rev().find_map(|line| {
        let named = lost(line).or_else(|| left(line)).map(Blame::Rank);
        let broken = BROKEN_LINKS.iter().any(|words| line.contains(words)).then_some(Blame::SomeRank);
        named.or(broken)
    })
}

/// Whether an error is how a program answers to the launcher's SIGTERM.
pub(crate) fn is_answer_to_stop(error: &str) -> bool {
    ["SIGTERM", "SignalException", "signal 15", "Signal 15", "KeyboardInterrupt"]
        .iter()
        .any(|word| error.contains(word))
}

/// `lost rank 3 …`
fn lost(line: &str) -> Option<usize> {
    let (_, after) = line.rsplit_once("lost rank ")?;
    let digits = after.find(|c: char| !c.is_ascii_digit()).unwrap_or(after.len());
    after[..digits].parse().ok()
}

/// `rank 3 called off group …`, and `rank 3 has left group …`: one that fails lets go of its group first.
fn left(line: &str) -> Option<usize> {
    let ways = [" called off group ", " has left group "];
    let (before, _) = ways.iter().find_map(|words| line.rsplit_once(words))?;
    let (_, rank) = before.rsplit_once("rank ")?;
    rank.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_way_of_saying_it_is_understood() {
        let cases: [(&str, Option<Blame>); 9] = [
            ("Error: lost rank 3 of group `world` (a, pid 7): killed", Some(Blame::Rank(3))),
            ("lost rank 12 (a, pid 7): gone", Some(Blame::Rank(12))),
            ("Error: rank 4 called off group `world`: no data", Some(Blame::Rank(4))),
            ("Error: rank 5 has left group `world` (it ended, or …", Some(Blame::Rank(5))),
            ("RuntimeError: [pair.cc:534] Connection closed by peer [127.0.0.1]:5", Some(Blame::SomeRank)),
            ("I lost rank and honour", None),
            ("lost rank 99999999999999999999999 of", None),
            ("somebody called off group work", None),
            ("", None),
        ];
        for (line, expected) in cases {
            assert_eq!(blame([line].into_iter()), expected, "{line}");
        }
        let last = blame(["lost rank 1 of", "then", "lost rank 2 of", "bye"].into_iter());
        assert_eq!(last, Some(Blame::Rank(2)));
    }
}
