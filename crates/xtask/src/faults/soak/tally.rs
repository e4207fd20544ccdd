//! What came of all runs, for people (Markdown) and for programs (CSV).

use std::collections::BTreeMap;
use std::fmt::{self, Write};
use std::path::PathBuf;
use std::time::Duration;

use super::NUM_STEPS;
use super::verdict::Finding;
use crate::bench::{machine, report};

/// What came of one run.
pub(super) struct Outcome {
    pub(super) run: u64,
    pub(super) num_drawn: usize,
    /// The faults that really happened, by kind.
    pub(super) kinds: Vec<&'static str>,
    pub(super) restarts: usize,
    pub(super) span: Duration,
    pub(super) findings: Vec<Finding>,
    /// The folder of a run with findings.
    pub(super) kept: Option<PathBuf>,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { run, num_drawn, kinds, restarts, span, findings, kept } = self;
        let (happened, seconds) = (kinds.len(), span.as_secs_f64());
        write!(f, "run {run}: {happened} of {num_drawn} faults, {restarts} restarts, {seconds:.1} s: ")?;
        match kept {
            None => write!(f, "as without faults ({})", kinds.join(", ")),
            Some(folder) => {
                write!(f, "WRONG, see {}", folder.display())?;
                findings.iter().try_for_each(|finding| write!(f, "\n    {finding}"))
            }
        }
    }
}

/// All runs of a soak.
pub(super) struct Tally {
    seed: u64,
    ranks_per_host: usize,
    outcomes: Vec<Outcome>,
}

impl Tally {
    pub(super) fn new(seed: u64, ranks_per_host: usize) -> Self {
        Self { seed, ranks_per_host, outcomes: Vec::new() }
    }

    pub(super) fn add(&mut self, outcome: Outcome) {
        self.outcomes.push(outcome);
    }

    /// Whether there are runs, and nothing is wrong with any.
    pub(super) fn is_right(&self) -> bool {
        !self.outcomes.is_empty() && self.outcomes.iter().all(|outcome| outcome.findings.is_empty())
    }

    fn kinds(&self) -> BTreeMap<&'static str, usize> {
        let mut kinds = BTreeMap::new();
        self.outcomes
            .iter()
            .flat_map(|outcome| &outcome.kinds)
            .for_each(|kind| *kinds.entry(*kind).or_default() += 1);
        kinds
    }

    pub(super) fn markdown(&self, span: Duration) -> String {
        let Self { seed, ranks_per_host, outcomes } = self;
        let kinds = self.kinds();
        let (faults, restarts) =
            (kinds.values().sum::<usize>(), outcomes.iter().map(|outcome| outcome.restarts).sum::<usize>());
        let wrong: Vec<_> = outcomes.iter().filter(|outcome| !outcome.findings.is_empty()).collect();
        let mut rows = vec![["fault", "times"].map(str::to_owned).to_vec()];
        rows.extend(kinds.iter().map(|(kind, times)| vec![(*kind).to_owned(), times.to_string()]));
        rows.push(vec!["all".to_owned(), faults.to_string()]);
        let mut text = format!(
            "# Soak: training under random faults\n\n{}, {}. Two hosts (network namespaces), an agent of `drumline run` and \
             {ranks_per_host} ranks on each, `config/gpt-tiny.yaml`, {NUM_STEPS} steps a run. Made by `cargo xtask soak` with \
             `--seed {seed} --nproc-per-node {ranks_per_host}` in {:.0} minutes.\n\n\
             {} runs, {faults} faults, {restarts} restarts, {} runs with findings. Each run's losses, gradient norms, samples, last weights \
             and files are compared bit by bit with a run without faults, and nothing may be left behind.\n\n{}",
            machine::today(),
            machine::describe(),
            span.as_secs_f64() / 60.0,
            outcomes.len(),
            wrong.len(),
            report::table(&rows)
        );
        for outcome in wrong {
            let _ =
                writeln!(text, "\nRun {}, again by `--seed {seed} --first-run {0} --runs 1`:\n", outcome.run);
            text.extend(outcome.findings.iter().map(|finding| format!("- {finding}\n")));
        }
        text
    }

    /// One run a line.
    pub(super) fn csv(&self) -> String {
        let mut text = "run,faults drawn,faults happened,kinds,restarts,seconds,findings\n".to_owned();
        for outcome in &self.outcomes {
            let Outcome { run, num_drawn, kinds, restarts, span, findings, .. } = outcome;
            let (happened, kinds, seconds) = (kinds.len(), kinds.join(" + "), span.as_secs_f64());
            let _ = writeln!(
                text,
                "{run},{num_drawn},{happened},{kinds},{restarts},{seconds:.1},{}",
                findings.len()
            );
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(run: u64, findings: Vec<Finding>) -> Outcome {
        let kept = (!findings.is_empty()).then(|| PathBuf::from("kept"));
        let (kinds, span) = (vec!["kill", "outage"], Duration::from_secs(9));
        Outcome { run, num_drawn: 3, kinds, restarts: 1, span, findings, kept }
    }

    #[test]
    fn one_wrong_run_turns_the_verdict_and_says_how_to_have_it_again() {
        let mut tally = Tally::new(7, 1);
        assert!(!tally.is_right(), "no run shows nothing");
        tally.add(outcome(4, Vec::new()));
        assert!(tally.is_right());
        tally.add(outcome(5, vec![Finding::Weights]));
        assert!(!tally.is_right());
        let text = tally.markdown(Duration::from_secs(60));
        for words in [
            "2 runs, 4 faults, 2 restarts, 1 runs with findings",
            "| kill   | 2     |",
            "| all    | 4     |",
            "again by `--seed 7 --first-run 5 --runs 1`:\n\n- the last weights differ\n",
        ] {
            assert!(text.contains(words), "{words}: {text}");
        }
        assert!(tally.csv().ends_with("5,3,2,kill + outage,1,9.0,1\n"), "{}", tally.csv());
    }
}
