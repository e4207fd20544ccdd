//! The sources of the book: the chapters of `docs/SUMMARY.md`, the files that they link to, and a summary for mdBook.
//!
//! mdBook turns a link to a page into a link to its HTML only if the page is a chapter. So a page that a chapter links to and the
//! summary lacks, such as dated results, becomes a chapter of the last part. Other files, such as pictures and sources, are copied.

use crate::check::named_files::{links, plain, without_examples};
use anyhow::{Context, bail};
use std::collections::BTreeSet;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

/// Part of the summary for pages that it does not list.
const LINKED: &str = "Linked pages";

/// Write the sources of the book below `src`, in the layout of the repository.
pub(super) fn pages(root: &Path, src: &Path) -> anyhow::Result<()> {
    let summary = read(root, Path::new("docs/SUMMARY.md"))?;
    let chapters: BTreeSet<_> = links(&summary).map(|link| plain(&Path::new("docs").join(link))).collect();
    let found = follow(root, &chapters)?;
    for file in &found.files {
        copy(root, src, file)?;
    }
    let added = found.pages.difference(&chapters);
    let added: Vec<_> =
        added.map(|page| Ok((page, title(&read(root, page)?)))).collect::<anyhow::Result<_>>()?;
    let path = src.join("SUMMARY.md");
    fs::write(&path, full_summary(&summary, &added))
        .with_context(|| format!("cannot write {}", path.display()))
}

/// What the chapters lead to.
#[derive(Default)]
struct Found {
    pages: BTreeSet<PathBuf>,
    /// All files to copy, pages among them.
    files: BTreeSet<PathBuf>,
}

/// The chapters, and what is linked from them, from page to page.
fn follow(root: &Path, chapters: &BTreeSet<PathBuf>) -> anyhow::Result<Found> {
    let mut found = Found::default();
    let mut waiting: Vec<_> = chapters.iter().cloned().collect();
    while let Some(page) = waiting.pop() {
        if !found.pages.insert(page.clone()) {
            continue;
        }
        let folder = page.parent().unwrap_or(Path::new(""));
        for link in links(&without_examples(&read(root, &page)?)) {
            let file = link.split('#').next().unwrap_or_default();
            let target = plain(&folder.join(file));
            if file.is_empty() || target == Path::new("docs/SUMMARY.md") {
                continue;
            }
            if root.join(&target).is_dir() {
                bail!("{} links to the folder {file}; try a page in it", page.display());
            }
            if target.extension().is_some_and(|end| end == "md") {
                waiting.push(target);
            } else {
                found.files.insert(target);
            }
        }
        found.files.insert(page);
    }
    Ok(found)
}

/// The summary with paths from the root of the repository, and the added pages in a part of their own.
fn full_summary(summary: &str, added: &[(&PathBuf, String)]) -> String {
    let mut full = String::new();
    for line in summary.lines() {
        match line.split_once("](").and_then(|(title, rest)| Some((title, rest.strip_suffix(')')?))) {
            Some((title, link)) => {
                let page = plain(&Path::new("docs").join(link));
                let _ = writeln!(full, "{title}]({})", page.display());
            }
            None => full.push_str(&format!("{line}\n")),
        }
    }
    if !added.is_empty() {
        let _ = writeln!(full, "\n# {LINKED}\n");
    }
    for (page, title) in added {
        let _ = writeln!(full, "- [{title}]({})", page.display());
    }
    full
}

/// The first heading of a page, without characters that mean something in a link.
fn title(text: &str) -> String {
    let heading = text.lines().find_map(|line| line.strip_prefix("# ")).unwrap_or("Untitled");
    heading.chars().filter(|c| !"[]`".contains(*c)).collect()
}

fn read(root: &Path, page: &Path) -> anyhow::Result<String> {
    fs::read_to_string(root.join(page)).with_context(|| format!("cannot read {}", page.display()))
}

fn copy(root: &Path, src: &Path, file: &Path) -> anyhow::Result<()> {
    let target = src.join(file);
    let folder = target.parent().unwrap_or(src);
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    // What links to the list of chapters leads to the page that introduces them.
    if file.extension().is_some_and(|end| end == "md") {
        let text = read(root, file)?.replace("(SUMMARY.md)", "(README.md)");
        return fs::write(&target, text).with_context(|| format!("cannot write {}", target.display()));
    }
    fs::copy(root.join(file), &target).map(drop).with_context(|| format!("cannot copy {}", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn repository(files: &[(&str, &str)]) -> PathBuf {
        let root = std::env::temp_dir().join(format!("xtask-book-{}-{}", std::process::id(), files.len()));
        for (path, text) in files {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    #[test]
    fn linked_pages_become_chapters_and_other_files_are_copied() {
        let root = repository(&[
            ("docs/SUMMARY.md", "# Summary\n\n[Front](../README.md)\n\n- [One](one.md)\n"),
            ("README.md", "# Front\n\n[one](docs/one.md) [licence](LICENSE)\n"),
            (
                "docs/one.md",
                "# One\n\n[r](../results/r.md#part) [list](SUMMARY.md) [web](https://x.y)\n```\n[no](none.md)\n```\n",
            ),
            ("results/r.md", "# Results of `a`\n\n![p](p.svg)\n"),
            ("results/p.svg", "<svg/>"),
            ("LICENSE", "MIT"),
            ("docs/other.md", "nobody links here"),
        ]);
        let src = root.join("out");
        pages(&root, &src).unwrap();
        let summary = fs::read_to_string(src.join("SUMMARY.md")).unwrap();
        let expected = "# Summary\n\n[Front](README.md)\n\n- [One](docs/one.md)\n\n# Linked pages\n\n- [Results of a](results/r.md)\n";
        assert_eq!(summary, expected);
        assert!(fs::read_to_string(src.join("docs/one.md")).unwrap().contains("[list](README.md)"));
        for copied in ["README.md", "results/r.md", "results/p.svg", "LICENSE"] {
            assert!(src.join(copied).exists(), "{copied}");
        }
        assert!(!src.join("docs/other.md").exists());
        fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn a_chapter_that_is_not_there_is_an_error() {
        let root = repository(&[("docs/SUMMARY.md", "- [One](one.md)\n")]);
        let error = pages(&root, &root.join("out")).unwrap_err();
        assert_eq!(error.to_string(), "cannot read docs/one.md");
        fs::remove_dir_all(&root).unwrap();
    }
}
