//! Who trains, the command line of each, and what it must print.

use crate::bench::json_line::JsonLine;
use crate::bench::{child, peers};
use crate::{python, workspace};
use anyhow::Context;
use std::fmt;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(300);

/// One way to train.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Contender {
    /// Two ranks.
    Ours,
    /// Two ranks that share nothing but the machine.
    OursIndependent,
    Torch,
    TorchTuned,
    /// One rank, no DDP.
    OursAlone,
    TorchAlone,
    TorchAloneTuned,
}

impl Contender {
    pub(crate) const ALL: [Self; 7] = [
        Self::Ours,
        Self::OursIndependent,
        Self::Torch,
        Self::TorchTuned,
        Self::OursAlone,
        Self::TorchAlone,
        Self::TorchAloneTuned,
    ];

    pub(crate) fn ranks(self) -> usize {
        match self {
            Self::OursAlone | Self::TorchAlone | Self::TorchAloneTuned => 1,
            _ => 2,
        }
    }

    fn is_ours(self) -> bool {
        matches!(self, Self::Ours | Self::OursIndependent | Self::OursAlone)
    }

    fn is_tuned(self) -> bool {
        matches!(self, Self::TorchTuned | Self::TorchAloneTuned)
    }

    fn mode(self) -> &'static str {
        match self {
            Self::Ours | Self::Torch | Self::TorchTuned => "ddp",
            Self::OursIndependent => "independent",
            _ => "alone",
        }
    }
}

impl fmt::Display for Contender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ours => "Drumline, 2 ranks",
            Self::OursIndependent => "Drumline, 2 processes that do not communicate",
            Self::Torch => "PyTorch DDP, 2 ranks",
            Self::TorchTuned => "PyTorch DDP tuned, 2 ranks",
            Self::OursAlone => "Drumline, 1 process",
            Self::TorchAlone => "PyTorch, 1 process",
            Self::TorchAloneTuned => "PyTorch tuned, 1 process",
        })
    }
}

/// What a turn gave.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Figures {
    pub(crate) step_ms: f64,
    pub(crate) images_per_s: f64,
    pub(crate) losses: Vec<f64>,
    pub(crate) peak_bytes: f64,
}

/// The programs that take part.
#[derive(Debug)]
pub(crate) struct Contest {
    launcher: PathBuf,
    ours: PathBuf,
    python: PathBuf,
    script: PathBuf,
    steps: usize,
}

impl Contest {
    pub(crate) fn build(steps: usize) -> anyhow::Result<Self> {
        let launcher = peers::build_ours()?;
        let ours = peers::build_package("drumline-zoo", "drumline-train")?;
        let script = workspace::root().join("bench/peers/ddp.py");
        Ok(Self { launcher, ours, python: python::with_torch()?, script, steps })
    }

    /// One turn.
    pub(crate) fn measure(&self, contender: Contender, batch: usize) -> anyhow::Result<Figures> {
        let printed = child::run(self.command(contender, batch), LIMIT)?;
        parse(&printed.stdout).with_context(|| format!("{contender} printed `{}`", printed.stdout.trim_end()))
    }

    fn command(&self, contender: Contender, batch: usize) -> Command {
        let ranks = contender.ranks().to_string();
        let mut command = if contender == Contender::Torch {
            let mut command = Command::new(&self.python);
            command.args(["-m", "torch.distributed.run"]);
            command
        } else {
            let mut command = Command::new(&self.launcher);
            command.arg("run").env("PYTHON_EXEC", &self.python);
            command
        };
        command.args(["--standalone", "--nproc-per-node", &ranks]).env("OMP_NUM_THREADS", "1");
        if contender.is_ours() {
            command.arg(&self.ours).arg("bench-step");
        } else {
            command.arg(&self.script);
        }
        if contender.is_tuned() {
            peers::tune(command.arg("--tuned"));
        }
        let (batch, steps) = (batch.to_string(), self.steps.to_string());
        command.args(["--mode", contender.mode(), "--batch", &batch, "--steps", &steps]);
        command
    }
}

fn parse(stdout: &str) -> anyhow::Result<Figures> {
    let line = JsonLine::find(stdout)?;
    Ok(Figures {
        step_ms: line.number("step_ms")?,
        images_per_s: line.number("images_per_s")?,
        losses: line.numbers("losses")?,
        peak_bytes: line.number("peak_bytes")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_must_have_all_figures() {
        let line = r#"{"step_ms": 2.5, "images_per_s": 10, "losses": [1.0, 0.5], "peak_bytes": 7}"#;
        let figures = parse(line).unwrap();
        assert_eq!((figures.step_ms, figures.losses.len()), (2.5, 2));
        assert!(parse("{\"step_ms\": 1}").is_err());
    }
}
