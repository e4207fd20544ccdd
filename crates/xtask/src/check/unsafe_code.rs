//! Unsafe code only where the design allows it, and `forbid(unsafe_code)` in every other crate.

use super::lexer::{code_only, words};
use crate::workspace::{Package, Source};

/// Files, or folders ending in `/`, that may hold the keyword.
const ALLOWED: &[&str] = &[
    "crates/drumline-comm/src/shm/",
    "crates/drumline-comm/src/tcp/outstanding.rs",
    "crates/drumline-launch/src/prepare.rs",
    "crates/drumline-torch/",
];

/// Each use of the keyword outside the allowed files, and each crate root that does not forbid it.
pub(crate) fn problems(packages: &[Package], sources: &[Source]) -> Vec<String> {
    let mut problems: Vec<_> = sources.iter().filter(|s| !is_allowed(&s.path)).flat_map(uses).collect();
    let forbidding = packages.iter().filter(|package| !has_exception(&package.name));
    for root in forbidding.flat_map(|package| &package.roots) {
        let source = sources.iter().find(|source| root == source.path.as_ref() as &std::path::Path);
        if source.is_some_and(|source| !forbids(source)) {
            problems.push(format!("{} has no `#![forbid(unsafe_code)]`", root.display()));
        }
    }
    problems
}

fn uses(source: &Source) -> Vec<String> {
    let code = code_only(&source.text);
    let lines = words(&code).filter(|(_, word)| *word == "unsafe").map(|(line, _)| line);
    lines.map(|line| format!("{}:{line}: `unsafe` is not allowed in this file", source.path)).collect()
}

fn is_allowed(path: &str) -> bool {
    ALLOWED.iter().any(|allowed| path == *allowed || allowed.ends_with('/') && path.starts_with(allowed))
}

/// A crate with an allowed file can only deny, not forbid.
fn has_exception(package: &str) -> bool {
    ALLOWED.iter().any(|allowed| allowed.starts_with(&format!("crates/{package}/")))
}

fn forbids(source: &Source) -> bool {
    let code: String = code_only(&source.text).split_whitespace().collect();
    code.contains("#![forbid(unsafe_code)]")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    fn source(path: &str, text: &str) -> Source {
        Source { path: path.to_owned(), text: text.to_owned() }
    }

    fn package(name: &str) -> Package {
        let roots = vec![PathBuf::from(format!("crates/{name}/src/lib.rs"))];
        Package { name: name.to_owned(), roots, ..Package::default() }
    }

    #[test]
    fn allowed_places_pass() {
        let sources = [
            source("crates/drumline-comm/src/lib.rs", "//! Groups."),
            source("crates/drumline-comm/src/shm/ring.rs", "unsafe {}"),
            source("crates/drumline-launch/src/prepare.rs", "unsafe {}"),
            source("crates/rank-test/src/lib.rs", "#![forbid(unsafe_code)]"),
        ];
        assert_eq!(
            problems(&[package("drumline-comm"), package("rank-test")], &sources),
            Vec::<String>::new()
        );
    }

    #[test]
    fn other_places_are_named() {
        let sources = [
            source("crates/drumline-comm/src/shmem.rs", "unsafe {}"),
            source("crates/drumline-launch/src/prepare.rs.rs", "\nunsafe {}"),
            source("crates/rank-test/src/lib.rs", "// #![forbid(unsafe_code)]"),
        ];
        let found = problems(&[package("rank-test")], &sources);
        let expected = [
            "crates/drumline-comm/src/shmem.rs:1: `unsafe` is not allowed in this file",
            "crates/drumline-launch/src/prepare.rs.rs:2: `unsafe` is not allowed in this file",
            "crates/rank-test/src/lib.rs has no `#![forbid(unsafe_code)]`",
        ];
        assert_eq!(found, expected);
    }
}
