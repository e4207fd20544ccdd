//! `cargo xtask python`: a Python with the real PyTorch, or the real TensorBoard, for the tests and benchmarks beside them.
//!
//! ```text
//!   venv + pip ──▶ CACHE/python-torch-2.11.0.part/site ──import tried, renamed──▶ CACHE/python-torch-2.11.0
//! ```
//! CACHE is that of `cargo xtask libtorch`, and an interrupted run is continued in the same way. A user's
//! `PEER_PYTHON` or `TENSORBOARD_PYTHON` wins; tests find a Python through the same variable.

use crate::libtorch::{VERSION, cache, pip};
use anyhow::{Context, bail};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A module that tests stand beside, in an environment of its own: the one is of some GB, the other small.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Module {
    /// PyTorch, with gloo
    Torch,
    /// TensorBoard
    Tensorboard,
}

impl Module {
    pub(crate) const ALL: [Self; 2] = [Self::Torch, Self::Tensorboard];

    fn name(self) -> &'static str {
        match self {
            Self::Torch => "torch",
            Self::Tensorboard => "tensorboard",
        }
    }

    fn version(self) -> &'static str {
        match self {
            Self::Torch => VERSION,
            Self::Tensorboard => pip::TENSORBOARD,
        }
    }

    /// Names the Python that has it.
    pub(crate) fn variable(self) -> &'static str {
        match self {
            Self::Torch => "PEER_PYTHON",
            Self::Tensorboard => "TENSORBOARD_PYTHON",
        }
    }

    /// What has to work: the modules, their version, and of torch the backend that needs no GPU.
    fn probe(self) -> &'static str {
        match self {
            Self::Torch => {
                "import sys, numpy, safetensors, torch, torch.distributed as d, torch.distributed.checkpoint; \
                 print(torch.__version__); sys.exit(not d.is_gloo_available())"
            }
            Self::Tensorboard => "import tensorboard, tensorboard.program; print(tensorboard.__version__)",
        }
    }

    fn packages(self) -> Vec<String> {
        match self {
            Self::Torch => pip::packages_to_import(),
            Self::Tensorboard => pip::packages_of_tensorboard(),
        }
    }

    /// Bytes to fetch, for people.
    fn size(self) -> &'static str {
        match self {
            Self::Torch => "1.8 GB",
            Self::Tensorboard => "50 MB",
        }
    }

    /// Free bytes needed while packages and unpacked files lie side by side.
    fn room(self) -> u64 {
        match self {
            Self::Torch => 7_000_000_000,
            Self::Tensorboard => 300_000_000,
        }
    }
}

/// The Python with torch.
pub(crate) fn with_torch() -> anyhow::Result<PathBuf> {
    with(Module::Torch)
}

/// The Python with a module: the user's own, or the one in the cache, which is made if it is not there.
pub(crate) fn with(module: Module) -> anyhow::Result<PathBuf> {
    let variable = module.variable();
    if let Some(named) = std::env::var_os(variable).filter(|value| !value.is_empty()) {
        let named = PathBuf::from(named);
        return match problem(&named, module) {
            None => Ok(named),
            Some(problem) => bail!("{variable}={} will not do: {problem}; try unsetting it", named.display()),
        };
    }
    let (cache, name) = (cache::folder()?, format!("python-{}-{}", module.name(), module.version()));
    let lock = cache::lock(&cache, &name)?;
    let ready = cache.join(&name);
    if problem(&python_of(&ready), module).is_some() {
        make(module, &cache, &name, &lock)?;
    }
    Ok(python_of(&ready))
}

fn make(module: Module, cache: &Path, name: &str, lock: &File) -> anyhow::Result<()> {
    let python = pip::find_python()?;
    cache::check_room(cache, module.room())?;
    let (ready, part) = (cache.join(name), cache.join(format!("{name}.part")));
    let venv = cache::prepare_part(&part)?;
    let packages = module.packages();
    let (version, size) = (module.version(), module.size());
    eprintln!(
        "making a Python with {} {version}, once: {} packages, about {size} to fetch",
        module.name(),
        packages.len()
    );
    eprintln!("into {}", ready.display());
    let target = make_venv(python, &venv)?;
    pip::Install { python, packages, part: &part, target, lock }.run()?;
    if let Some(problem) = problem(&python_of(&venv), module) {
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
fn problem(python: &Path, module: Module) -> Option<String> {
    let (name, expected) = (module.name(), module.version());
    let output = match Command::new(python).args(["-W", "ignore", "-c", module.probe()]).output() {
        Err(error) => return Some(format!("it cannot be started: {error}")),
        Ok(output) => output,
    };
    let version = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        return Some(format!("{name} cannot be used: {}", said.lines().last().unwrap_or("it has no gloo")));
    }
    let pinned = version.split('+').next() == Some(expected);
    (!pinned).then(|| format!("it has {name} {version}, expected {expected}"))
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
    fn a_python_is_taken_for_its_module_only() {
        for (name, script, expected) in [
            ("right", "echo 2.11.0+cu130", None),
            ("old", "echo 2.10.0", Some("it has torch 2.10.0, expected 2.11.0")),
            ("none", "echo No module >&2; exit 1", Some("torch cannot be used: No module")),
        ] {
            let path = pretender(name, script);
            assert_eq!(problem(&path, Module::Torch).as_deref(), expected);
            assert!(problem(&path, Module::Tensorboard).unwrap().contains("tensorboard"));
            fs::remove_file(path).unwrap();
        }
        assert!(problem(Path::new("/nonexistent"), Module::Torch).unwrap().contains("cannot be started"));
    }
}
