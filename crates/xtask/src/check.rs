//! `cargo xtask check`: what can be said of the code without running it.

mod arrows;
mod headers;
mod lexer;
mod long_lines;
pub(crate) mod named_files;
mod named_keys;
mod named_tests;
mod pages;
mod phrases;
mod translations;
mod tuple_parameters;
mod unsafe_code;

use crate::step::{Outcome, Step, everything};
use crate::summary;
use crate::workspace::{Source, Workspace, cargo};
use anyhow::Context;
use phrases::Prose;
use std::path::Path;
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
        Outcome::of("tuple parameters", || Ok(tuple_parameters::problems(&workspace.sources()?))),
        Outcome::of("named tests", || named_tests(workspace)),
        Outcome::of("named files", || named_files(workspace)),
        Outcome::of("named keys", || {
            Ok(named_keys::problems(&pages::all(&workspace.root)?, &named_keys::known(&workspace.root)?))
        }),
        Outcome::of("phrases", || phrases(workspace)),
        Outcome::of("long lines", || Ok(long_lines::problems(&pages::all(&workspace.root)?))),
        Outcome::of("translations", || Ok(translations::problems(&pages::all(&workspace.root)?))),
        clippy(workspace),
        // After what has fetched the dependencies: it asks no registry.
        packages(workspace),
    ]
}

/// The pages that name tests.
const NAMING_TESTS: [&str; 11] = [
    "docs/torchrun-compat.md",
    "docs/launching.md",
    "docs/checkpoints.md",
    "docs/data-parallel.md",
    "docs/ddp-cases.md",
    "docs/fsdp-cases.md",
    "docs/model-parallel-cases.md",
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

/// In all pages, in the comments and strings of all sources, and in the configurations.
fn named_files(workspace: &Workspace) -> anyhow::Result<Vec<String>> {
    let (sources, mut problems) = (workspace.sources()?, Vec::new());
    let paths: Vec<_> = sources.iter().map(|source| source.path.as_str()).collect();
    let read = |path: &Path| {
        let path = workspace.root.join(path);
        path.exists().then(|| std::fs::read_to_string(&path).unwrap_or_default())
    };
    for page in pages::all(&workspace.root)? {
        problems.extend(named_files::problems(&page.path, &page.text, &paths, read));
    }
    // The tests of our own commands have names that lead nowhere.
    let others = prose_of_sources(&sources).filter(|prose| !prose.path.starts_with("crates/xtask/"));
    for prose in others.chain(configurations(workspace)?) {
        problems.extend(named_files::problems_of_source(&prose.path, &prose.text, read));
    }
    Ok(problems)
}

/// In all pages and configurations, and of all sources in comments, strings and the names of functions.
fn phrases(workspace: &Workspace) -> anyhow::Result<Vec<String>> {
    let (sources, pages) = (workspace.sources()?, pages::all(&workspace.root)?);
    let mut proses: Vec<_> = pages.iter().map(|page| Prose::of_page(&page.path, &page.text)).collect();
    proses.extend(prose_of_sources(&sources));
    proses.extend(sources.iter().map(|source| Prose::of_names(&source.path, &source.text)));
    proses.extend(configurations(workspace)?);
    Ok(phrases::problems(&proses))
}

fn prose_of_sources(sources: &[Source]) -> impl Iterator<Item = Prose> {
    sources.iter().map(|source| Prose::of_source(&source.path, &source.text))
}

/// The YAML files of `config/`.
fn configurations(workspace: &Workspace) -> anyhow::Result<Vec<Prose>> {
    let (folder, mut proses) = (workspace.root.join("config"), Vec::new());
    for entry in std::fs::read_dir(&folder).context("cannot list config/")? {
        let path = entry?.path();
        if path.extension().is_some_and(|end| end == "yaml") {
            let text =
                std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
            proses.push(Prose {
                path: path.strip_prefix(&workspace.root)?.to_string_lossy().into_owned(),
                text,
            });
        }
    }
    Ok(proses)
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

/// Puts the crates that are meant for a registry into archives, as `cargo publish` would, without building them again.
fn packages(workspace: &Workspace) -> Outcome {
    let mut command = cargo();
    command.args(["package", "--no-verify", "--allow-dirty", "--offline"]);
    for package in workspace.packages.iter().filter(|package| package.is_published) {
        command.args(["--package", &package.name]);
    }
    let deadline = Duration::from_secs(120);
    let mut outcome =
        Step { name: "packages", command, deadline, logs: &workspace.logs(), shown: everything() }.run();
    // Cargo only warns of a manifest without a description or a license.
    if outcome.failure.is_none() && outcome.output.contains("warning:") {
        outcome.failure = Some("warnings".to_owned());
    }
    outcome
}

/// Whether the code (not its comments or strings) below a folder uses a word.
pub(crate) fn mentions(workspace: &Workspace, folder: &str, word: &str) -> bool {
    let sources = workspace.sources().unwrap_or_default();
    let mut below = sources.iter().filter(|source| source.path.starts_with(folder));
    below.any(|source| lexer::words(&lexer::code_only(&source.text)).any(|(_, found)| found == word))
}
