//! Who trains or translates, the command line of each, and what it must print.

use crate::bench::json_line::JsonLine;
use crate::bench::{child, peers};
use crate::{python, workspace};
use anyhow::Context;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(600);

/// What is done, and with which model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Case {
    /// Training: 2 layers of 128, 300 words.
    Small,
    /// Training: 3 layers of 256, 8000 words.
    Middle,
    /// Training: 6 layers of 512, 8000 words.
    Base,
    /// Beam search with the small model.
    DecodeSmall,
    /// Beam search with the base model.
    DecodeBase,
}

impl Case {
    pub(crate) fn is_training(self) -> bool {
        matches!(self, Self::Small | Self::Middle | Self::Base)
    }

    pub(crate) fn contenders(self) -> &'static [Contender] {
        if self.is_training() {
            &[Contender::Ours, Contender::Torch, Contender::TorchTuned]
        } else {
            &[Contender::Ours, Contender::Torch]
        }
    }

    fn size(self) -> &'static str {
        match self {
            Self::Small | Self::DecodeSmall => "small",
            Self::Middle => "middle",
            Self::Base | Self::DecodeBase => "base",
        }
    }

    /// Steps that are timed, and steps before them.
    fn steps(self) -> (usize, usize) {
        match self {
            Self::Small => (20, 5),
            Self::Middle => (8, 3),
            Self::Base => (4, 2),
            Self::DecodeSmall => (5, 0),
            Self::DecodeBase => (1, 0),
        }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let work = if self.is_training() { "train" } else { "decode" };
        write!(f, "{work} {}", self.size())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Contender {
    Ours,
    Torch,
    TorchTuned,
}

impl fmt::Display for Contender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ours => "Drumline",
            Self::Torch => "PyTorch",
            Self::TorchTuned => "PyTorch tuned",
        })
    }
}

/// Why a contender runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Few steps without dropout, whose results are compared.
    Check,
    Time,
}

/// What a turn gave.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Figures {
    pub(crate) step_ms: f64,
    pub(crate) tokens_per_s: f64,
    /// Of a step, all ranks and threads together.
    pub(crate) cpu_ms: Option<f64>,
    pub(crate) peak_bytes: Option<f64>,
    /// Losses of training, scores of translations.
    pub(crate) results: Vec<f64>,
}

impl Figures {
    /// The first and the last.
    pub(crate) fn shown_results(&self) -> String {
        let ends = [self.results.first(), self.results.last()];
        ends.into_iter().flatten().map(|result| format!("{result:.5}")).collect::<Vec<_>>().join(" … ")
    }
}

/// The programs that take part.
#[derive(Debug)]
pub(crate) struct Contest {
    launcher: PathBuf,
    ours: PathBuf,
    python: PathBuf,
    script: PathBuf,
}

impl Contest {
    pub(crate) fn build(cases: &[Case]) -> anyhow::Result<Self> {
        let launcher = peers::build_ours()?;
        let ours = peers::build_package("drumline-zoo", "drumline-train")?;
        let script = workspace::root().join("bench/peers/transformer.py");
        let contest = Self { launcher, ours, python: python::with_torch()?, script };
        for case in cases {
            let mut command = Command::new(&contest.ours);
            command.args(["bench-transformer", "--work", "batches", "--size", case.size(), "--batches"]);
            command.arg(batches(*case)?);
            child::run(command, LIMIT)?;
        }
        Ok(contest)
    }

    /// One turn.
    pub(crate) fn measure(
        &self,
        contender: Contender,
        case: Case,
        purpose: Purpose,
    ) -> anyhow::Result<Figures> {
        let printed = child::run(self.command(contender, case, purpose)?, LIMIT)?;
        parse(&printed.stdout).with_context(|| format!("{contender} printed `{}`", printed.stdout.trim_end()))
    }

    fn command(&self, contender: Contender, case: Case, purpose: Purpose) -> anyhow::Result<Command> {
        let mut command = self.started(contender, case);
        let (steps, warm_up) = match purpose {
            Purpose::Check if case.is_training() => (3, 0),
            Purpose::Check => (1, 0),
            Purpose::Time => case.steps(),
        };
        let dropout = if purpose == Purpose::Check { "0" } else { "0.1" };
        let work = if case.is_training() { "train" } else { "decode" };
        command.args(["--work", work, "--size", case.size(), "--dropout", dropout, "--batches"]);
        command.arg(batches(case)?).args(["--steps", &steps.to_string(), "--warm-up", &warm_up.to_string()]);
        if contender == Contender::TorchTuned {
            peers::tune(command.arg("--tuned"));
        }
        command.env("OMP_NUM_THREADS", "1");
        Ok(command)
    }

    /// The launcher and the program: torchrun, as PyTorch's users start it; `drumline run`; for decoding neither.
    fn started(&self, contender: Contender, case: Case) -> Command {
        let program: &Path = if contender == Contender::Ours { &self.ours } else { &self.script };
        let mut command = match (case.is_training(), contender) {
            (true, Contender::Torch) => {
                let mut command = Command::new(&self.python);
                command.args(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]);
                command.arg(program);
                command
            }
            (true, _) => {
                let mut command = Command::new(&self.launcher);
                command.args(["run", "--standalone", "--nproc-per-node", "2"]).arg(program);
                command.env("PYTHON_EXEC", &self.python);
                command
            }
            (false, Contender::Ours) => Command::new(program),
            (false, _) => {
                let mut command = Command::new(&self.python);
                command.arg(program);
                command
            }
        };
        if contender == Contender::Ours {
            command.arg("bench-transformer");
        }
        command
    }
}

fn batches(case: Case) -> anyhow::Result<PathBuf> {
    Ok(peers::output_folder()?.join(format!("transformer-{}.json", case.size())))
}

fn parse(stdout: &str) -> anyhow::Result<Figures> {
    let line = JsonLine::find(stdout)?;
    Ok(Figures {
        step_ms: line.number("step_ms")?,
        tokens_per_s: line.number("tokens_per_s")?,
        cpu_ms: line.optional("cpu_ms"),
        peak_bytes: line.optional("peak_bytes"),
        results: line.numbers("losses").or_else(|_| line.numbers("scores"))?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_must_have_figures_and_results() {
        let line = r#"{"step_ms": 2.5, "tokens_per_s": 10, "losses": [1.0, 0.5], "cpu_ms": 7}"#;
        let figures = parse(line).unwrap();
        assert_eq!((figures.step_ms, figures.results.len(), figures.cpu_ms), (2.5, 2, Some(7.0)));
        assert_eq!(figures.shown_results(), "1.00000 … 0.50000");
        assert_eq!(parse(&line.replace("losses", "scores")).unwrap().results, figures.results);
        assert!(parse(&line.replace("losses", "other")).is_err());
    }
}
