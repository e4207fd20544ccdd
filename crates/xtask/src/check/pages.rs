//! The Markdown pages of the repository that people read: those at the top, below `docs/`, and the README files of other folders.
//!
//! Dated results are records, not pages: they keep the words of their day.

use anyhow::Context;
use std::fs;
use std::path::{Path, PathBuf};

/// Folders with pages, and the folders below them, except [`LEFT_OUT`]; at the top of the repository no folders below.
const FOLDERS: [&str; 6] = [TOP, "docs", "examples", "bench", "fuzz", "crates"];
const TOP: &str = "";
const LEFT_OUT: [&str; 4] = ["bench/results", "bench/.peers", "fuzz/target", "fuzz/corpus"];

/// A page.
pub(crate) struct Page {
    /// Relative to the repository, with `/`.
    pub(crate) path: String,
    pub(crate) text: String,
}

/// All pages, in order of path.
pub(crate) fn all(root: &Path) -> anyhow::Result<Vec<Page>> {
    let mut paths = Vec::new();
    for folder in FOLDERS {
        find(root, Path::new(folder), &mut paths)?;
    }
    paths.sort();
    let read = |path: PathBuf| {
        let text = fs::read_to_string(root.join(&path));
        let text = text.with_context(|| format!("cannot read {}", path.display()))?;
        Ok(Page { path: path.to_string_lossy().into_owned(), text })
    };
    paths.into_iter().map(read).collect()
}

/// Add the pages of a folder.
fn find(root: &Path, folder: &Path, paths: &mut Vec<PathBuf>) -> anyhow::Result<()> {
    let at_top = folder == Path::new(TOP);
    for entry in
        fs::read_dir(root.join(folder)).with_context(|| format!("cannot list {}", folder.display()))?
    {
        let path = folder.join(entry?.file_name());
        let is_folder = root.join(&path).is_dir();
        if is_folder && !at_top && !LEFT_OUT.iter().any(|left_out| path == Path::new(left_out)) {
            find(root, &path, paths)?;
        } else if !is_folder && path.extension().is_some_and(|end| end == "md") {
            paths.push(path);
        }
    }
    Ok(())
}
