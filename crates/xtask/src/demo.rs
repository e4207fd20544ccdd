//! `cargo xtask demo`: from a fresh clone to a trained ResNet-18 on two processes.
//!
//! ```text
//!   libtorch, build ─▶ drumline data synth-cifar ─▶ drumline train --nproc-per-node 2 ─▶ what to try next
//! ```

use crate::bench::{DRUMLINE, DRUMLINE_TRAIN, built};
use crate::libtorch;
use crate::workspace::{self, Workspace};
use anyhow::{Context, bail};
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

/// Everything of it lies here, below the target folder.
const FOLDER: &str = "demo";

/// Programs as fast as those of a release, and larger, in less time.
const PROFILE: &str = "quick";

/// Build, make pictures, train; what is printed goes straight to the terminal.
pub(crate) fn run() -> anyhow::Result<()> {
    eprintln!(
        "== set-up: the first time it takes about eight minutes on two cores, most of them to compile =="
    );
    fetch_libtorch()?;
    let [drumline, _train] = built(PROFILE, [DRUMLINE, DRUMLINE_TRAIN])?;
    let folder = Workspace::load()?.target_dir.join(FOLDER);
    let (data, out) = (folder.join("cifar"), folder.join("run"));
    for folder in [&out, &data] {
        match fs::remove_dir_all(folder) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("cannot remove {}", folder.display()));
            }
            _ => {}
        }
    }
    let began = Instant::now();
    start(&drumline, &["data", "synth-cifar", "--out", text(&data)?, "--train", "5000", "--test", "1000"])?;
    let train = ["train", "--nproc-per-node", "2", "--cfg", "config/cifar-resnet18.yaml"];
    start(&drumline, &[&train[..], &["TRAIN.DATASET", text(&data)?, "OUT_DIR", text(&out)?]].concat())?;
    println!("\nThat took {:.0} s. What was written: {}", began.elapsed().as_secs_f64(), out.display());
    println!("{}", next(&drumline, &data));
    Ok(())
}

/// Fetches libtorch. If it has to be downloaded, what does not need it is built meanwhile.
fn fetch_libtorch() -> anyhow::Result<()> {
    if libtorch::is_ready()? {
        return libtorch::ensure();
    }
    let mut build = workspace::cargo();
    build.args(["build", "--profile", PROFILE, "--quiet", "--bin", DRUMLINE.name]);
    // Both packages, so that shared dependencies have the features that they have in the build of both.
    build.args(["--package", DRUMLINE.package, "--package", DRUMLINE_TRAIN.package]);
    let mut build = build.stdin(Stdio::null()).spawn().context("cannot start cargo")?;
    let fetched = libtorch::ensure();
    if fetched.is_err() {
        build.kill().context("cannot stop cargo")?;
    }
    // If it fails, the build of both fails in the same way.
    build.wait().context("cannot wait for cargo")?;
    fetched
}

fn next(drumline: &Path, data: &Path) -> String {
    let runs = data.parent().unwrap_or(data).display();
    let (drumline, data) = (drumline.display(), data.display());
    format!(
        "\
Next:
  more ranks, another model      {drumline} train --nproc-per-node 4 --cfg config/cifar-resnet18.yaml MODEL.ARCH convnet TRAIN.DATASET {data} OUT_DIR {runs}/convnet
  is one rank the same as two?   {drumline} train --nproc-per-node 2 --cfg config/cifar-resnet18.yaml --verify-parity TRAIN.DATASET {data} MODEL.SYNCBN True
  every key of a configuration   {drumline} keys; docs/training.md
  what a collective really does  cargo run --release -p drumline-examples --bin collectives
  your own program               examples/README.md
  a cluster                      docs/launching.md, docs/slurm.md"
    )
}

fn start(drumline: &Path, args: &[&str]) -> anyhow::Result<()> {
    eprintln!("\n$ drumline {}", args.join(" "));
    let mut command = Command::new(drumline);
    let status = command.args(args).current_dir(workspace::root()).status();
    let status = status.with_context(|| format!("cannot start {}", drumline.display()))?;
    if !status.success() {
        bail!("the demonstration failed: {status}");
    }
    Ok(())
}

fn text(path: &Path) -> anyhow::Result<&str> {
    path.to_str().with_context(|| format!("{} is not UTF-8", path.display()))
}
