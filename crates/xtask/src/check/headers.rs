//! Each source file of a crate opens with `//!`: what it is, what goes in and out, what is not here.

use crate::workspace::Source;

/// Each file below a `src/` folder, or in `examples/`, that opens otherwise.
pub(crate) fn problems(sources: &[Source]) -> Vec<String> {
    let wanted = |path: &str| path.starts_with("examples/") || path.contains("/src/");
    sources
        .iter()
        .filter(|source| wanted(&source.path) && !source.text.starts_with("//!"))
        .map(|source| format!("{} does not start with `//!`", source.path))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_without_a_header_is_named() {
        let source = |path: &str, text: &str| Source { path: path.to_owned(), text: text.to_owned() };
        let sources = [
            source("crates/a/src/lib.rs", "//! A.\n"),
            source("crates/a/src/ring.rs", "// Ring.\n"),
            source("crates/a/build.rs", "fn main() {}"),
        ];
        assert_eq!(problems(&sources), ["crates/a/src/ring.rs does not start with `//!`"]);
    }
}
