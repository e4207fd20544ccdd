//! Whether a run under faults came out as one without: pure, over what was seen of both.

use std::collections::BTreeSet;
use std::fmt;
use std::time::Duration;

use crate::faults::training::Losses;

/// What a run without faults computes and leaves.
pub(super) struct Reference {
    /// Loss, gradient norm and samples of each step.
    pub(super) steps: Vec<String>,
    pub(super) weights: Vec<u8>,
    pub(super) files: BTreeSet<String>,
}

/// What was seen of a run.
#[derive(Clone)]
pub(super) struct Seen {
    /// What was wrong with the launchers' ends.
    pub(super) ends: Vec<String>,
    /// The faults that really happened, by kind.
    pub(super) kinds: Vec<&'static str>,
    pub(super) restarts: usize,
    /// The longest time without a step.
    pub(super) longest_wait: Duration,
    pub(super) steps: Vec<String>,
    /// Every step's figures at any time, also those that a restart took back.
    pub(super) ever: BTreeSet<String>,
    pub(super) weights: Option<Vec<u8>>,
    pub(super) files: BTreeSet<String>,
    /// Processes, sockets, shared memory.
    pub(super) left: Vec<String>,
}

/// Something that is wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Finding {
    /// A launcher failed, or did not end.
    End(String),
    /// More restarts than faults that are a reason for one.
    Restarts { restarts: usize, reasons: usize },
    /// No step for so long.
    Waited(Duration),
    /// The steps at the end are not those of the reference.
    Losses(Losses),
    /// A step had other figures before it was taken back and repeated.
    TakenBack(String),
    /// The last weights.
    Weights,
    /// A file that a run without faults does not leave, or one that it does leave and that is missing.
    File(String),
    /// A process, a socket, shared memory.
    Left(String),
}

/// The kinds of faults after which there must be a restart.
const FATAL: [&str; 4] = ["kill", "exit", "panic", "agent killed"];

/// No fault of ours, and no pause before a restart, takes that long. Our timeouts do: 30 s for a silent host, and 30 s
/// for ranks that do not heed SIGTERM. A run that comes to one of them has missed some news.
const LONGEST_WAIT: Duration = Duration::from_secs(25);

/// Everything that is wrong with a run.
pub(super) fn findings(seen: &Seen, reference: &Reference) -> Vec<Finding> {
    let mut findings: Vec<_> = seen.ends.iter().cloned().map(Finding::End).collect();
    let (restarts, reasons) = (seen.restarts, seen.kinds.iter().filter(|kind| FATAL.contains(kind)).count());
    if restarts > reasons {
        findings.push(Finding::Restarts { restarts, reasons });
    }
    if seen.longest_wait > LONGEST_WAIT {
        findings.push(Finding::Waited(seen.longest_wait));
    }
    let losses = Losses::compare(&seen.steps, &reference.steps);
    if losses != Losses::Equal {
        findings.push(Finding::Losses(losses));
    }
    let taken_back =
        seen.ever.iter().filter(|line| !seen.steps.contains(line) && !reference.steps.contains(line));
    findings.extend(taken_back.cloned().map(Finding::TakenBack));
    if seen.weights.as_ref() != Some(&reference.weights) {
        findings.push(Finding::Weights);
    }
    findings.extend(seen.files.symmetric_difference(&reference.files).cloned().map(Finding::File));
    findings.extend(seen.left.iter().cloned().map(Finding::Left));
    findings
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Finding::End(what) => write!(f, "end: {what}"),
            Finding::Restarts { restarts, reasons } => {
                write!(f, "{restarts} restarts for {reasons} faults that need one")
            }
            Finding::Waited(time) => write!(f, "no step for {:.1} s", time.as_secs_f64()),
            Finding::Losses(losses) => write!(f, "losses {losses}"),
            Finding::TakenBack(line) => {
                write!(f, "a step that was repeated had other figures before: {line}")
            }
            Finding::Weights => f.write_str("the last weights differ"),
            Finding::File(name) => write!(f, "one of both runs has the file {name}"),
            Finding::Left(what) => write!(f, "left behind: {what}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    fn reference() -> Reference {
        let steps = ["1 0.5 2 16", "2 0.25 1 16", "3 0.125 1 16"].map(str::to_owned).to_vec();
        Reference { steps, weights: vec![1, 2], files: set(&["metrics.jsonl", "checkpoints/latest"]) }
    }

    fn good() -> Seen {
        let Reference { steps, weights, files } = reference();
        let ever = steps.iter().cloned().collect();
        let kinds = vec!["kill", "drop", "panic"];
        Seen {
            ends: Vec::new(),
            kinds,
            restarts: 2,
            longest_wait: Duration::from_secs(9),
            steps,
            ever,
            weights: Some(weights),
            files,
            left: Vec::new(),
        }
    }

    /// What is found after `change` was made to a good run.
    fn found(change: impl FnOnce(&mut Seen)) -> Vec<Finding> {
        let mut seen = good();
        change(&mut seen);
        findings(&seen, &reference())
    }

    #[test]
    fn a_run_like_the_reference_has_no_findings() {
        assert_eq!(found(|_| {}), []);
    }

    #[test]
    fn wrong_missing_and_repeated_steps_are_found() {
        let differ = |step| vec![Finding::Losses(Losses::DifferFrom(step))];
        assert_eq!(found(|seen| seen.steps[1] = "2 0.26 1 16".to_owned()), differ(2));
        assert_eq!(found(|seen| seen.steps[2] = "3 0.125 1 15".to_owned()), differ(3), "a sample was lost");
        assert_eq!(found(|seen| drop(seen.steps.remove(1))), differ(2));
        assert_eq!(found(|seen| drop(seen.steps.pop())), [Finding::Losses(Losses::EqualUntil(2))]);
        assert_eq!(found(|seen| seen.steps.insert(1, "1 0.5 2 16".to_owned())), differ(2));
        let wrong = "2 0.26 1 16".to_owned();
        let taken_back = found(|seen| seen.ever.extend([wrong.clone()]));
        assert_eq!(taken_back, [Finding::TakenBack(wrong)]);
    }

    #[test]
    fn other_weights_bad_ends_and_restarts_without_reason_are_found() {
        assert_eq!(found(|seen| seen.weights = Some(vec![1, 3])), [Finding::Weights]);
        assert_eq!(found(|seen| seen.weights = None), [Finding::Weights]);
        let end = "host1: exit status: 1".to_owned();
        assert_eq!(found(|seen| seen.ends.push(end.clone())), [Finding::End(end)]);
        assert_eq!(found(|seen| seen.restarts = 3), [Finding::Restarts { restarts: 3, reasons: 2 }]);
        let long = Duration::from_secs(31);
        assert_eq!(found(|seen| seen.longest_wait = long), [Finding::Waited(long)]);
        assert_eq!(found(|seen| seen.restarts = 1), [], "two faults may share one");
    }

    #[test]
    fn what_is_left_or_missing_is_found() {
        let process = "process 17 `drumline-train` []".to_owned();
        assert_eq!(found(|seen| seen.left.push(process.clone())), [Finding::Left(process)]);
        let file = "tmp/key".to_owned();
        assert_eq!(found(|seen| seen.files.extend([file.clone()])), [Finding::File(file)]);
        let gone = found(|seen| seen.files.retain(|name| name != "metrics.jsonl"));
        assert_eq!(gone, [Finding::File("metrics.jsonl".to_owned())]);
    }
}
