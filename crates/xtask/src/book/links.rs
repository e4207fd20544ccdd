//! The links of the built book: each leads to a file of it, and to an element of that file if it names one.
//!
//! In: the folder of HTML. Out: the number of pages, and one line for each link that leads nowhere. Links to other sites are not followed.

use crate::check::named_files::plain;
use anyhow::Context;
use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};

/// mdBook's page for a web server's errors: its links begin at the root of the site.
const NOT_FOUND: &str = "404.html";

/// Number of pages, and the links that lead nowhere.
pub(super) fn check(html: &Path) -> anyhow::Result<(usize, Vec<String>)> {
    let mut files = Vec::new();
    list(html, Path::new(""), &mut files)?;
    let mut pages = BTreeMap::new();
    for file in files.iter().filter(|file| is_page(file)) {
        let text = fs::read_to_string(html.join(file));
        pages.insert(file.clone(), text.with_context(|| format!("cannot read {}", file.display()))?);
    }
    Ok((pages.len(), problems(&files.into_iter().collect(), &pages)))
}

fn is_page(file: &Path) -> bool {
    file.extension().is_some_and(|end| end == "html") && file != Path::new(NOT_FOUND)
}

/// All files below a folder, relative to it.
fn list(root: &Path, below: &Path, files: &mut Vec<PathBuf>) -> anyhow::Result<()> {
    let folder = root.join(below);
    for entry in fs::read_dir(&folder).with_context(|| format!("cannot list {}", folder.display()))? {
        let path = below.join(entry?.file_name());
        if root.join(&path).is_dir() {
            list(root, &path, files)?;
        } else {
            files.push(path);
        }
    }
    Ok(())
}

fn problems(files: &HashSet<PathBuf>, pages: &BTreeMap<PathBuf, String>) -> Vec<String> {
    let ids: BTreeMap<_, HashSet<_>> =
        pages.iter().map(|(page, text)| (page, attribute(text, "id").collect())).collect();
    let mut problems = Vec::new();
    for (page, text) in pages {
        let folder = page.parent().unwrap_or(Path::new(""));
        for link in attribute(text, "href").chain(attribute(text, "src")).filter(|link| is_local(link)) {
            let (file, part) = link.split_once('#').unwrap_or((&link, ""));
            let file = file.split('?').next().unwrap_or_default();
            let target = if file.is_empty() { page.clone() } else { plain(&folder.join(file)) };
            let known = ids.get(&target);
            if !files.contains(&target) {
                problems.push(format!("{}: {link} is not in the book", page.display()));
            } else if !part.is_empty() && known.is_some_and(|ids| !ids.contains(part)) {
                problems.push(format!("{}: {link} names a part that the page has not", page.display()));
            }
        }
    }
    problems
}

fn is_local(link: &str) -> bool {
    !link.is_empty() && !link.contains("://") && !link.starts_with("mailto:") && !link.starts_with("data:")
}

/// The values of an attribute, with entities and percent signs decoded.
fn attribute<'a>(html: &'a str, name: &str) -> impl Iterator<Item = String> + 'a {
    let start = format!(" {name}=\"");
    let mut rest = html;
    std::iter::from_fn(move || {
        let (value, after) = rest.split_once(&start)?.1.split_once('"')?;
        rest = after;
        Some(decoded(&value.replace("&amp;", "&").replace("&#x27;", "'").replace("&quot;", "\"")))
    })
}

/// `%E5%AE%89` as the character that it stands for.
fn decoded(text: &str) -> String {
    let (mut bytes, mut rest) = (Vec::new(), text.as_bytes());
    while let [first, after @ ..] = rest {
        let hex = after.get(..2).filter(|_| *first == b'%').and_then(|hex| std::str::from_utf8(hex).ok());
        if let Some(byte) = hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            bytes.push(byte);
            rest = &after[2..];
        } else {
            bytes.push(*first);
            rest = after;
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(pages: &[(&str, &str)]) -> Vec<String> {
        let pages: BTreeMap<_, _> =
            pages.iter().map(|(path, text)| (PathBuf::from(path), (*text).to_owned())).collect();
        let mut files: HashSet<_> = pages.keys().cloned().collect();
        files.insert("docs/images/a.svg".into());
        problems(&files, &pages)
    }

    #[test]
    fn links_within_the_book_are_no_problem() {
        let one = r##"<h1 id="安装"></h1><a href="../index.html#top"></a><img src="images/a.svg"><a href="#%E5%AE%89%E8%A3%85">
            <a href="https://x.y/none"><a href="one.html?highlight=a#安装">"##;
        let none: [String; 0] = [];
        assert_eq!(found(&[("docs/one.html", one), ("index.html", r#"<p id="top">"#)]), none);
    }

    #[test]
    fn links_that_lead_nowhere_are_named() {
        let one =
            r##"<a href="none.html"><a href="../index.html#none"><a href="#here"><img src="images/b.svg">"##;
        let expected = [
            "docs/one.html: none.html is not in the book",
            "docs/one.html: ../index.html#none names a part that the page has not",
            "docs/one.html: #here names a part that the page has not",
            "docs/one.html: images/b.svg is not in the book",
        ];
        assert_eq!(found(&[("docs/one.html", one), ("index.html", "")]), expected);
    }
}
