//! A short training on two ranks, from the command line to the checkpoint, with binaries as the tests have them.
//!
//! ```text
//!   build ─▶ drumline data synth-cifar ─▶ drumline train --nproc-per-node 2
//! ```

use crate::step::{Outcome, Step, everything};
use crate::workspace::{Workspace, cargo};
use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

/// The steps; what follows a failed one is left out.
pub(crate) fn steps(workspace: &Workspace) -> Vec<Outcome> {
    let run = TwoRanks { workspace, folder: workspace.target_dir.join("two-ranks") };
    let mut outcomes = Vec::new();
    for step in [TwoRanks::build, TwoRanks::make_data, TwoRanks::train] {
        let outcome = step(&run);
        let has_failed = outcome.failure.is_some();
        outcomes.push(outcome);
        if has_failed {
            break;
        }
    }
    outcomes
}

struct TwoRanks<'a> {
    workspace: &'a Workspace,
    folder: PathBuf,
}

impl TwoRanks<'_> {
    fn build(&self) -> Outcome {
        let mut command = cargo();
        command.args(["build", "--package", "drumline-cli", "--package", "drumline-zoo", "--bins"]);
        self.step("two ranks: build", command, Duration::from_secs(20 * 60))
    }

    fn make_data(&self) -> Outcome {
        // What an earlier run has written would be resumed.
        let _ = fs::remove_dir_all(&self.folder);
        let mut command = self.drumline();
        command.args(["data", "synth-cifar", "--train", "64", "--test", "32", "--out"]).arg(self.data());
        self.step("two ranks: data", command, Duration::from_secs(60))
    }

    fn train(&self) -> Outcome {
        let mut command = self.drumline();
        command.args(["train", "--nproc-per-node", "2", "--cfg", "config/cifar-resnet18.yaml"]);
        command.args(["MODEL.ARCH", "mlp", "OPTIM.MAX_EPOCH", "1", "OPTIM.WARMUP_EPOCHS", "0"]);
        command.args(["TRAIN.BATCH_SIZE", "8"]);
        command.arg("TRAIN.DATASET").arg(self.data()).arg("OUT_DIR").arg(self.folder.join("run"));
        self.step("two ranks: train", command, Duration::from_secs(120))
    }

    fn data(&self) -> PathBuf {
        self.folder.join("cifar")
    }

    fn drumline(&self) -> Command {
        let mut command = Command::new(self.workspace.target_dir.join("debug/drumline"));
        command.current_dir(&self.workspace.root);
        command
    }

    fn step(&self, name: &str, command: Command, deadline: Duration) -> Outcome {
        Step { name, command, deadline, logs: &self.workspace.logs(), shown: everything() }.run()
    }
}
