//! Fetching with pip. Which index it asks is pip's own configuration; nothing of it is set here.
//!
//! ```text
//!   pip download, one package at a time ──▶ PART/wheels ──pip install, offline──▶ PART/site/…
//! ```
//! A package that has arrived is not fetched again. pip holds our lock open as its standard input, so that
//! the folder stays locked while it runs, even when this program was killed.

use super::{Kind, VERSION};
use anyhow::{Context, bail};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The CUDA packages that even the CPU half opens.
const BOTH: &[&str] = &["nvidia-cuda-runtime==13.0.96", "nvidia-cuda-cupti==13.0.85"];

/// The headers with which the CUDA plugin is compiled, besides those of the runtime.
const HEADERS: &[&str] = &["nvidia-cuda-crt==13.0.88"];

/// What `libtorch_cuda.so` opens besides, GPU or not: the versions that torch 2.11.0 asks for.
const OPENED_BY_CUDA: &[&str] = &[
    "nvidia-cublas==13.1.0.3",
    "nvidia-cudnn-cu13==9.19.0.56",
    "nvidia-cufft==12.0.0.61",
    "nvidia-cufile==1.15.1.6",
    "nvidia-curand==10.4.0.35",
    "nvidia-cusparse==12.6.3.3",
    "nvidia-cusparselt-cu13==0.8.0",
    "nvidia-nccl-cu13==2.28.9",
    "nvidia-nvjitlink==13.0.88",
    "nvidia-nvshmem-cu13==3.4.5",
];

/// What it opens when a GPU is used.
const USED_BY_CUDA: &[&str] =
    &["nvidia-cuda-nvrtc==13.0.88", "nvidia-cusolver==12.0.4.66", "nvidia-nvtx==13.0.85"];

/// The Python packages that it needs: the first to be imported, the second to send objects between ranks, the third to read
/// checkpoints, the last two for distributed tensors and their checkpoints.
const IMPORTED: &[&str] =
    &["typing_extensions==4.15.0", "numpy==2.3.5", "safetensors==0.8.0", "sympy==1.14.0", "mpmath==1.3.0"];

/// The version that tests open their event files with.
pub(crate) const TENSORBOARD: &str = "2.21.0";

/// What it needs to read files and to serve them.
const USED_BY_TENSORBOARD: &[&str] = &[
    "absl-py==2.5.1",
    "grpcio==1.85.1",
    "Markdown==3.11.3",
    "MarkupSafe==3.0.4",
    "numpy==2.3.5",
    "packaging==26.3",
    "pillow==13.0.0",
    "protobuf==7.36.2",
    "tensorboard-data-server==0.7.2",
    "typing_extensions==4.15.0",
    "Werkzeug==3.1.9",
];

/// The packages of a libtorch, each with its version. None brings others along.
pub(crate) fn packages(kind: Kind) -> Vec<String> {
    match kind {
        Kind::Cpu => torch_with(&[BOTH, HEADERS]),
        Kind::Cuda => torch_with(&[BOTH, HEADERS, OPENED_BY_CUDA, USED_BY_CUDA]),
    }
}

/// The packages with which `import torch` and its gloo backend work without a GPU. Unlike `libtorch_cpu.so`, the
/// Python module opens the CUDA libraries in any case.
pub(crate) fn packages_to_import() -> Vec<String> {
    torch_with(&[BOTH, OPENED_BY_CUDA, IMPORTED])
}

/// The packages with which `tensorboard` reads event files and shows them.
pub(crate) fn packages_of_tensorboard() -> Vec<String> {
    first_and(format!("tensorboard=={TENSORBOARD}"), &[USED_BY_TENSORBOARD])
}

fn torch_with(lists: &[&[&str]]) -> Vec<String> {
    first_and(format!("torch=={VERSION}"), lists)
}

fn first_and(first: String, lists: &[&[&str]]) -> Vec<String> {
    let pinned = lists.iter().flat_map(|list| *list).map(|package| (*package).to_owned());
    [first].into_iter().chain(pinned).collect()
}

/// `python3`, if it has pip.
pub(crate) fn find_python() -> anyhow::Result<&'static str> {
    let python = "python3";
    let output = Command::new(python)
        .args(["-m", "pip", "--version"])
        .output()
        .context("cannot start python3; try installing Python 3 (Debian: apt install python3-pip)")?;
    if !output.status.success() {
        bail!("python3 has no pip; try installing it (Debian: apt install python3-pip)");
    }
    Ok(python)
}

/// Packages to be fetched into `part/wheels`, then unpacked into `target`, a folder on the same disk.
pub(crate) struct Install<'a> {
    pub(crate) python: &'a str,
    pub(crate) packages: Vec<String>,
    pub(crate) part: &'a Path,
    pub(crate) target: PathBuf,
    pub(crate) lock: &'a File,
}

impl Install<'_> {
    pub(crate) fn run(&self) -> anyhow::Result<()> {
        let wheels = self.part.join("wheels");
        for (index, package) in self.packages.iter().enumerate() {
            eprintln!("[{}/{}] {package}", index + 1, self.packages.len());
            let mut download = self.pip("download")?;
            download.arg("--dest").arg(&wheels).arg(package);
            run(download)?;
        }
        let mut install = self.pip("install")?;
        install.args(["--quiet", "--no-index", "--no-compile", "--find-links"]).arg(&wheels);
        install.arg("--target").arg(&self.target).args(&self.packages);
        run(install)
    }

    fn pip(&self, action: &str) -> anyhow::Result<Command> {
        let mut command = Command::new(self.python);
        command.args(["-m", "pip", action, "--disable-pip-version-check"]);
        command.args(["--no-deps", "--only-binary", ":all:", "--no-input"]);
        // Temporary files on the same disk as the rest; settings that would fight with `--target` off.
        command.env("TMPDIR", self.part.join("tmp"));
        command.env("PIP_USER", "0").env("PIP_REQUIRE_VIRTUALENV", "0").env("PIP_ROOT_USER_ACTION", "ignore");
        // What pip says is talk; data on our standard output is what a command has found or made.
        command.stdout(std::io::stderr()).stdin(self.lock.try_clone().context("cannot share the lock")?);
        Ok(command)
    }
}

fn run(mut command: Command) -> anyhow::Result<()> {
    let status = command.status().context("cannot start pip")?;
    if !status.success() {
        bail!(
            "pip failed ({status}); torch {VERSION} needs Linux and Python 3.10 to 3.14; \
             try the command again: packages that have arrived are kept"
        );
    }
    Ok(())
}

/// Open the library once: a file that is complete may still not fit this system.
pub(crate) fn try_to_open(python: &str, library: &Path) -> anyhow::Result<()> {
    let script = "import ctypes, sys; ctypes.CDLL(sys.argv[1])";
    let output =
        Command::new(python).args(["-c", script]).arg(library).output().context("cannot start python3")?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let last = said.lines().last().unwrap_or("no message");
        bail!("{} cannot be opened on this machine: {last}", library.display());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_package_is_pinned() {
        let of_pythons = [packages_to_import(), packages_of_tensorboard()].concat();
        for package in packages(Kind::Cuda).iter().chain(&of_pythons) {
            assert_eq!(package.matches("==").count(), 1, "{package}");
        }
        assert_eq!([Kind::Cpu, Kind::Cuda].map(|kind| packages(kind).len()), [4, 17]);
    }
}
