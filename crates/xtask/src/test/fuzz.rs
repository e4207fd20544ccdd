//! A short run of every fuzz target in `fuzz/`, on stable Rust.
//!
//! ```text
//!   fuzz/corpus/T          committed seeds, only read
//!   TARGET/fuzz-corpus/T   what earlier runs found, kept and grown
//!   fuzz/artifacts/T       inputs that failed
//! ```
//! The programs are libFuzzer ones; coverage comes from compiler passes that stable Rust has too.

use crate::step::{Outcome, Step, everything};
use crate::workspace::{Workspace, cargo};
use anyhow::Context;
use std::fs;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// How many targets run at once: each keeps one core busy.
const AT_ONCE: usize = 2;
/// How long each target runs.
const RUN_TIME: Duration = Duration::from_secs(10);

/// Coverage counters at every edge, and the values compared at branches.
const RUSTFLAGS: &str = "--cfg fuzzing -Cpasses=sancov-module -Ccodegen-units=1 -Cdebug-assertions \
    -Cllvm-args=-sanitizer-coverage-level=4 -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
    -Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares";

/// Build all targets, then run each; nothing when there is no `fuzz/`.
pub(crate) fn steps(workspace: &Workspace) -> Vec<Outcome> {
    let manifest = workspace.root.join("fuzz/Cargo.toml");
    if !manifest.exists() {
        return Vec::new();
    }
    let fuzz = match Fuzz::find(workspace, manifest) {
        Ok(fuzz) => fuzz,
        Err(error) => return vec![Outcome::of("fuzz targets", || Err(error))],
    };
    let mut outcomes = vec![fuzz.build()];
    if outcomes[0].failure.is_none() {
        outcomes.extend(fuzz.targets.chunks(AT_ONCE).flat_map(|targets| fuzz.run_at_once(targets)));
    }
    outcomes
}

struct Fuzz<'a> {
    workspace: &'a Workspace,
    manifest: PathBuf,
    /// The machine's own; named, so that build scripts and macros are built without the coverage flags.
    triple: String,
    targets: Vec<String>,
}

impl<'a> Fuzz<'a> {
    fn find(workspace: &'a Workspace, manifest: PathBuf) -> anyhow::Result<Self> {
        let packages = Workspace::of_manifest(&manifest)?.packages;
        let targets = packages.into_iter().flat_map(|package| package.binaries).collect();
        Ok(Self { workspace, manifest, triple: host_triple()?, targets })
    }

    fn target_dir(&self) -> PathBuf {
        self.workspace.target_dir.join("fuzz")
    }

    fn build(&self) -> Outcome {
        let mut command = cargo();
        command.args(["build", "--release", "--bins", "--target", &self.triple, "--manifest-path"]);
        command.arg(&self.manifest).env("RUSTFLAGS", RUSTFLAGS).env("CARGO_TARGET_DIR", self.target_dir());
        let deadline = Duration::from_secs(25 * 60);
        let logs = self.workspace.logs();
        Step { name: "fuzz build", command, deadline, logs: &logs, shown: everything() }.run()
    }

    fn run_at_once(&self, targets: &[String]) -> Vec<Outcome> {
        std::thread::scope(|scope| {
            let running: Vec<_> =
                targets.iter().map(|target| scope.spawn(move || self.run(target))).collect();
            running
                .into_iter()
                .map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)))
                .collect()
        })
    }

    fn run(&self, target: &str) -> Outcome {
        let name = format!("fuzz {target}");
        let grown = self.workspace.target_dir.join("fuzz-corpus").join(target);
        let artifacts = self.workspace.root.join("fuzz/artifacts").join(target);
        let folders = fs::create_dir_all(&grown).and_then(|()| fs::create_dir_all(&artifacts));
        if let Err(error) = folders {
            return Outcome::of(&name, || Err(error).context("cannot make the corpus folders"));
        }
        let command = self.command(target, &grown, &artifacts);
        let deadline = RUN_TIME + Duration::from_secs(60);
        Step { name: &name, command, deadline, logs: &self.workspace.logs(), shown: Box::new(is_news) }.run()
    }

    fn command(&self, target: &str, grown: &Path, artifacts: &Path) -> Command {
        let program = self.target_dir().join(&self.triple).join("release").join(target);
        let mut command = Command::new(program);
        command.current_dir(&self.workspace.root).arg(grown);
        let seeds = self.workspace.root.join("fuzz/corpus").join(target);
        if seeds.is_dir() {
            command.arg(seeds);
        }
        command.arg(format!("-max_total_time={}", RUN_TIME.as_secs()));
        command.arg(format!("-artifact_prefix={}/", artifacts.display())).arg("-timeout=10");
        command
    }
}

/// All but the fuzzer's progress lines and its remarks on sanitizers that are not linked.
fn is_news(line: &str) -> bool {
    let is_progress = line.starts_with('#') && !line.contains("DONE");
    let is_remark = line.starts_with("INFO:") || line.starts_with("WARNING: Failed to find function");
    !is_progress && !is_remark && !line.trim().is_empty()
}

fn host_triple() -> anyhow::Result<String> {
    let output = Command::new("rustc").arg("-vV").output().context("cannot start rustc")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let host = text.lines().find_map(|line| line.strip_prefix("host: "));
    host.map(str::to_owned).context("rustc -vV names no host")
}
