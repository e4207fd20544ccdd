//! Builds what takes part, under `bench/.peers/`. What cannot be built is reported and left out; the rest goes on.

use super::contender::Peer;
use crate::{python, workspace};
use anyhow::{Context, bail};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const C_FLAGS: [&str; 4] = ["-O3", "-march=native", "-std=gnu11", "-Wall"];

/// The programs that are there.
#[derive(Debug, Default)]
pub(crate) struct Built {
    pub(crate) ours: Option<PathBuf>,
    pub(crate) open_mpi: Option<PathBuf>,
    pub(crate) mpich: Option<PathBuf>,
    pub(crate) floor: Option<PathBuf>,
    pub(crate) socket: Option<PathBuf>,
    pub(crate) meter: Option<PathBuf>,
    pub(crate) python: Option<PathBuf>,
    pub(crate) gloo_script: PathBuf,
    /// What could not be built, and why.
    pub(crate) missing: Vec<String>,
}

/// Builds the peers asked for, the floor in any case (it is the probe too), and ours if wanted.
pub(crate) fn build(peers: &[Peer], with_ours: bool) -> anyhow::Result<Built> {
    let sources = workspace::root().join("bench/peers");
    let out = output_folder()?;
    let mut missing = Vec::new();
    let mut part = |name: &str, wanted: bool, made: &dyn Fn() -> anyhow::Result<PathBuf>| {
        let made = wanted.then(made)?;
        made.inspect_err(|error| missing.push(format!("{name}: {error:#}"))).ok()
    };
    let compile = |compiler, program: &str, extra: &[&str], files: &[&str]| {
        let files: Vec<_> = files.iter().map(|file| sources.join(file)).collect();
        compile(compiler, &out.join(program), extra, &files)
    };
    let wants = |peer| peers.contains(&peer);
    let mpi = ["mpi_collectives.c", "meter.c"];
    Ok(Built {
        floor: part("floor", true, &|| compile("cc", "floor", &[], &["floor.c", "meter.c"])),
        open_mpi: part("openmpi", wants(Peer::OpenMpi), &|| {
            compile("mpicc.openmpi", "collectives-openmpi", &[], &mpi)
        }),
        mpich: part("mpich", wants(Peer::Mpich), &|| compile("mpicc.mpich", "collectives-mpich", &[], &mpi)),
        socket: part("socket", wants(Peer::Socket), &|| {
            compile("cc", "socket_pair", &[], &["socket_pair.c", "meter.c"])
        }),
        meter: part("gloo", wants(Peer::Gloo), &|| {
            compile("cc", "libmeter.so", &["-shared", "-fPIC"], &["meter.c"])
        }),
        python: part("gloo", wants(Peer::Gloo), &python::with_torch),
        ours: part("ours", with_ours, &build_ours),
        gloo_script: sources.join("gloo_collectives.py"),
        missing,
    })
}

fn compile(compiler: &str, program: &Path, extra: &[&str], files: &[PathBuf]) -> anyhow::Result<PathBuf> {
    let mut command = Command::new(compiler);
    command.args(C_FLAGS).args(extra).arg("-o").arg(program).args(files);
    finish(command).with_context(|| hint(compiler))?;
    Ok(program.to_path_buf())
}

fn hint(compiler: &str) -> String {
    let package = match compiler {
        "mpicc.openmpi" => "openmpi-bin libopenmpi-dev",
        "mpicc.mpich" => "mpich libmpich-dev",
        _ => "gcc",
    };
    format!("cannot compile with {compiler}; try installing it (Debian: apt install {package})")
}

/// A program of one C file.
pub(crate) fn compile_one(program: &str, file: &str) -> anyhow::Result<PathBuf> {
    let out = output_folder()?;
    compile("cc", &out.join(program), &[], &[workspace::root().join("bench/peers").join(file)])
}

pub(crate) fn output_folder() -> anyhow::Result<PathBuf> {
    let out = workspace::root().join("bench/.peers");
    fs::create_dir_all(&out).with_context(|| format!("cannot create {}", out.display()))?;
    Ok(out)
}

/// The command `drumline`, as it is released.
pub(crate) fn build_ours() -> anyhow::Result<PathBuf> {
    build_package("drumline-cli", "drumline")
}

/// A binary of one of our crates, as it is released.
pub(crate) fn build_package(package: &str, binary: &str) -> anyhow::Result<PathBuf> {
    eprintln!("building {binary} (release) ...");
    let mut command = workspace::cargo();
    command.args(["build", "--release", "--package", package, "--bin", binary]);
    // Minutes, of which cargo tells.
    let status = command.stdin(Stdio::null()).status().context("cannot start cargo")?;
    if !status.success() {
        bail!("cannot build {binary}: cargo says above why ({status})");
    }
    let program = workspace::Workspace::load()?.target_dir.join("release").join(binary);
    if !program.is_file() {
        bail!("cargo built no {}", program.display());
    }
    Ok(program)
}

/// PyTorch with what `keep_freed_memory` does for us.
pub(crate) fn tune(command: &mut Command) {
    command.env("MALLOC_MMAP_THRESHOLD_", "1073741824").env("MALLOC_TRIM_THRESHOLD_", "2147483647");
}

fn finish(mut command: Command) -> anyhow::Result<()> {
    let program = Path::new(command.get_program());
    let name = program.file_name().unwrap_or(program.as_os_str()).to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("cannot start {name}"))?;
    if !output.status.success() {
        bail!("{name}: {}\n{}", output.status, String::from_utf8_lossy(&output.stderr).trim_end());
    }
    Ok(())
}
