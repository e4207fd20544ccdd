//! Who is weighed and timed, and the check that all trainings of a case are the same.

use crate::bench::child;
use crate::bench::contender::Contender;
use crate::bench::contest::{Contest, TallyOf, Unit, UnitOf};
use crate::bench::json_line::JsonLine;
use crate::bench::losses::SameLosses;
use anyhow::Context;
use std::fmt;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(300);
const SAME: SameLosses = SameLosses { tolerance: 1e-4, steps: usize::MAX };

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Case {
    /// A training of so many ranks in a stage of ZeRO.
    States { ranks: usize, stage: &'static str },
    /// Steps of Adam on so many threads.
    Adam { threads: usize },
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::States { ranks, stage } => write!(f, "states, {ranks} ranks, ZeRO-{stage}"),
            Self::Adam { threads } => write!(f, "Adam, {threads} threads"),
        }
    }
}

pub(crate) const CASES: [Case; 5] = [
    Case::States { ranks: 1, stage: "1" },
    Case::States { ranks: 2, stage: "2" },
    Case::States { ranks: 2, stage: "3" },
    Case::Adam { threads: 1 },
    Case::Adam { threads: 2 },
];

/// The word for a contender on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Word(pub(crate) &'static str);

type Of = Contender<Word>;

pub(crate) const IN_MEMORY: Of = Contender::new("all in memory", Word("nothing"));
pub(crate) const STATE_IN_FILES: Of = Contender::new("optimizer's state in files", Word("state"));
pub(crate) const BARE_LOOP: Of = Contender::new("bare loop", Word("loop"));
pub(crate) const TORCH: Of = Contender::new("PyTorch's fused AdamW", Word("torch"));
pub(crate) const OURS: Of = Contender::new("Drumline's AdamW", Word("ours"));

fn contenders(case: Case) -> Vec<Of> {
    match case {
        Case::States { .. } => vec![IN_MEMORY, STATE_IN_FILES],
        Case::Adam { .. } => vec![BARE_LOOP, TORCH, OURS],
    }
}

/// All units, in the order of a report.
pub(crate) fn units() -> Vec<Unit<Case, Word>> {
    let of_case = |case| contenders(case).into_iter().map(move |contender| Unit { case, contender });
    CASES.into_iter().flat_map(of_case).collect()
}

/// What a turn gave.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Figures {
    /// Of trainings.
    pub(crate) pss_bytes: Option<f64>,
    pub(crate) parameters: f64,
    pub(crate) optimizer_ms: f64,
    pub(crate) losses: Vec<f64>,
}

/// The contest.
#[derive(Debug)]
pub(crate) struct Memory {
    pub(crate) launcher: PathBuf,
    pub(crate) ours: PathBuf,
    pub(crate) folder: PathBuf,
    pub(crate) is_quick: bool,
}

impl Contest for Memory {
    type Case = Case;
    type Kind = Word;
    type Figures = Figures;

    fn contenders(&self, case: Case) -> Vec<Of> {
        contenders(case)
    }

    fn measure(&self, unit: &UnitOf<Self>) -> anyhow::Result<Figures> {
        let Word(word) = unit.contender.kind;
        let mut command = Command::new(&self.launcher);
        command.arg("run").arg("--standalone");
        match unit.case {
            Case::States { ranks, stage } => {
                // Freed memory goes back to the system, so that only what is used counts.
                command.env("MALLOC_MMAP_THRESHOLD_", "131072").env("MALLOC_TRIM_THRESHOLD_", "131072");
                command.env("OMP_NUM_THREADS", "1").args(["--nproc-per-node", &ranks.to_string()]);
                let size = if self.is_quick { "mini" } else { "gpt2" };
                command.arg(&self.ours).args([
                    "memory",
                    "--size",
                    size,
                    "--stage",
                    stage,
                    "--in-files",
                    word,
                ]);
                command.arg("--folder").arg(&self.folder);
            }
            Case::Adam { threads } => {
                let millions = if self.is_quick { "4" } else { "64" };
                command.args(["--nproc-per-node", "1"]).arg(&self.ours);
                command.args([
                    "adam",
                    "--who",
                    word,
                    "--threads",
                    &threads.to_string(),
                    "--millions",
                    millions,
                ]);
            }
        }
        let printed = child::run(command, LIMIT)?;
        parse(&printed.stdout).with_context(|| format!("it printed `{}`", printed.stdout.trim_end()))
    }

    /// Memory hardly changes from one block to the next.
    fn blocks(&self, case: Case, blocks: usize) -> usize {
        if matches!(case, Case::States { .. }) { blocks.min(2) } else { blocks }
    }

    fn check(&self, unit: &UnitOf<Self>, figures: &Figures, tally: &TallyOf<Self>) -> anyhow::Result<()> {
        let reference = tally.all().find(|turn| turn.unit.case == unit.case);
        match reference {
            Some(turn) if matches!(unit.case, Case::States { .. }) => {
                SAME.check(&figures.losses, &turn.figures.losses)
            }
            _ => Ok(()),
        }
    }
}

fn parse(stdout: &str) -> anyhow::Result<Figures> {
    let line = JsonLine::find(stdout)?;
    Ok(Figures {
        pss_bytes: line.optional("pss_bytes"),
        parameters: line.number("parameters")?,
        optimizer_ms: line.number("optimizer_ms")?,
        losses: line.numbers("losses").unwrap_or_default(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_both_kinds_are_read() {
        let states =
            parse(r#"{"optimizer_ms": 2.5, "losses": [1.0], "pss_bytes": 7, "parameters": 3}"#).unwrap();
        assert_eq!((states.pss_bytes, states.losses.len()), (Some(7.0), 1));
        let adam = parse(r#"{"optimizer_ms": 2.5, "parameters": 3}"#).unwrap();
        assert_eq!((adam.pss_bytes, adam.losses.len()), (None, 0));
        assert!(parse("{\"parameters\": 1}").is_err());
        assert_eq!(units().len(), 12);
    }
}
