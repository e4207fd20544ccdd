//! The two sides of a comparison with PyTorch, and how each is started.
//!
//! ```text
//!   ours           drumline run ─▶ a program of ours
//!   PyTorch        torchrun     ─▶ a script of bench/peers, as PyTorch's users start it
//!   PyTorch tuned  drumline run ─▶ the same script with --tuned: a core for each rank, and memory that is kept
//! ```

use super::build::{self, BENCHED, DRUMLINE};
use crate::{python, workspace};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Who computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Ours,
    Torch,
    TorchTuned,
}

/// The programs of both sides.
#[derive(Debug, Default)]
pub(crate) struct Sides {
    launcher: PathBuf,
    pub(crate) ours: PathBuf,
    python: PathBuf,
    script: PathBuf,
}

impl Sides {
    /// Builds ours, and finds PyTorch for a script of `bench/peers`.
    pub(crate) fn build(script: &str) -> anyhow::Result<Self> {
        let [launcher, ours] = build::release([DRUMLINE, BENCHED])?;
        let script = workspace::root().join("bench/peers").join(script);
        Ok(Self { launcher, ours, python: python::with_torch()?, script })
    }

    /// The command of `ranks` ranks; `subcommand` is what ours does. Arguments that both sides understand follow.
    pub(crate) fn start(&self, side: Side, ranks: usize, subcommand: &str) -> Command {
        let mut command = match side {
            Side::Torch => torchrun(&self.python),
            Side::Ours | Side::TorchTuned => drumline_run(&self.launcher, &self.python),
        };
        command.args(["--standalone", "--nproc-per-node", &ranks.to_string()]).env("OMP_NUM_THREADS", "1");
        match side {
            Side::Ours => command.arg(&self.ours).arg(subcommand),
            Side::Torch => command.arg(&self.script),
            Side::TorchTuned => tune(command.arg(&self.script).arg("--tuned")),
        };
        command
    }

    /// The same without a launcher.
    pub(crate) fn start_alone(&self, side: Side, subcommand: &str) -> Command {
        let mut command = Command::new(if side == Side::Ours { &self.ours } else { &self.python });
        match side {
            Side::Ours => command.arg(subcommand),
            Side::Torch => command.arg(&self.script),
            Side::TorchTuned => tune(command.arg(&self.script).arg("--tuned")),
        };
        command.env("OMP_NUM_THREADS", "1");
        command
    }
}

/// `torchrun`, to be followed by its options.
pub(crate) fn torchrun(python: &Path) -> Command {
    let mut command = Command::new(python);
    command.args(["-m", "torch.distributed.run"]);
    command
}

/// `drumline run`, which starts scripts with this Python.
pub(crate) fn drumline_run(launcher: &Path, python: &Path) -> Command {
    let mut command = Command::new(launcher);
    command.arg("run").env("PYTHON_EXEC", python);
    command
}

/// Gives PyTorch what `keep_freed_memory` does for us.
fn tune(command: &mut Command) -> &mut Command {
    command.env("MALLOC_MMAP_THRESHOLD_", "1073741824").env("MALLOC_TRIM_THRESHOLD_", "2147483647")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_side_is_started_its_own_way() {
        let [launcher, ours, python, script] = ["drumline", "ours", "python", "x.py"].map(PathBuf::from);
        let sides = Sides { launcher, ours, python, script };
        let words = |command: Command| {
            let words = std::iter::once(command.get_program()).chain(command.get_args());
            words.map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
        };
        let started = |side| words(sides.start(side, 2, "bench-x"));
        assert_eq!(started(Side::Ours), "drumline run --standalone --nproc-per-node 2 ours bench-x");
        assert_eq!(
            started(Side::Torch),
            "python -m torch.distributed.run --standalone --nproc-per-node 2 x.py"
        );
        assert_eq!(started(Side::TorchTuned), "drumline run --standalone --nproc-per-node 2 x.py --tuned");
        assert_eq!(words(sides.start_alone(Side::Ours, "bench-x")), "ours bench-x");
        assert_eq!(words(sides.start_alone(Side::Torch, "bench-x")), "python x.py");
    }
}
