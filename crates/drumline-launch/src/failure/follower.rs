//! Recognizes followers: ranks whose output says that they ended because another rank did.

/// Which other rank a rank's last output blames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Blame {
    /// This rank was lost, called off the group or left it.
    Rank(usize),
    /// A connection to some rank broke.
    SomeRank,
}

/// The texts with which gloo and NCCL report a lost peer; they do not name it.
const BROKEN_LINKS: [&str; 4] = [
    "Connection closed by peer",
    "Connection reset by peer",
    "remote process exited or there was a network error",
    "Application timeout caused pair closure",
];

/// The rank that the last such text among `lines` blames.
pub(crate) fn blame<'a>(lines: impl DoubleEndedIterator<Item = &'a str>) -> Option<Blame> {
    lines.rev().find_map(|line| {
        let named = lost(line).or_else(|| left(line)).map(Blame::Rank);
        let broken = BROKEN_LINKS.iter().any(|text| line.contains(text)).then_some(Blame::SomeRank);
        named.or(broken)
    })
}

/// Whether an error is a program's reaction to the launcher's SIGTERM.
pub(crate) fn is_reaction_to_stop(error: &str) -> bool {
    ["SIGTERM", "SignalException", "signal 15", "Signal 15", "KeyboardInterrupt"]
        .iter()
        .any(|text| error.contains(text))
}

/// Parses `lost rank 3 …`.
fn lost(line: &str) -> Option<usize> {
    let (_, after) = line.rsplit_once("lost rank ")?;
    let digits = after.find(|c: char| !c.is_ascii_digit()).unwrap_or(after.len());
    after[..digits].parse().ok()
}

/// Parses `rank 3 called off group …` and `rank 3 has left group …`: a rank that fails leaves its group first.
fn left(line: &str) -> Option<usize> {
    let texts = [" called off group ", " has left group "];
    let (before, _) = texts.iter().find_map(|text| line.rsplit_once(text))?;
    let (_, rank) = before.rsplit_once("rank ")?;
    rank.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_of_loss_report_is_recognized() {
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
