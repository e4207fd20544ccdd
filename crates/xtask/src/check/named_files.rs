//! Pages that name files of the repository: each of these must exist.
//!
//! In: the text of a page or of a source file, and what there is. Out: the names without a file, or without such a part.
//!
//! | named by | for example |
//! |---|---|
//! | a link of a page | `[x](../a.md#part)`, `[x]: a.md` |
//! | backticks on a page, with a folder of ours | `crates/xtask/src/main.rs` |
//! | backticks on a page, the end of the path of a Rust file | `select.rs`, `tcp/pipe.rs` |
//! | anything on a page, a configuration | `--cfg config/nmt.yaml` |
//! | a comment or a string of a source file, a page | `docs/faults.md` |
//!
//! Apart from configurations, what stands between ``` is an example.

use std::path::{Component, Path, PathBuf};

/// Folders whose files are named in backticks. Others hold what is built or downloaded, too.
const FOLDERS: [&str; 7] = ["crates/", "docs/", "config/", "examples/", "bench/", "fuzz/", ".vscode/"];
/// Folders below these that hold what is built or downloaded.
const BUILT: [&str; 3] = ["bench/.peers", "fuzz/target", "fuzz/artifacts"];

/// The names on a page that lead nowhere. `sources`: the paths of the Rust files. `read`: the text of a file, empty for a folder; nothing if
/// it is not there.
pub(crate) fn problems(
    page: &str,
    text: &str,
    sources: &[&str],
    read: impl Fn(&Path) -> Option<String>,
) -> Vec<String> {
    let folder = Path::new(page).parent().unwrap_or(Path::new(""));
    let prose = without_examples(text);
    let mut problems = Vec::new();
    for link in links(&prose) {
        let (file, part) = link.split_once('#').unwrap_or((link, ""));
        let target = if file.is_empty() { PathBuf::from(page) } else { plain(&folder.join(file)) };
        match read(&target) {
            None => problems.push(format!("{page} links to {link}, which is not there")),
            Some(text) if !part.is_empty() && !anchors(&text).any(|anchor| anchor == part) => {
                problems.push(format!("{page} links to {link}, but no heading there is so called"));
            }
            Some(_) => {}
        }
    }
    let quoted = || prose.lines().flat_map(|line| line.split('`').skip(1).step_by(2));
    let configurations = paths(text).filter(|name| name.starts_with("config/") && name.ends_with(".yaml"));
    let named = quoted().filter(|name| is_ours(name)).chain(configurations);
    let is_source = |name: &str| sources.iter().any(|path| Path::new(path).ends_with(name));
    let missing = named.filter(|name| read(Path::new(name)).is_none());
    let missing = missing.chain(quoted().filter(|name| is_end_of_source(name) && !is_source(name)));
    let mut missing: Vec<_> =
        missing.map(|name| format!("{page} names {name}, which is not there")).collect();
    missing.sort();
    missing.dedup();
    problems.extend(missing);
    problems
}

/// The pages that a source file names and that are not there, or have no such part.
pub(crate) fn problems_of_source(
    path: &str,
    prose: &str,
    read: impl Fn(&Path) -> Option<String>,
) -> Vec<String> {
    let pages = paths(prose).filter(|name| name.starts_with("docs/") && name.ends_with(".md"));
    let missing = pages.filter(|name| read(Path::new(name)).is_none());
    missing.map(|name| format!("{path} names {name}, which is not there")).collect()
}

/// Everything that could be a path, without the punctuation of a sentence.
fn paths(text: &str) -> impl Iterator<Item = &str> {
    let names = text.split(|c: char| !c.is_ascii_alphanumeric() && !"_-./".contains(c));
    names.map(|name| name.trim_end_matches('.')).filter(|name| name.contains('/'))
}

/// Whether a name is that of a Rust file, or the end of its path.
fn is_end_of_source(name: &str) -> bool {
    let is_path = |c: char| c.is_ascii_alphanumeric() || "_-/".contains(c);
    name.strip_suffix(".rs").is_some_and(|stem| !stem.is_empty() && stem.chars().all(is_path))
        && !is_ours(name)
}

