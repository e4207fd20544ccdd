//! `cargo xtask python`: a Python with the real PyTorch, for the tests and benchmarks that stand beside it.
//!
//! ```text
//!   venv + pip ──▶ CACHE/python-torch-2.11.0.part/site ──import tried, renamed──▶ CACHE/python-torch-2.11.0
//! ```
//! CACHE is that of `cargo xtask libtorch`, and an interrupted run is continued in the same way. A user's
//! `PEER_PYTHON` wins; tests are told of the Python through the same variable.

use crate::libtorch::{VERSION, cache, pip};
use anyhow::{Context, bail};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Names the Python that has torch.
pub(crate) const VARIABLE: &str = "PEER_PYTHON";

/// Free bytes needed while packages and unpacked files lie side by side.
const ROOM: u64 = 7_000_000_000;

/// What has to work: the modules, the version of torch, and the backend that needs no GPU.
const PROBE: &str = "import sys, numpy, safetensors, torch, torch.distributed as d; print(torch.__version__); \
                     sys.exit(not d.is_gloo_available())";

/// The Python with torch: the user's own, or the one in the cache, which is made if it is not there.
pub(crate) fn with_torch() -> anyhow::Result<PathBuf> {
    if let Some(named) = std::env::var_os(VARIABLE).filter(|value| !value.is_empty()) {
        let named = PathBuf::from(named);
        return match problem(&named) {
            None => Ok(named),
            Some(problem) => bail!("{VARIABLE}={} will not do: {problem}; try unsetting it", named.display()),
        };
    }
    let (cache, name) = (cache::folder()?, format!("python-torch-{VERSION}"));
    let lock = cache::lock(&cache, &name)?;
    let ready = cache.join(&name);
    if problem(&python_of(&ready)).is_some() {
        make(&cache, &name, &lock)?;
    }
    Ok(python_of(&ready))
}

fn make(cache: &Path, name: &str, lock: &File) -> anyhow::Result<()> {
    let python = pip::find_python()?;
    cache::check_room(cache, ROOM)?;
    let (ready, part) = (cache.join(name), cache.join(format!("{name}.part")));
    let venv = cache::prepare_part(&part)?;
    let packages = pip::packages_to_import();
    eprintln!(
        "making a Python with torch {VERSION}, once: {} packages, about 1.8 GB to fetch",
        packages.len()
    );
    eprintln!("into {}", ready.display());
    let target = make_venv(python, &venv)?;
    pip::Install { python, packages, part: &part, target, lock }.run()?;
    if let Some(problem) = problem(&python_of(&venv)) {
        bail!("pip ended well, but {problem}; try again after deleting {}", part.display());
    }
    cache::keep(&venv, &ready, &part)
}

/// An environment without pip, which is all that Debian's Python can make by itself. Answers where its packages go.
fn make_venv(python: &str, folder: &Path) -> anyhow::Result<PathBuf> {
    let made = Command::new(python).args(["-m", "venv", "--without-pip"]).arg(folder).output();
    let made = made.with_context(|| format!("cannot start {python}"))?;
    if !made.status.success() {
        bail!("cannot make a Python environment: {}", String::from_utf8_lossy(&made.stderr).trim());
    }
    let script = "import sysconfig; print(sysconfig.get_path('purelib'))";
    let asked = Command::new(python_of(folder)).args(["-c", script]).output();
    let asked = asked.context("cannot start the new environment's Python")?;
    let place = String::from_utf8_lossy(&asked.stdout).trim().to_owned();
    if place.is_empty() {
        bail!("the new environment in {} does not say where its packages go", folder.display());
    }
    Ok(PathBuf::from(place))
}

fn python_of(folder: &Path) -> PathBuf {
    folder.join("bin/python")
}

/// What keeps a Python from being used, if anything.
fn problem(python: &Path) -> Option<String> {
    let output = match Command::new(python).args(["-W", "ignore", "-c", PROBE]).output() {
        Err(error) => return Some(format!("it cannot be started: {error}")),
        Ok(output) => output,
    };
    let version = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        return Some(format!("torch cannot be used: {}", said.lines().last().unwrap_or("it has no gloo")));
    }
    let pinned = version.split('+').next() == Some(VERSION);
    (!pinned).then(|| format!("it has torch {version}, expected {VERSION}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    /// A program that answers as a Python would.
    fn pretender(name: &str, script: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("xtask-python-{name}-{}", std::process::id()));
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    #[test]
    fn a_python_is_taken_for_its_torch_only() {
        for (name, script, expected) in [
            ("right", "echo 2.11.0+cu130", None),
            ("old", "echo 2.10.0", Some("it has torch 2.10.0, expected 2.11.0")),
            ("none", "echo No module >&2; exit 1", Some("torch cannot be used: No module")),
        ] {
            let path = pretender(name, script);
            assert_eq!(problem(&path).as_deref(), expected);
            fs::remove_file(path).unwrap();
        }
        assert!(problem(Path::new("/nonexistent")).unwrap().contains("cannot be started"));
    }
}
