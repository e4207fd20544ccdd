//! What the commands know of the repository: where it is, its crates, its source files.
//!
//! In: `cargo metadata` and the file tree. Out: plain data, so that the checks are pure functions over it.

use anyhow::{Context, bail};
use serde_json::Value;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The workspace as cargo describes it.
#[derive(Debug)]
pub(crate) struct Workspace {
    pub(crate) root: PathBuf,
    pub(crate) target_dir: PathBuf,
    pub(crate) packages: Vec<Package>,
}

/// One crate of ours.
#[derive(Debug, Clone, Default)]
pub(crate) struct Package {
    pub(crate) name: String,
    /// Whether it is meant for a registry.
    pub(crate) is_published: bool,
    /// Root files of the library and the binaries (`src/lib.rs`, `src/main.rs`), relative to the repository.
    pub(crate) roots: Vec<PathBuf>,
    pub(crate) binaries: Vec<String>,
    pub(crate) dependencies: Vec<Dependency>,
}

/// An entry of a crate's manifest.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Dependency {
    pub(crate) name: String,
    /// Only the crate's own tests and examples use it.
    pub(crate) dev: bool,
}

/// A Rust file of the repository.
#[derive(Debug)]
pub(crate) struct Source {
    /// Relative to the repository, with `/`.
    pub(crate) path: String,
    pub(crate) text: String,
}

/// The folder of the workspace manifest. `cargo run` tells where this crate is; asking the compiler instead would
/// name another clone when the two share a target folder.
pub(crate) fn root() -> PathBuf {
    let given = std::env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from);
    let crate_dir =
        given.filter(|dir| dir.ends_with("crates/xtask")).unwrap_or_else(|| PathBuf::from(BUILT_IN));
    crate_dir.ancestors().nth(2).unwrap_or(&crate_dir).to_path_buf()
}

/// For a program that was not started by cargo.
const BUILT_IN: &str = env!("CARGO_MANIFEST_DIR");

/// The cargo that runs us, started in the repository.
pub(crate) fn cargo() -> Command {
    let program = std::env::var_os("CARGO").unwrap_or_else(|| OsString::from("cargo"));
    let mut command = Command::new(program);
    command.current_dir(root());
    command
}

impl Workspace {
    /// Ask cargo about the repository.
    pub(crate) fn load() -> anyhow::Result<Self> {
        Self::of_manifest(&root().join("Cargo.toml"))
    }

    /// Ask cargo about another manifest of the repository.
    pub(crate) fn of_manifest(manifest: &Path) -> anyhow::Result<Self> {
        let output = cargo()
            .args(["metadata", "--no-deps", "--format-version", "1", "--manifest-path"])
            .arg(manifest)
            .output()
            .context("cannot start cargo metadata")?;
        if !output.status.success() {
            bail!("cargo metadata failed: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        let metadata: Value = serde_json::from_slice(&output.stdout).context("cargo metadata: not JSON")?;
        Self::from_metadata(&root(), &metadata)
    }

    fn from_metadata(root: &Path, metadata: &Value) -> anyhow::Result<Self> {
        let target_dir = text(metadata, "target_directory")?.into();
        let packages = list(metadata, "packages").map(|p| Package::from_metadata(root, p));
        Ok(Self { root: root.to_path_buf(), target_dir, packages: packages.collect::<Result<_, _>>()? })
    }

    /// Where the steps keep their output.
    pub(crate) fn logs(&self) -> PathBuf {
        self.target_dir.join("xtask")
    }

    /// Every `.rs` file below `crates/`, `examples/` and `fuzz/`, in order of path.
    pub(crate) fn sources(&self) -> anyhow::Result<Vec<Source>> {
        let mut files = Vec::new();
        for folder in ["crates", "examples", "fuzz"] {
            rust_files(&self.root.join(folder), &mut files)?;
        }
        files.sort();
        files.iter().map(|file| Source::read(&self.root, file)).collect()
    }
}

impl Package {
    fn from_metadata(root: &Path, package: &Value) -> anyhow::Result<Self> {
        let (mut roots, mut binaries) = (Vec::new(), Vec::new());
        for target in list(package, "targets") {
            let kind = list(target, "kind").next().and_then(Value::as_str).unwrap_or_default();
            if matches!(kind, "lib" | "bin" | "proc-macro") {
                let path = PathBuf::from(text(target, "src_path")?);
                roots.push(path.strip_prefix(root).unwrap_or(&path).to_path_buf());
            }
            if kind == "bin" {
                binaries.push(text(target, "name")?.to_owned());
            }
        }
        let dependencies = list(package, "dependencies").map(|dependency| {
            let dev = dependency["kind"].as_str() == Some("dev");
            Ok(Dependency { name: text(dependency, "name")?.to_owned(), dev })
        });
        Ok(Self {
            name: text(package, "name")?.to_owned(),
            // `publish = false` is an empty list of registries.
            is_published: package["publish"].as_array().is_none_or(|registries| !registries.is_empty()),
            roots,
            binaries,
            dependencies: dependencies.collect::<anyhow::Result<_>>()?,
        })
    }
}

impl Source {
    fn read(root: &Path, file: &Path) -> anyhow::Result<Self> {
        let text = fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
        let path = file.strip_prefix(root).unwrap_or(file).to_string_lossy().replace('\\', "/");
        Ok(Self { path, text })
    }
}

fn rust_files(folder: &Path, found: &mut Vec<PathBuf>) -> anyhow::Result<()> {
    if !folder.is_dir() {
        return Ok(());
    }
    for entry in fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))? {
        let entry = entry?;
        let path = entry.path();
        let is_build_output = entry.file_name() == "target";
        if entry.file_type()?.is_dir() && !is_build_output {
            rust_files(&path, found)?;
        } else if path.extension().is_some_and(|ext| ext == "rs") {
            found.push(path);
        }
    }
    Ok(())
}

fn text<'a>(value: &'a Value, field: &str) -> anyhow::Result<&'a str> {
    value[field].as_str().with_context(|| format!("cargo metadata: no text in `{field}`"))
}

fn list<'a>(value: &'a Value, field: &str) -> impl Iterator<Item = &'a Value> {
    value[field].as_array().into_iter().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn metadata_becomes_packages() {
        let metadata = json!({
            "target_directory": "/repo/target",
            "packages": [{
                "name": "drumline-comm",
                "targets": [
                    {"kind": ["lib"], "src_path": "/repo/crates/drumline-comm/src/lib.rs"},
                    {"kind": ["test"], "src_path": "/repo/crates/drumline-comm/tests/it.rs"},
                ],
                "dependencies": [{"name": "half", "kind": null}, {"name": "rank-test", "kind": "dev"}],
                "publish": null,
            }, {
                "name": "xtask",
                "publish": [],
            }],
        });
        let workspace = Workspace::from_metadata(Path::new("/repo"), &metadata).unwrap();
        let [comm, xtask] = &workspace.packages[..] else { panic!("{workspace:?}") };
        assert!(comm.is_published && !xtask.is_published);
        assert_eq!(comm.roots, [Path::new("crates/drumline-comm/src/lib.rs")]);
        assert_eq!(comm.dependencies.iter().map(|d| d.dev).collect::<Vec<_>>(), [false, true]);
    }

    #[test]
    fn this_file_is_among_the_sources() {
        let workspace = Workspace { root: root(), target_dir: PathBuf::new(), packages: Vec::new() };
        let sources = workspace.sources().unwrap();
        assert!(sources.iter().any(|s| s.path == "crates/xtask/src/workspace.rs"));
    }
}
