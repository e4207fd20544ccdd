//! Whether outages did any harm: pure, over what was seen of a run.

use std::fmt;

use crate::faults::training::Losses;

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
    /// What was wrong with the ends of the processes that were started.
    pub(super) ends: Vec<String>,
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

/// Everything that is wrong with a run. An outage that the job survives costs time and nothing else.
pub(super) fn findings(seen: &Seen) -> Vec<Finding> {
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
    findings.extend(ends.iter().cloned().map(Finding::End));
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
        findings(&seen)
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
        let end = "host1: exit status: 1".to_owned();
        assert_eq!(found(|seen| seen.ends.push(end.clone())), [Finding::End(end)]);
        let process = "process 17 on host0".to_owned();
        assert_eq!(found(|seen| seen.left.push(process.clone())), [Finding::Left(process)]);
    }

    #[test]
    fn all_harms_of_a_run_are_found() {
        let all = found(|seen| {
            (seen.outages, seen.restarts, seen.processes, seen.steps_lost) = (0, 1, 1, 1);
            seen.losses = Losses::DifferFrom(1);
            seen.ends = vec!["host0 was still running".to_owned(), "host1 was still running".to_owned()];
            seen.left = vec!["host0: 0.0.0.0:29500".to_owned()];
        });
        assert_eq!(all.len(), 8, "{all:?}");
    }
}
