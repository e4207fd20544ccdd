//! One run of one launcher: its command line, its times, and the check that every rank ran.

use super::line::{self, What};
use super::memory;
use super::samples::{Figures, Launcher, Subject};
use crate::bench::{child, peers};
use crate::{python, workspace};
use anyhow::{Context, bail};
use rustix::time::{ClockId, clock_gettime};
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(120);
/// Ranks where the subject does not say.
const WORLD: usize = 2;

/// The programs that take part.
#[derive(Debug)]
pub(crate) struct Contest {
    ours: PathBuf,
    python: PathBuf,
    noop: PathBuf,
    noop_script: PathBuf,
}

impl Contest {
    pub(crate) fn build() -> anyhow::Result<Self> {
        let script = workspace::root().join("bench/peers/noop.py");
        let noop = peers::compile_one("noop", "noop.c")?;
        Ok(Self { ours: peers::build_ours()?, python: python::with_torch()?, noop, noop_script: script })
    }

    /// Runs it once and holds what the ranks said against what they had to.
    pub(crate) fn measure(&self, subject: Subject, launcher: Launcher) -> anyhow::Result<Figures> {
        match subject {
            Subject::Memory(world) => {
                let command = self.command(launcher, world, &self.noop, &["sleep"]);
                Ok(Figures { pss: Some(memory::beside(command, world, &self.noop)?), ..Figures::default() })
            }
            Subject::Restart => self.restart(launcher),
            Subject::Python => self.start(self.command(launcher, WORLD, &self.noop_script, &[]), WORLD),
            Subject::Native => self.start(self.command(launcher, WORLD, &self.noop, &[]), WORLD),
            Subject::Many(world) => self.start(self.command(launcher, world, &self.noop, &[]), world),
            Subject::Bare => self.start(Command::new(&self.noop), 1),
        }
    }

    fn command(&self, launcher: Launcher, world: usize, program: &PathBuf, args: &[&str]) -> Command {
        let mut command = match launcher {
            Launcher::Torchrun => {
                let mut command = Command::new(&self.python);
                command.args(["-m", "torch.distributed.run"]);
                if program == &self.noop {
                    command.arg("--no-python");
                }
                command
            }
            Launcher::Ours | Launcher::None => {
                let mut command = Command::new(&self.ours);
                command.arg("run").env("PYTHON_EXEC", &self.python);
                command
            }
        };
        command.args(["--standalone", "--nproc-per-node", &world.to_string()]);
        if args.contains(&"fail-once") {
            command.args(["--max-restarts", "1"]);
        }
        // Neither spends time on counting cores or on a warning about it.
        command.env("OMP_NUM_THREADS", "1").arg(program).args(args);
        command
    }

    fn start(&self, command: Command, world: usize) -> anyhow::Result<Figures> {
        let begin = now();
        let printed = child::run(command, LIMIT)?;
        let total = now().saturating_sub(begin);
        let lines = line::parse(&printed.stdout);
        let first_line = line::all_begun(&lines, 0, world)?.saturating_sub(begin);
        Ok(Figures { first_line: Some(first_line), total: Some(total), ..Figures::default() })
    }

    /// From the failure to the last rank's first line after it.
    fn restart(&self, launcher: Launcher) -> anyhow::Result<Figures> {
        let command = self.command(launcher, WORLD, &self.noop, &["fail-once"]);
        let lines = line::parse(&child::run(command, LIMIT)?.stdout);
        line::all_begun(&lines, 0, WORLD)?;
        let again = line::all_begun(&lines, 1, WORLD)?;
        let failures: Vec<_> = lines.iter().filter(|line| line.what == What::Fails).collect();
        let [failure] = failures[..] else { bail!("expected one failure, got {}", failures.len()) };
        let took = again.checked_sub(failure.at).context("a rank began again before the failure")?;
        Ok(Figures { restart: Some(took), ..Figures::default() })
    }
}

/// The clock that the programs read too.
fn now() -> Duration {
    let now = clock_gettime(ClockId::Monotonic);
    Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec as u32)
}