pub(crate) fn without_examples(text: &str) -> String {
    let mut is_example = false;
    let lines = text.lines().filter(|line| {
        let is_fence = line.trim_start().starts_with("```");
        is_example ^= is_fence;
        !is_example && !is_fence
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// Where links within the repository lead.
pub(crate) fn links(prose: &str) -> impl Iterator<Item = &str> {
    let inline = prose.split("](").skip(1).filter_map(|rest| rest.split([')', ' ', '\n']).next());
    let defined =
        prose.lines().filter(|line| line.starts_with('[')).filter_map(|line| line.split_once("]: "));
    let all = inline.chain(defined.map(|(_, target)| target.trim()));
    all.filter(|link| !link.is_empty() && !link.contains("://") && !link.starts_with("mailto:"))
}

/// Whether a name is that of a file of the repository: no pattern, and no NAME to be filled in.
fn is_ours(name: &str) -> bool {
    let is_path = |c: char| c.is_ascii_alphanumeric() || "_-./".contains(c);
    let is_to_fill_in = |part: &str| part.chars().all(|c| c.is_ascii_uppercase());
    FOLDERS.iter().any(|folder| name.starts_with(folder))
        && !BUILT.iter().any(|built| name.starts_with(built))
        && name.chars().all(is_path)
        && !name.split('/').any(|part| !part.is_empty() && is_to_fill_in(part))
}

/// The names of a page's headings, as links have them.
fn anchors(text: &str) -> impl Iterator<Item = String> {
    let headings = text.lines().filter(|line| line.starts_with('#'));
    headings.map(|line| {
        let kept = |c: &char| c.is_alphanumeric() || "-_ ".contains(*c);
        let title = line.trim_start_matches('#').trim().to_lowercase();
        title.chars().filter(kept).map(|c| if c == ' ' { '-' } else { c }).collect()
    })
}

/// Without `..`.
pub(crate) fn plain(path: &Path) -> PathBuf {
    path.components().fold(PathBuf::new(), |mut plain, part| {
        match part {
            Component::ParentDir => drop(plain.pop()),
            Component::CurDir => {}
            part => plain.push(part),
        }
        plain
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> Vec<String> {
        let there = |path: &Path| match path.to_str().unwrap() {
            "docs/a.md" => Some("# A title: `x`\n".to_owned()),
            "README.md" | "crates/x/src/lib.rs" | "docs" | "config/a.yaml" => Some(String::new()),
            _ => None,
        };
        problems("docs/page.md", text, &["crates/x/src/tcp/pipe.rs"], |path| {
            if path == Path::new("docs/page.md") { Some("## Here".into()) } else { there(path) }
        })
    }

    #[test]
    fn what_is_there_is_no_problem() {
        let text = "[a](a.md), [a](./a.md#a-title-x), [up](../README.md), [here](#here), [web](https://x.y/z)\n\
            [r]: ../crates/x/src/lib.rs\n`crates/x/src/lib.rs`, `docs/NAME.md.txt/NAME`, `crates/*/src`, `ranks/`\n\
            `tcp/pipe.rs`, `pipe.rs`, `bench/.peers/x`\n\
            ```text\n[x](none.md) `crates/none.rs` --cfg config/a.yaml\n```\n";
        assert_eq!(found(text), Vec::<String>::new());
    }

    #[test]
    fn what_is_not_there_is_named() {
        let text = "[b](b.md) and `crates/x/src/none.rs`\n[r]: ../none\n[a](a.md#other) [h](#there) `ring.rs`\n```\n--cfg config/b.yaml\n```\n";
        let expected = [
            "docs/page.md links to b.md, which is not there",
            "docs/page.md links to a.md#other, but no heading there is so called",
            "docs/page.md links to #there, but no heading there is so called",
            "docs/page.md links to ../none, which is not there",
            "docs/page.md names config/b.yaml, which is not there",
            "docs/page.md names crates/x/src/none.rs, which is not there",
            "docs/page.md names ring.rs, which is not there",
        ];
        assert_eq!(found(text), expected);
    }

    #[test]
    fn a_source_file_names_pages_that_are_there() {
        let there = |path: &Path| (path == Path::new("docs/a.md")).then(String::new);
        let found = problems_of_source("a.rs", "// More: docs/a.md, and `docs/b.md`. See docs/NAME", there);
        assert_eq!(found, ["a.rs names docs/b.md, which is not there"]);
    }
}
