//! One run of one launcher: its command line, its times, and the check that every rank ran.

use super::figures::Figures;
use super::line::{self, What};
use super::memory;
use crate::bench::contender::Contender;
use crate::bench::contest::{Contest, UnitOf};
use crate::bench::sides::{drumline_run, torchrun};
use crate::bench::{build, child};
use crate::{python, workspace};
use anyhow::{Context, bail};
use rustix::time::{ClockId, clock_gettime};
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(120);
/// Ranks where the subject does not say.
const WORLD: usize = 2;

/// Ranks of the large job.
const MANY: usize = 500;
/// Ranks beside which the launcher's memory is read.
const SLEEPERS: usize = 100;
/// How often those two are repeated: they are far from their goals' edge or say so.
const REPEATS: usize = 3;

/// Who starts the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Launcher {
    Ours,
    Torchrun,
    /// The program by itself.
    None,
}

pub(crate) const OURS: Contender<Launcher> = Contender::new("ours", Launcher::Ours);
pub(crate) const TORCHRUN: Contender<Launcher> = Contender::new("torchrun", Launcher::Torchrun);
pub(crate) const BARE: Contender<Launcher> = Contender::new("none", Launcher::None);

/// What is started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Subject {
    /// The native program without a launcher.
    Bare,
    Native,
    Python,
    /// A native program that fails once.
    Restart,
    /// Many ranks of the native program.
    Many,
    /// The launcher's memory beside ranks that sleep.
    Memory,
}

impl Subject {
    pub(crate) const ALL: [Self; 6] =
        [Self::Bare, Self::Native, Self::Python, Self::Restart, Self::Many, Self::Memory];
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bare => f.write_str("native program alone"),
            Self::Native => f.write_str("native program"),
            Self::Python => f.write_str("Python script"),
            Self::Restart => f.write_str("restart"),
            Self::Many => write!(f, "{MANY} ranks"),
            Self::Memory => write!(f, "memory beside {SLEEPERS} ranks"),
        }
    }
}

/// The contest, with the programs that take part.
#[derive(Debug)]
pub(crate) struct Starts {
    ours: PathBuf,
    python: PathBuf,
    noop: PathBuf,
    noop_script: PathBuf,
}

impl Contest for Starts {
    type Case = Subject;
    type Kind = Launcher;
    type Figures = Figures;

    fn contenders(&self, subject: Subject) -> Vec<Contender<Launcher>> {
        match subject {
            Subject::Bare => vec![BARE],
            Subject::Many => vec![OURS],
            Subject::Native | Subject::Python | Subject::Restart | Subject::Memory => vec![OURS, TORCHRUN],
        }
    }

    /// Runs it once and holds what the ranks said against what they had to.
    fn measure(&self, unit: &UnitOf<Self>) -> anyhow::Result<Figures> {
        let launcher = unit.contender.kind;
        match unit.case {
            Subject::Memory => {
                let command = self.command(launcher, SLEEPERS, &self.noop, &["sleep"]);
                let pss = memory::beside(command, SLEEPERS, &self.noop)?;
                Ok(Figures { pss: Some(pss), ..Figures::default() })
            }
            Subject::Restart => self.restart(launcher),
            Subject::Python => self.start(self.command(launcher, WORLD, &self.noop_script, &[]), WORLD),
            Subject::Native => self.start(self.command(launcher, WORLD, &self.noop, &[]), WORLD),
            Subject::Many => self.start(self.command(launcher, MANY, &self.noop, &[]), MANY),
            Subject::Bare => self.start(Command::new(&self.noop), 1),
        }
    }

    fn blocks(&self, subject: Subject, blocks: usize) -> usize {
        if matches!(subject, Subject::Many | Subject::Memory) { blocks.min(REPEATS) } else { blocks }
    }
}

impl Starts {
    pub(crate) fn build() -> anyhow::Result<Self> {
        let noop_script = workspace::root().join("bench/peers/noop.py");
        let noop = build::compile("cc", "noop", &[], &["noop.c"])?;
        Ok(Self { ours: build::drumline()?, python: python::with_torch()?, noop, noop_script })
    }

    fn command(&self, launcher: Launcher, world: usize, program: &Path, args: &[&str]) -> Command {
        let mut command = match launcher {
            Launcher::Torchrun => torchrun(&self.python),
            Launcher::Ours | Launcher::None => drumline_run(&self.ours, &self.python),
        };
        if launcher == Launcher::Torchrun && program == self.noop {
            command.arg("--no-python");
        }
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
