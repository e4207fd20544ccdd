//! Whether outages did any harm that they should not do: pure, over what was seen of a run.

use std::fmt;

use crate::faults::training::{How, Losses, NodeEnd};

/// What was seen of a run with outages.
#[derive(Debug, Clone)]
pub(super) struct Seen {
    /// How often the cable was to be pulled.
    pub(super) asked: usize,
    /// How often it was pulled before the run came to an end.
    pub(super) outages: usize,
    pub(super) restarts: usize,
    /// Ranks that were started besides the first ones.
    pub(super) processes: usize,
    pub(super) steps_lost: usize,
    pub(super) losses: Losses,
    /// How the processes that were started ended.
    pub(super) ends: Vec<NodeEnd>,
    /// Processes, sockets, shared memory.
    pub(super) left: Vec<String>,
}

/// Something that is wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Finding {
    /// The run came to an end, or stood still, before all outages.
    Outages {
        outages: usize,
        asked: usize,
    },
    Restarts(usize),
    Processes(usize),
    StepsLost(usize),
    Losses(Losses),
    /// A host failed, or did not end.
    End(String),
    /// A process, a socket, shared memory.
    Left(String),
}

/// What must come of an outage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Expected {
    /// It is shorter than a silent host is waited for: it costs time and nothing else.
    Nothing,
    /// Both hosts end with an error that says whom they lost.
    BothFail,
    /// Ranks are restarted once the host is back, and both hosts finish with the same bits.
    BothFinish,
    /// The first host finishes alone, and the other one ends with an error.
    FirstFinishes,
}

/// Texts by which a report says that the other host is lost.
const NAMED: [&str; 5] =
    ["lost rank", "lost the agent on", "no contact with", "has ended or died", "was silent for"];

/// Everything that is wrong with a run.
pub(super) fn findings(seen: &Seen, expected: Expected) -> Vec<Finding> {
    match expected {
        Expected::Nothing => harms(seen),
        Expected::BothFail | Expected::BothFinish | Expected::FirstFinishes => after_a_loss(seen, expected),
    }
}

/// What is wrong after an outage that the job cannot survive unchanged.
fn after_a_loss(seen: &Seen, expected: Expected) -> Vec<Finding> {
    let mut findings = Vec::new();
    let losses_are_right = match expected {
        Expected::BothFail => matches!(seen.losses, Losses::EqualUntil(_)),
        // A rank that trains alone has other batches.
        Expected::FirstFinishes => true,
        Expected::Nothing | Expected::BothFinish => seen.losses == Losses::Equal,
    };
    if !losses_are_right {
        findings.push(Finding::Losses(seen.losses.clone()));
    }
    let is_right = |end: &&NodeEnd| match (&end.how, expected) {
        (How::StillRunning, _) => false,
        (How::Succeeded, Expected::BothFail) => false,
        (How::Succeeded, Expected::FirstFinishes) => end.host == 0,
        (How::Succeeded, _) => true,
        (How::Failed(_), Expected::BothFail) => is_named(end),
        (How::Failed(_), Expected::FirstFinishes) => end.host == 1 && is_named(end),
        (How::Failed(_), _) => false,
    };
    findings.extend(seen.ends.iter().filter(|end| !is_right(end)).map(|end| Finding::End(end.to_string())));
    findings.extend(seen.left.iter().cloned().map(Finding::Left));
    findings
}

fn is_named(end: &NodeEnd) -> bool {
    NAMED.iter().any(|text| end.log.contains(text))
}

