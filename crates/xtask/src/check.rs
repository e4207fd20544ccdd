//! `cargo xtask check`: what can be said of the code without running it.

mod arrows;
mod headers;
mod lexer;
mod named_files;
mod named_tests;
mod unsafe_code;

use crate::step::{Outcome, Step, everything};
use crate::summary;
use crate::workspace::{Workspace, cargo};
use anyhow::Context;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// Run the steps and print their summary.
pub(crate) fn run(workspace: &Workspace) -> ExitCode {
    summary::conclude(&steps(workspace))
}

/// The steps, in order; a failed one does not stop the next.
pub(crate) fn steps(workspace: &Workspace) -> Vec<Outcome> {
    vec![
        format(workspace),
        Outcome::of("arrows", || Ok(arrows::problems(&workspace.packages))),
        Outcome::of("unsafe", || Ok(unsafe_code::problems(&workspace.packages, &workspace.sources()?))),
        Outcome::of("headers", || Ok(headers::problems(&workspace.sources()?))),
        Outcome::of("named tests", || named_tests(workspace)),
        Outcome::of("named files", || named_files(workspace)),
        clippy(workspace),
    ]
}

/// The pages that name tests.
const NAMING_TESTS: [&str; 9] = [
    "docs/torchrun-compat.md",
    "docs/launching.md",
    "docs/checkpoints.md",
    "docs/data-parallel.md",
    "docs/ddp-cases.md",
    "docs/trainer.md",
    "docs/coming-from.md",
    "docs/concepts.md",
    "docs/observing.md",
];

fn named_tests(workspace: &Workspace) -> anyhow::Result<Vec<String>> {
    let (sources, mut problems) = (workspace.sources()?, Vec::new());
    for page in NAMING_TESTS {
        let text = std::fs::read_to_string(workspace.root.join(page))
            .with_context(|| format!("cannot read {page}"))?;
        problems.extend(named_tests::problems(page, &text, &sources));
    }
    Ok(problems)
}

/// In all pages at the top and below `docs/`.
fn named_files(workspace: &Workspace) -> anyhow::Result<Vec<String>> {
    let (root, mut folders, mut problems) = (&workspace.root, vec![workspace.root.join("docs")], Vec::new());
    let mut pages = pages_in(root, |_| ())?;
    while let Some(folder) = folders.pop() {
        pages.extend(pages_in(&folder, |inner| folders.push(inner))?);
    }
    for path in pages {
        let text =
            std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let page = path.strip_prefix(root)?.to_string_lossy().into_owned();
        let read = |path: &Path| {
            let path = root.join(path);
            path.exists().then(|| std::fs::read_to_string(&path).unwrap_or_default())
        };
        problems.extend(named_files::problems(&page, &text, read));
    }
    Ok(problems)
}

/// The pages of a folder; what it has of folders is handed on.
fn pages_in(folder: &Path, mut inner: impl FnMut(PathBuf)) -> anyhow::Result<Vec<PathBuf>> {
    let mut pages = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        match path.extension() {
            _ if path.is_dir() => inner(path),
            Some(end) if end == "md" => pages.push(path),
            _ => {}
        }
    }
    pages.sort();
    Ok(pages)
}

fn format(workspace: &Workspace) -> Outcome {
    let mut command = cargo();
    command.args(["fmt", "--all", "--check"]);
    let deadline = Duration::from_secs(120);
    Step { name: "fmt", command, deadline, logs: &workspace.logs(), shown: everything() }.run()
}

fn clippy(workspace: &Workspace) -> Outcome {
    let mut command = cargo();
    command.args(["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]);
    let deadline = Duration::from_secs(15 * 60);
    Step { name: "clippy", command, deadline, logs: &workspace.logs(), shown: everything() }.run()
}

/// Whether the code (not its comments or strings) below a folder uses a word.
pub(crate) fn mentions(workspace: &Workspace, folder: &str, word: &str) -> bool {
    let sources = workspace.sources().unwrap_or_default();
    let mut below = sources.iter().filter(|source| source.path.starts_with(folder));
    below.any(|source| lexer::words(&lexer::code_only(&source.text)).any(|(_, found)| found == word))
}
