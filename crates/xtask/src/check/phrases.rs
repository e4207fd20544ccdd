//! Phrases that comments, messages and pages do not use, because the field has words for what they mean.
//!
//! In: the pages without their code, the configurations, and of each Rust file the comments and strings. Out: a line for each use, with the
//! words to write instead. A phrase may run over the end of a line, but not over punctuation. Names of functions and tests are read as
//! sentences.

use super::lexer::{self, code_only};

/// A phrase, and what to write instead.
struct Phrase {
    words: &'static str,
    write: &'static str,
    /// Words before it that give it another meaning.
    unless_after: &'static [&'static str],
}

const fn phrase(words: &'static str, write: &'static str) -> Phrase {
    Phrase { words, write, unless_after: &[] }
}

const PHRASES: &[Phrase] = &[
    phrase("told", "reports, says, returns an error"),
    phrase("tells of", "reports, says"),
    phrase("go on", "resume, continue"),
    phrase("goes on", "resumes, continues"),
    phrase("going on", "resuming, continuing"),
    phrase("gone on", "resumed, continued"),
    phrase("went on", "resumed, continued"),
    // "As soon as it is" and its like are ordinary English.
    Phrase { words: "as it is", write: "eager, unchanged", unless_after: &["soon", "long", "far", "often"] },
    phrase("as they are made", "eager"),
    phrase("operation by operation", "eager"),
    phrase("in the midst", "in the middle of, mid-epoch"),
    phrase("anew", "again, from scratch"),
    phrase("if it is not said", "by default"),
    phrase("unless it is said", "by default"),
    phrase("the way there is otherwise", "fallback"),
    phrase("in its place", "instead, as the fallback"),
    phrase("processor's memory", "host memory"),
    phrase("with the processor", "on the CPU"),
    phrase("takes in what", "refreshes ... from"),
];

/// Files that may use the phrases: this one lists them.
const EXCEPTIONS: &[&str] = &["crates/xtask/src/check/phrases.rs"];

/// What people read of a file.
pub(crate) struct Prose {
    pub(crate) path: String,
    /// With the file's line ends.
    pub(crate) text: String,
}

impl Prose {
    /// The comments and strings of a Rust file.
    pub(crate) fn of_source(path: &str, source: &str) -> Self {
        let code = code_only(source);
        let kept = |(said, code): (char, char)| if code == ' ' || code == '\n' { said } else { ' ' };
        Self { path: path.to_owned(), text: source.chars().zip(code.chars()).map(kept).collect() }
    }

    /// The names of a Rust file's functions and tests, each as a sentence.
    pub(crate) fn of_names(path: &str, source: &str) -> Self {
        let (code, mut text, mut line) = (code_only(source), String::new(), 1);
        let mut before = "";
        for (at, word) in lexer::words(&code).filter(|(_, word)| !word.is_empty()) {
            if matches!(before, "fn" | "ranks_test") {
                text.extend(std::iter::repeat_n('\n', at - line));
                text.push_str(&word.replace('_', " "));
                text.push('.');
                line = at;
            }
            before = word;
        }
        Self { path: path.to_owned(), text }
    }

    /// A page without examples and what stands in backticks: names, and messages as programs print them.
    pub(crate) fn of_page(path: &str, page: &str) -> Self {
        let (mut is_example, mut text) = (false, String::new());
        for line in page.lines() {
            let is_fence = line.trim_start().starts_with("```");
            is_example ^= is_fence;
            if !is_example && !is_fence {
                let parts = line.split('`').enumerate();
                text.extend(parts.map(|(place, part)| if place % 2 == 0 { part } else { "`" }));
            }
            text.push('\n');
        }
        Self { path: path.to_owned(), text }
    }
}

/// Each use of a phrase.
pub(crate) fn problems(proses: &[Prose]) -> Vec<String> {
    proses.iter().filter(|prose| !EXCEPTIONS.contains(&prose.path.as_str())).flat_map(uses).collect()
}

fn uses(prose: &Prose) -> Vec<String> {
    let words = words(&prose.text);
    let mut uses = Vec::new();
    for phrase in PHRASES {
        let wanted: Vec<_> = phrase.words.split(' ').collect();
        for (at, window) in words.windows(wanted.len()).enumerate() {
            let is_phrase = window.iter().zip(&wanted).all(|((_, word), wanted)| word == wanted);
            let before = at.checked_sub(1).map_or("", |before| words[before].1.as_str());
            if is_phrase && !phrase.unless_after.contains(&before) {
                let line = window.first().map_or(0, |(line, _)| *line);
                uses.push(format!("{}:{line}: `{}`; try: {}", prose.path, phrase.words, phrase.write));
            }
        }
    }
    uses
}

/// The words with their lines, in lower case; punctuation between two of them is a word that no phrase has.
fn words(text: &str) -> Vec<(usize, String)> {
    let mut words = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let mut word = String::new();
        for c in line.chars().chain([' ']) {
            if c.is_alphanumeric() || "_'".contains(c) {
                word.extend(c.to_lowercase());
                continue;
            }
            if !word.is_empty() {
                words.push((index + 1, std::mem::take(&mut word)));
            }
            if ".,;:|()`".contains(c) {
                words.push((index + 1, c.to_string()));
            }
        }
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(text: &str) -> Vec<String> {
        problems(&[Prose::of_page("p.md", text)])
    }

    #[test]
    fn phrases_are_found_also_over_the_end_of_a_line() {
        let expected = [
            "p.md:2: `told`; try: reports, says, returns an error",
            "p.md:1: `goes on`; try: resumes, continues",
            "p.md:3: `as it is`; try: eager, unchanged",
        ];
        assert_eq!(page("It goes\non, and all are Told.\nThe step runs as it is.\n"), expected);
    }

    #[test]
    fn other_meanings_and_quotations_are_no_problem() {
        for text in [
            "As soon as it is there. It goes. On the way, a retold story.",
            "`the same command goes on`\n```text\ngoes on\n```\n",
        ] {
            assert_eq!(page(text), Vec::<String>::new(), "{text}");
        }
    }

    #[test]
    fn comments_and_strings_count_and_code_does_not() {
        let source = "// It goes\n// on.\nfn told() { let go = on; say(\"begun anew\"); }\n";
        let found = problems(&[Prose::of_source("a.rs", source)]);
        let expected =
            ["a.rs:1: `goes on`; try: resumes, continues", "a.rs:3: `anew`; try: again, from scratch"];
        assert_eq!(found, expected);
    }

    #[test]
    fn names_of_functions_and_tests_count() {
        let source = "fn told() {}\npub fn stop(a: u8) {}\n\nranks_test!(\n    it_goes_on_anew,\n    2, {});\nfn on() {}";
        let expected = [
            "a.rs:1: `told`; try: reports, says, returns an error",
            "a.rs:5: `goes on`; try: resumes, continues",
            "a.rs:5: `anew`; try: again, from scratch",
        ];
        assert_eq!(problems(&[Prose::of_names("a.rs", source)]), expected);
        let other = "fn goes() {}\nfn on() {}\nlet f: fn(u8) = told;";
        assert_eq!(problems(&[Prose::of_names("a.rs", other)]), Vec::<String>::new());
    }

    #[test]
    fn only_exceptions_may_use_them() {
        let prose = |path: &str| Prose::of_source(path, "// told");
        assert_eq!(problems(&[prose(EXCEPTIONS[0])]), Vec::<String>::new());
        assert_eq!(problems(&[prose("crates/a/src/x.rs")]).len(), 1);
    }
}
