//! `cargo xtask book`: the Markdown pages of the repository as one site.
//!
//! ```text
//!   docs/SUMMARY.md ─▶ pages, and the files they link to ─▶ TARGET/book/src ─mdBook─▶ TARGET/book/html ─▶ every link checked
//! ```
//! The pages stay where GitHub shows them, so `src` has the layout of the repository. Nothing is fetched, except mdBook itself, once per user.

mod gather;
mod links;
mod mdbook;

use crate::step::Outcome;
use crate::summary;
use crate::workspace::Workspace;
use anyhow::{Context, bail};
use std::fs;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

/// Build the book in `target/book/html` and check its links; the first time this also builds mdBook (about a minute)
#[derive(clap::Args)]
pub(crate) struct BookArgs {
    /// Show it in the browser
    #[arg(long)]
    open: bool,
}

/// Build and check the book, and show it if asked.
pub(crate) fn run(workspace: &Workspace, args: &BookArgs) -> anyhow::Result<ExitCode> {
    let outcome = step(workspace);
    let is_built = outcome.failure.is_none();
    let code = summary::conclude(&[outcome]);
    if is_built && args.open {
        let page = folder(workspace).join("html/index.html");
        let status = Command::new("xdg-open").arg(&page).status();
        status.with_context(|| format!("cannot start xdg-open; try opening {}", page.display()))?;
    }
    Ok(code)
}

/// The book as a step of `cargo xtask test`: its problems are links that lead nowhere.
pub(crate) fn step(workspace: &Workspace) -> Outcome {
    Outcome::of("book", || build(workspace))
}

fn build(workspace: &Workspace) -> anyhow::Result<Vec<String>> {
    let book = folder(workspace);
    if book.exists() {
        fs::remove_dir_all(&book).with_context(|| format!("cannot remove {}", book.display()))?;
    }
    gather::pages(&workspace.root, &book.join("src"))?;
    let config = "book.toml";
    fs::copy(workspace.root.join("docs").join(config), book.join(config))
        .with_context(|| format!("cannot copy docs/{config}"))?;
    let output = Command::new(mdbook::program()?).arg("build").arg(&book).output();
    let output = output.context("cannot start mdbook")?;
    if !output.status.success() {
        bail!("mdbook: {}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    let (pages, problems) = links::check(&book.join("html"))?;
    println!("{pages} pages in {}", book.join("html").display());
    Ok(problems)
}

fn folder(workspace: &Workspace) -> PathBuf {
    workspace.target_dir.join("book")
}
