//! Tables in `docs/` that name tests: each of these must exist.
//!
//! In: the text of a page and the sources. A name is `module::test` in backticks, where the module is a file or the
//! folder of a `mod.rs`. Out: the names without a test.

use crate::workspace::Source;

/// The names on a page that no test bears.
pub(crate) fn problems(page: &str, text: &str, sources: &[Source]) -> Vec<String> {
    let missing =
        names(text).filter(|(module, test)| !sources.iter().any(|source| has(source, module, test)));
    let mut problems: Vec<_> = missing
        .map(|(module, test)| format!("{page} names the test {module}::{test}, which is not there"))
        .collect();
    problems.dedup();
    if names(text).next().is_none() {
        problems.push(format!("{page} names no test at all"));
    }
    problems
}

fn names(text: &str) -> impl Iterator<Item = (&str, &str)> {
    let quoted = text.split('`').skip(1).step_by(2);
    quoted.filter_map(|name| name.split_once("::")).filter(|(module, test)| is_word(module) && is_word(test))
}

fn is_word(text: &str) -> bool {
    !text.is_empty() && text.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
}

/// Whether the module has such a test, by itself or as one of several processes. Tests of `failure.rs` may stand in
/// `failure/tests.rs`.
fn has(source: &Source, module: &str, test: &str) -> bool {
    let Some(path) = source.path.strip_suffix(".rs") else { return false };
    let path = path.strip_suffix("/tests").or_else(|| path.strip_suffix("/mod")).unwrap_or(path);
    if path.rsplit('/').next() != Some(module) {
        return false;
    }
    let is_marked = |before: &str| {
        let lines = before.trim_end().lines().rev().map(str::trim);
        lines.take_while(|line| line.starts_with("#[")).any(|line| line == "#[test]")
    };
    let plain = source.text.split_once(&format!("fn {test}()")).is_some_and(|(before, _)| is_marked(before));
    plain || source.text.contains(&format!("!({test},")) || source.text.contains(&format!("!(\n    {test},"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(path: &str, text: &str) -> Source {
        Source { path: path.to_owned(), text: text.to_owned() }
    }

    #[test]
    fn a_name_without_a_test_is_reported() {
        let sources = [
            source(
                "crates/a/tests/it/gloo.rs",
                "#[test]\n#[ignore = \"x\"]\nfn meets() {}\n\nfn helper() {}\n",
            ),
            source("crates/a/src/failure/tests.rs", "    #[test]\n    fn reported() {\n"),
            source("crates/a/src/plain.rs", "#[test]\nfn alone() {}\n"),
            source("crates/a/tests/it/ranks.rs", "ranks_test!(\n    four,\n    4, {});"),
        ];
        let page = "| `gloo::meets` | `failure::reported` | `ranks::four` | `plain::alone` | `Vec::new` `std::fs::read` |";
        assert_eq!(problems("p", page, &sources), Vec::<String>::new());
        for absent in ["gloo::helper", "other::meets", "gloo::meet", "ranks::meets"] {
            let found = problems("p", &format!("`{absent}`"), &sources);
            assert_eq!(found, [format!("p names the test {absent}, which is not there")]);
        }
        assert_eq!(problems("p", "nothing", &sources), ["p names no test at all"]);
    }
}
