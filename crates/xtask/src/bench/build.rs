//! Builds the programs that take part: ours with cargo, the peers' under `bench/.peers/`.

use crate::workspace;
use anyhow::{Context, bail};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const C_FLAGS: [&str; 4] = ["-O3", "-march=native", "-std=gnu11", "-Wall"];

/// A binary of one of our packages.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Binary {
    pub(crate) package: &'static str,
    pub(crate) name: &'static str,
}

/// The command `drumline`.
pub(crate) const DRUMLINE: Binary = Binary { package: "drumline-cli", name: "drumline" };
/// What `drumline train` starts.
pub(crate) const DRUMLINE_TRAIN: Binary = Binary { package: "drumline-zoo", name: "drumline-train" };
/// Our side of the comparisons that train, load data or translate: its subcommands are `step` and the like.
pub(crate) const BENCHED: Binary = Binary { package: "drumline-bench", name: "drumline-bench" };

/// Builds the command `drumline` with the release profile.
pub(crate) fn drumline() -> anyhow::Result<PathBuf> {
    let [drumline] = release([DRUMLINE])?;
    Ok(drumline)
}

/// Builds binaries as they are released, all at once: what they share is then built once.
pub(crate) fn release<const N: usize>(binaries: [Binary; N]) -> anyhow::Result<[PathBuf; N]> {
    built("release", binaries)
}

/// Builds programs of ours with a profile of the workspace. Returns where they are.
pub(crate) fn built<const N: usize>(profile: &str, binaries: [Binary; N]) -> anyhow::Result<[PathBuf; N]> {
    let names = binaries.map(|binary| binary.name);
    eprintln!("building {} ({profile}) ...", names.join(" and "));
    let mut command = workspace::cargo();
    command.args(["build", "--profile", profile]);
    for Binary { package, name } in binaries {
        command.args(["--package", package, "--bin", name]);
    }
    // This takes minutes, so cargo shows its progress.
    let status = command.stdin(Stdio::null()).status().context("cannot start cargo")?;
    if !status.success() {
        bail!("cannot build {}: cargo says above why ({status})", names.join(" and "));
    }
    let folder = workspace::Workspace::load()?.target_dir.join(profile);
    let programs = names.map(|name| folder.join(name));
    match programs.iter().find(|program| !program.is_file()) {
        Some(missing) => bail!("cargo built no {}", missing.display()),
        None => Ok(programs),
    }
}

/// Compiles C files of `bench/peers` to a program of this name; `extra` are further options of the compiler.
pub(crate) fn compile(
    compiler: &str,
    program: &str,
    extra: &[&str],
    files: &[&str],
) -> anyhow::Result<PathBuf> {
    let program = output_folder()?.join(program);
    let sources = workspace::root().join("bench/peers");
    let mut command = Command::new(compiler);
    command.args(C_FLAGS).args(extra).arg("-o").arg(&program);
    command.args(files.iter().map(|file| sources.join(file)));
    finish(command).with_context(|| hint(compiler))?;
    Ok(program)
}

fn hint(compiler: &str) -> String {
    let package = match compiler {
        "mpicc.openmpi" => "openmpi-bin libopenmpi-dev",
        "mpicc.mpich" => "mpich libmpich-dev",
        _ => "gcc",
    };
    format!("cannot compile with {compiler}; try installing it (Debian: apt install {package})")
}

/// Where the peers' programs and the data of contests lie.
pub(crate) fn output_folder() -> anyhow::Result<PathBuf> {
    let out = workspace::root().join("bench/.peers");
    fs::create_dir_all(&out).with_context(|| format!("cannot create {}", out.display()))?;
    Ok(out)
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
