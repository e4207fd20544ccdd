//! `cargo xtask gpu-test`: everything that needs an NVIDIA GPU, in one folder with one command.
//!
//! ```text
//!   build (tests with the feature `gpu`, drumline, drumline-train) ─▶ target/gpu-pack.tar.gz ─▶ run here, if there is a GPU
//!                                                                          └──▶ carried to a GPU machine: tar xzf, ./gpu-pack/run
//! ```
//! The GPU machine needs PyTorch 2.11 with CUDA 13, which is libtorch as well as the peer, and nothing of Rust.

use crate::bench::{BENCHED, DRUMLINE, DRUMLINE_TRAIN, release};
use crate::workspace::{self, Workspace};
use anyhow::{Context, bail};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Crates with tests that need a GPU.
const TESTED: [&str; 4] = ["drumline-torch", "drumline-parallel", "drumline", "drumline-zoo"];

/// What the tests and benchmarks read, relative to the repository.
const ALONG: [&str; 3] = ["bench/gpu", "bench/peers", "config"];

/// Build and pack what needs a GPU, and run it if one is here
#[derive(clap::Args, Debug)]
pub(crate) struct GpuTestArgs {
    /// Only pack, also where there is a GPU
    #[arg(long)]
    pack: bool,
    /// Only list the kernels of a GPT's training step by time; CONFIG is a file of config/, by default config/gpt2.yaml
    #[arg(long, value_name = "CONFIG", num_args = 0..=1, default_missing_value = "config/gpt2.yaml")]
    profile: Option<String>,
}

impl GpuTestArgs {
    /// What the script of the pack gets.
    fn words(&self) -> Vec<&str> {
        self.profile.iter().flat_map(|config| ["--profile", config]).collect()
    }
}

pub(crate) fn run(args: &GpuTestArgs) -> anyhow::Result<()> {
    let target = Workspace::load()?.target_dir;
    let pack = target.join("gpu-pack");
    if pack.exists() {
        fs::remove_dir_all(&pack).with_context(|| format!("cannot remove {}", pack.display()))?;
    }
    fs::create_dir_all(&pack).with_context(|| format!("cannot make {}", pack.display()))?;
    for (crate_name, program) in tests()? {
        stripped(&program, &pack.join(format!("test-{crate_name}")))?;
    }
    let binaries = [DRUMLINE, DRUMLINE_TRAIN, BENCHED];
    for (program, binary) in release(binaries)?.iter().zip(binaries) {
        stripped(program, &pack.join(binary.name))?;
    }
    for folder in ALONG {
        copy_folder(&workspace::root().join(folder), &pack.join(folder))?;
    }
    fs::rename(pack.join("bench/gpu/run"), pack.join("run")).context("cannot move the script")?;
    let archive = target.join("gpu-pack.tar.gz");
    let mut tar = Command::new("tar");
    tar.arg("czf").arg(&archive).arg("-C").arg(&target).arg("gpu-pack");
    succeed(tar)?;
    println!("packed: {}", archive.display());
    if args.pack || !has_gpu() {
        let command = [&["gpu-pack/run"], &args.words()[..]].concat().join(" ");
        println!("on a machine with a GPU and PyTorch 2.11: tar xzf gpu-pack.tar.gz && {command}");
        return Ok(());
    }
    let mut script = Command::new(pack.join("run"));
    script.args(args.words());
    succeed(script)
}

/// Whether a GPU of NVIDIA's is here, by the names in `/dev`: `nvidia0`, or another where a container has only that.
fn has_gpu() -> bool {
    let names = fs::read_dir("/dev").into_iter().flatten().flatten().map(|entry| entry.file_name());
    names.filter_map(|name| name.into_string().ok()).any(|name| is_gpu(&name))
}

fn is_gpu(name: &str) -> bool {
    name.strip_prefix("nvidia").is_some_and(|rest| rest.parse::<u32>().is_ok())
}

/// The test programs, by crate.
fn tests() -> anyhow::Result<Vec<(String, PathBuf)>> {
    eprintln!("building the tests that need a GPU (release) ...");
    let mut cargo = workspace::cargo();
    cargo.args(["test", "--release", "--no-run", "--message-format", "json", "--test", "gpu"]);
    for name in TESTED {
        cargo.args(["--package", name, "--features", &format!("{name}/gpu")]);
    }
    let output = cargo.output().context("cannot start cargo")?;
    if !output.status.success() {
        bail!("cargo: {}\n{}", output.status, String::from_utf8_lossy(&output.stderr).trim_end());
    }
    let found: Vec<_> = String::from_utf8_lossy(&output.stdout).lines().filter_map(test_program).collect();
    if found.len() != TESTED.len() {
        bail!("cargo built {} test programs, expected {}", found.len(), TESTED.len());
    }
    Ok(found)
}

/// The crate and the program of a line of cargo's, if it is about a test.
fn test_program(line: &str) -> Option<(String, PathBuf)> {
    let message: Value = serde_json::from_str(line).ok()?;
    // The programs of a crate are built with its tests.
    if message.pointer("/target/name")?.as_str()? != "gpu" {
        return None;
    }
    let program = PathBuf::from(message.get("executable")?.as_str()?);
    let manifest = Path::new(message.get("manifest_path")?.as_str()?);
    let crate_name = manifest.parent()?.file_name()?.to_str()?.to_owned();
    TESTED.contains(&crate_name.as_str()).then_some((crate_name, program))
}

/// A copy without the symbols of debuggers, which are most of it.
fn stripped(program: &Path, to: &Path) -> anyhow::Result<()> {
    let mut strip = Command::new("strip");
    strip.arg("-o").arg(to).arg(program);
    succeed(strip)
}

fn copy_folder(from: &Path, to: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(to).with_context(|| format!("cannot make {}", to.display()))?;
    for entry in fs::read_dir(from).with_context(|| format!("cannot read {}", from.display()))? {
        let entry = entry?;
        if entry.file_type()?.is_file() {
            fs::copy(entry.path(), to.join(entry.file_name()))?;
        }
    }
    Ok(())
}

fn succeed(mut command: Command) -> anyhow::Result<()> {
    let name = command.get_program().to_string_lossy().into_owned();
    let status = command.status().with_context(|| format!("cannot start {name}"))?;
    if !status.success() {
        bail!("{name}: {status}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_is_known_by_its_name() {
        assert!(["nvidia0", "nvidia3", "nvidia12"].into_iter().all(is_gpu));
        assert!(!["nvidiactl", "nvidia-uvm", "nvidia", "null"].into_iter().any(is_gpu));
    }

    #[test]
    fn a_test_program_is_found_in_what_cargo_says() {
        let line = r#"{"manifest_path":"/r/crates/drumline-torch/Cargo.toml","target":{"name":"gpu"},"executable":"/r/target/gpu-1"}"#;
        assert_eq!(test_program(line), Some(("drumline-torch".to_owned(), PathBuf::from("/r/target/gpu-1"))));
        for other in [
            r#"{"reason":"build-finished","success":true}"#,
            "text",
            r#"{"executable":null,"target":{"name":"gpu"},"manifest_path":"/r/x/Cargo.toml"}"#,
            r#"{"executable":"/r/drumline-train","target":{"name":"drumline-train"},"manifest_path":"/r/crates/drumline-zoo/Cargo.toml"}"#,
        ] {
            assert_eq!(test_program(other), None, "{other}");
        }
    }
}