/// What an outage has cost besides time.
fn harms(seen: &Seen) -> Vec<Finding> {
    let Seen { asked, outages, restarts, processes, steps_lost, losses, ends, left } = seen;
    let mut findings = Vec::new();
    if outages < asked {
        findings.push(Finding::Outages { outages: *outages, asked: *asked });
    }
    let counts =
        [Finding::Restarts(*restarts), Finding::Processes(*processes), Finding::StepsLost(*steps_lost)];
    findings.extend(
        counts
            .into_iter()
            .zip([restarts, processes, steps_lost])
            .filter(|(_, count)| **count > 0)
            .map(|(finding, _)| finding),
    );
    if *losses != Losses::Equal {
        findings.push(Finding::Losses(losses.clone()));
    }
    let failed = ends.iter().filter(|end| end.how != How::Succeeded);
    findings.extend(failed.map(|end| Finding::End(end.to_string())));
    findings.extend(left.iter().cloned().map(Finding::Left));
    findings
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Finding::Outages { outages, asked } => write!(f, "{outages} outages instead of {asked}"),
            Finding::Restarts(count) => write!(f, "{count} restarts"),
            Finding::Processes(count) => write!(f, "{count} processes besides the first two"),
            Finding::StepsLost(count) => write!(f, "{count} steps lost"),
            Finding::Losses(losses) => write!(f, "losses {losses}"),
            Finding::End(what) => write!(f, "end: {what}"),
            Finding::Left(what) => write!(f, "left behind: {what}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is found after `change` was made to a run that outages did not harm.
    fn found(change: impl FnOnce(&mut Seen)) -> Vec<Finding> {
        let mut seen = Seen {
            asked: 20,
            outages: 20,
            restarts: 0,
            processes: 0,
            steps_lost: 0,
            losses: Losses::Equal,
            ends: Vec::new(),
            left: Vec::new(),
        };
        change(&mut seen);
        findings(&seen, Expected::Nothing)
    }

    fn end(host: usize, how: How) -> NodeEnd {
        NodeEnd { host, how, log: "error: lost rank 1 of group `world/2` (host1)".to_owned() }
    }

    fn failed() -> How {
        How::Failed("exit status: 1".to_owned())
    }

    /// The number of findings after an outage that is too long, for ends of both hosts.
    fn after(expected: Expected, ends: [How; 2], losses: Losses) -> usize {
        let [first, second] = ends;
        let seen = Seen {
            asked: 1,
            outages: 1,
            restarts: 1,
            processes: 2,
            steps_lost: 6,
            losses,
            ends: vec![end(0, first), end(1, second)],
            left: Vec::new(),
        };
        findings(&seen, expected).len()
    }

    #[test]
    fn an_outage_that_is_too_long_ends_as_expected_and_no_other_way() {
        let until = || Losses::EqualUntil(17);
        assert_eq!(after(Expected::BothFail, [failed(), failed()], until()), 0);
        assert_eq!(after(Expected::BothFail, [failed(), How::StillRunning], until()), 1);
        assert_eq!(after(Expected::BothFail, [How::Succeeded, failed()], until()), 1);
        assert_eq!(after(Expected::BothFail, [failed(), failed()], Losses::DifferFrom(3)), 1);
        assert_eq!(after(Expected::BothFinish, [How::Succeeded, How::Succeeded], Losses::Equal), 0);
        assert_eq!(after(Expected::BothFinish, [failed(), failed()], until()), 3);
        assert_eq!(after(Expected::FirstFinishes, [How::Succeeded, failed()], Losses::DifferFrom(3)), 0);
        assert_eq!(after(Expected::FirstFinishes, [failed(), How::Succeeded], until()), 2);
    }

    #[test]
    fn an_error_that_names_nobody_is_found() {
        let unnamed = NodeEnd { host: 0, how: failed(), log: "error: broken pipe".to_owned() };
        let seen = Seen {
            asked: 1,
            outages: 1,
            restarts: 0,
            processes: 0,
            steps_lost: 0,
            losses: Losses::EqualUntil(4),
            ends: vec![unnamed, end(1, failed())],
            left: vec!["process 17 on host0".to_owned()],
        };
        assert_eq!(findings(&seen, Expected::BothFail).len(), 2);
    }

    #[test]
    fn a_run_that_outages_did_not_harm_has_no_findings() {
        assert_eq!(found(|_| {}), []);
    }

    #[test]
    fn each_harm_is_found_by_itself() {
        let fewer = Finding::Outages { outages: 19, asked: 20 };
        assert_eq!(found(|seen| seen.outages = 19), [fewer]);
        assert_eq!(found(|seen| seen.restarts = 1), [Finding::Restarts(1)]);
        assert_eq!(found(|seen| seen.processes = 2), [Finding::Processes(2)]);
        assert_eq!(found(|seen| seen.steps_lost = 3), [Finding::StepsLost(3)]);
        let losses = Losses::DifferFrom(7);
        assert_eq!(found(|seen| seen.losses = losses.clone()), [Finding::Losses(losses)]);
        let failed = end(1, failed());
        assert_eq!(found(|seen| seen.ends.push(failed.clone())), [Finding::End(failed.to_string())]);
        let process = "process 17 on host0".to_owned();
        assert_eq!(found(|seen| seen.left.push(process.clone())), [Finding::Left(process)]);
    }

    #[test]
    fn all_harms_of_a_run_are_found() {
        let all = found(|seen| {
            (seen.outages, seen.restarts, seen.processes, seen.steps_lost) = (0, 1, 1, 1);
            seen.losses = Losses::DifferFrom(1);
            seen.ends = vec![end(0, How::StillRunning), end(1, How::StillRunning)];
            seen.left = vec!["host0: 0.0.0.0:29500".to_owned()];
        });
        assert_eq!(all.len(), 8, "{all:?}");
    }
}
