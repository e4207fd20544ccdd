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
/// Texts of a batch and tokens of a text where a forward is weighed.
pub(crate) const TEXTS: [usize; 2] = [4, 256];
const SAME: SameLosses = SameLosses { tolerance: 1e-4, steps: usize::MAX };

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Case {
    /// A training of so many ranks in a stage of ZeRO.
    States { ranks: usize, stage: &'static str },
    /// The state of an optimizer, for weights of a kind.
    Optimizer { which: &'static str, weights: &'static str },
    /// What a forward keeps for backward with activation checkpointing.
    Kept { how: &'static str },
    /// Steps of Adam on so many threads.
    Adam { threads: usize },
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::States { ranks, stage } => write!(f, "states, {ranks} ranks, ZeRO-{stage}"),
            Self::Optimizer { which, weights: "f32" } => write!(f, "optimizer {which}"),
            Self::Optimizer { which, weights } => write!(f, "optimizer {which}, masters {weights}"),
            Self::Kept { how } => write!(f, "kept for backward, checkpoint {how}"),
            Self::Adam { threads } => write!(f, "Adam, {threads} threads"),
        }
    }
}

const fn optimizer(which: &'static str, weights: &'static str) -> Case {
    Case::Optimizer { which, weights }
}

pub(crate) const CASES: [Case; 16] = [
    Case::States { ranks: 1, stage: "1" },
    Case::States { ranks: 2, stage: "2" },
    Case::States { ranks: 2, stage: "3" },
    optimizer("adamw", "f32"),
    optimizer("adamw-bf16", "f32"),
    optimizer("adamw8bit", "f32"),
    optimizer("lion", "f32"),
    optimizer("lamb", "f32"),
    optimizer("adamw", "copy"),
    optimizer("adamw", "split"),
    Case::Kept { how: "none" },
    Case::Kept { how: "full" },
    Case::Kept { how: "second" },
    Case::Kept { how: "selective" },
    Case::Adam { threads: 1 },
    Case::Adam { threads: 2 },
];

/// The word for a contender on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Word(pub(crate) &'static str);

type Of = Contender<Word>;

pub(crate) const IN_MEMORY: Of = Contender::new("all in memory", Word("nothing"));
pub(crate) const STATE_IN_FILES: Of = Contender::new("optimizer's state in files", Word("state"));
pub(crate) const DRUMLINE: Of = Contender::new("Drumline", Word("ours"));
pub(crate) const TORCH: Of = Contender::new("PyTorch's fused AdamW", Word("torch"));
pub(crate) const ADAMW: Of = Contender::new("Drumline's AdamW", Word("ours"));
pub(crate) const ADAMW_BF16: Of = Contender::new("Drumline's AdamW, bf16 in and out", Word("ours-bf16"));

fn contenders(case: Case) -> Vec<Of> {
    match case {
        Case::States { .. } => vec![IN_MEMORY, STATE_IN_FILES],
        Case::Optimizer { .. } | Case::Kept { .. } => vec![DRUMLINE],
        Case::Adam { .. } => vec![TORCH, ADAMW, ADAMW_BF16],
    }
}

/// All units, in the order of a report.
pub(crate) fn units() -> Vec<Unit<Case, Word>> {
    let of_case = |case| contenders(case).into_iter().map(move |contender| Unit { case, contender });
    CASES.into_iter().flat_map(of_case).collect()
}

/// What a turn gave.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Figures {
    pub(crate) bytes: Option<f64>,
    pub(crate) parameters: f64,
    pub(crate) step_ms: f64,
    /// Of Adam: its rate of bytes as a share of the bare loop's, which runs before and after each of its steps.
    pub(crate) of_loop: Option<f64>,
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
        // Freed memory goes back to the system, so that only what is used counts.
        if !matches!(unit.case, Case::Adam { .. }) {
            command.env("MALLOC_MMAP_THRESHOLD_", "131072").env("MALLOC_TRIM_THRESHOLD_", "131072");
        }
        command.env("OMP_NUM_THREADS", "1").args(["run", "--standalone", "--nproc-per-node"]);
        let size = if self.is_quick { "mini" } else { "gpt2" };
        match unit.case {
            Case::States { ranks, stage } => {
                command.arg(ranks.to_string()).arg(&self.ours).args(["memory", "--size", size]);
                command.args(["--stage", stage, "--in-files", word, "--folder"]).arg(&self.folder);
            }
            Case::Optimizer { which, weights } => {
                command.arg("1").arg(&self.ours).args(["optim", "--size", size, "--steps", "2"]);
                command.args(["--which", which, "--weights", weights]);
            }
            Case::Kept { how } => {
                let [batch, places] = TEXTS.map(|number| number.to_string());
                command.arg("1").arg(&self.ours).args(["checkpoint", "--size", size, "--how", how]);
                command.args(["--batch", &batch, "--places", &places, "--steps", "1", "--threads", "2"]);
            }
            Case::Adam { threads } => {
                let millions = if self.is_quick { "4" } else { "64" };
                command.arg("1").arg(&self.ours).args(["adam", "--who", word, "--millions", millions]);
                command.args(["--threads", &threads.to_string()]);
            }
        }
        let printed = child::run(command, LIMIT)?;
        parse(&printed.stdout).with_context(|| format!("it printed `{}`", printed.stdout.trim_end()))
    }

    /// Memory hardly changes from one block to the next.
    fn blocks(&self, case: Case, blocks: usize) -> usize {
        if matches!(case, Case::Adam { .. }) { blocks } else { blocks.min(2) }
    }

    fn check(&self, unit: &UnitOf<Self>, figures: &Figures, tally: &TallyOf<Self>) -> anyhow::Result<()> {
        let reference = tally.all().find(|turn| turn.unit.case == unit.case);
        match reference {
            Some(turn) => SAME.check(&figures.losses, &turn.figures.losses),
            None => Ok(()),
        }
    }
}

fn parse(stdout: &str) -> anyhow::Result<Figures> {
    let line = JsonLine::find(stdout)?;
    let parameters = line.optional("parameters").unwrap_or(0.0);
    let used = line.optional("used_bytes_per_parameter").map(|bytes| bytes * parameters);
    let time = line.optional("optimizer_ms").or_else(|| line.optional("step_ms"));
    Ok(Figures {
        bytes: line.optional("pss_bytes").or(line.optional("saved_bytes")).or(used),
        parameters,
        step_ms: time.context("no time of a step")?,
        of_loop: line.optional("of_loop"),
        losses: line.numbers("losses").unwrap_or_default(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_all_kinds_are_read() {
        let states =
            parse(r#"{"optimizer_ms": 2.5, "losses": [1.0], "pss_bytes": 7, "parameters": 3}"#).unwrap();
        assert_eq!((states.bytes, states.losses.len()), (Some(7.0), 1));
        let adam = parse(r#"{"optimizer_ms": 2.5, "parameters": 3, "of_loop": 0.9}"#).unwrap();
        assert_eq!((adam.bytes, adam.of_loop, adam.losses.len()), (None, Some(0.9), 0));
        let optimizer =
            parse(r#"{"step_ms": 1.5, "parameters": 3, "used_bytes_per_parameter": 8.0}"#).unwrap();
        assert_eq!((optimizer.bytes, optimizer.step_ms), (Some(24.0), 1.5));
        assert_eq!(parse(r#"{"step_ms": 1.5, "saved_bytes": 5}"#).unwrap().bytes, Some(5.0));
        assert!(parse("{\"parameters\": 1}").is_err());
        assert_eq!(units().len(), 23);
    }
}
