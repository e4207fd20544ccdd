//! Extracts the last Python traceback or Rust panic from what a worker printed.
//!
//! A *block* is the run of lines that belongs to one exception or panic. Chained exceptions are several blocks with a
//! sentence between each two. They are kept together, because the first one is the origin.

use std::ops::Range;

const PYTHON: &str = "Traceback (most recent call last):";
const CHAINS: [&str; 2] = [
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
];
/// An exception's text may have this many lines after its first.
const LONGEST_MESSAGE: usize = 20;
/// The longest block of a panic, in lines.
const LONGEST_PANIC: usize = 200;

/// The extracted block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trace {
    /// Its lines, without the prefix that PyTorch puts before them (`[rank0]: `).
    pub lines: Vec<String>,
    /// The error in one line.
    pub summary: String,
    /// Its position among the lines that it was extracted from.
    pub(crate) span: Range<usize>,
}

impl Trace {
    /// Whether one of its lines contains this text.
    pub(crate) fn contains(&self, text: &str) -> bool {
        self.lines.iter().any(|line| line.contains(text))
    }
}

/// The last traceback or panic among `lines`.
pub(crate) fn find(lines: &[String]) -> Option<Trace> {
    let python = lines.iter().rposition(|line| line.contains(PYTHON));
    let rust = lines.iter().rposition(|line| is_panic(line));
    if rust > python { rust.map(|at| panic_block(lines, at)) } else { python.map(|at| traceback(lines, at)) }
}

/// The text of an error file as a block.
pub(crate) fn from_text(text: &str, summary: &str) -> Trace {
    let lines = super::text::lines_of(text.as_bytes());
    let first = super::text::lines_of(summary.as_bytes()).into_iter().find(|line| !line.trim().is_empty());
    Trace { lines, summary: first.unwrap_or_default(), span: 0..0 }
}

fn traceback(lines: &[String], at: usize) -> Trace {
    let before = lines[at].find(PYTHON).map_or("", |start| &lines[at][..start]);
    // PyTorch writes `[rank0]: ` before each line; `  + Exception Group ` comes only before the first.
    let repeated = lines.get(at + 1).is_some_and(|next| next.starts_with(before));
    let prefix = if repeated { before } else { "" };
    let bare = |index: usize| lines.get(index).and_then(|line| line.strip_prefix(prefix));
    let is_frame = |index: &usize| bare(*index).is_some_and(|line| line.starts_with(' '));
    let is_text = |index: &usize| bare(*index).is_some_and(|line| !line.trim().is_empty());

    let error = at + 1 + (at + 1..lines.len()).take_while(is_frame).count();
    let end = error + (error..lines.len()).take(LONGEST_MESSAGE).take_while(is_text).count();
    let start = chain_start(lines, at);
    let cut = |line: &String| line.strip_prefix(prefix).unwrap_or(line).to_string();
    let block: Vec<_> = lines[start..end].iter().map(cut).collect();
    let summary = bare(error).filter(|line| !line.trim().is_empty()).map(str::to_owned);
    let summary = summary.or_else(|| block.last().map(|line| line.trim().to_string())).unwrap_or_default();
    Trace { lines: block, summary, span: start..end }
}

/// The start of a chain of exceptions: goes back over the sentences that join them.
fn chain_start(lines: &[String], mut at: usize) -> usize {
    loop {
        // The sentence and the blank line after it.
        let above = &lines[at.saturating_sub(2)..at];
        let joined = above.iter().any(|line| CHAINS.iter().any(|chain| line.contains(chain)));
        match lines[..at].iter().rposition(|line| line.contains(PYTHON)) {
            Some(before) if joined => at = before,
            _ => return at,
        }
    }
}

fn is_panic(line: &str) -> bool {
    line.strip_prefix("thread '").is_some_and(|rest| rest.contains("panicked at "))
}

fn panic_block(lines: &[String], at: usize) -> Trace {
    let rest = &lines[at + 1..lines.len().min(at + LONGEST_PANIC)];
    let is_note =
        |line: &String| line.starts_with("note: run with ") || line.starts_with("note: Some details");
    // A message may contain blank lines: they end the block only if the closing note is missing.
    let length =
        rest.iter().position(is_note).or_else(|| rest.iter().position(|line| line.trim().is_empty()));
    let end = at + 1 + length.unwrap_or(rest.len());
    let place = lines[at].split_once("panicked at ").map_or("", |(_, place)| place).trim_end_matches(':');
    let message = lines[at + 1..end].iter().find(|line| !line.trim().is_empty());
    let summary = match message {
        Some(message) => format!("panicked at {place}: {message}"),
        None => format!("panicked at {place}"),
    };
    Trace { lines: lines[at..end].to_vec(), summary, span: at..end }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::text::lines_of;

    fn found(text: &str) -> Trace {
        find(&lines_of(text.as_bytes())).unwrap_or_else(|| panic!("nothing found in {text}"))
    }

    #[test]
    fn a_traceback_is_extracted_from_other_output() {
        let text = "epoch 1\nTraceback (most recent call last):\n  File \"a.py\", line 3, in <module>\n    f()\n    \
                    ^^^\nValueError: bad\nsecond line of it\n\nbye\n";
        let trace = found(text);
        assert_eq!((trace.lines.len(), trace.span), (6, 1..7));
        assert_eq!(trace.summary, "ValueError: bad");
        assert_eq!(trace.lines.last().unwrap(), "second line of it");
    }

    #[test]
    fn the_last_of_two_tracebacks_counts() {
        let text = "Traceback (most recent call last):\n  File \"a.py\"\nKeyError: 1\ncontinued\n\
                    Traceback (most recent call last):\n  File \"b.py\"\nOSError: 2\n";
        let trace = found(text);
        assert_eq!((trace.summary.as_str(), trace.span), ("OSError: 2", 4..7));
    }

    #[test]
    fn chained_exceptions_stay_together_in_both_kinds() {
        for chain in CHAINS {
            let text = format!(
                "start\nTraceback (most recent call last):\n  File \"a.py\"\nKeyError: 1\n\n{chain}\n\n\
                 Traceback (most recent call last):\n  File \"b.py\"\nRuntimeError: 2\n"
            );
            let trace = found(&text);
            assert_eq!((trace.span, trace.summary.as_str()), (1..10, "RuntimeError: 2"), "{chain}");
            let prefixed: String = text.lines().map(|line| format!("[rank0]: {line}\n")).collect();
            let trace = found(&prefixed);
            assert_eq!((trace.span, trace.summary.as_str()), (1..10, "RuntimeError: 2"), "{chain}");
            assert_eq!(trace.lines[0], PYTHON);
            // PyTorch leaves blank lines bare.
            let trace = found(&prefixed.replace("[rank0]: \n", "\n"));
            assert_eq!((trace.span, trace.summary.as_str()), (1..10, "RuntimeError: 2"), "{chain}");
        }
    }

    #[test]
    fn pytorchs_prefix_is_removed_and_its_absence_ends_the_block() {
        let text = "[rank1]: Traceback (most recent call last):\n[rank1]:   File \"t.py\", line 9\n\
                    [rank1]:     x()\n[rank1]: IndexError: 7\nW1115 unrelated\n";
        let trace = found(text);
        assert_eq!(trace.lines[1], "  File \"t.py\", line 9");
        assert_eq!((trace.summary.as_str(), trace.lines.len()), ("IndexError: 7", 4));
    }

    #[test]
    fn exception_groups_and_incomplete_tracebacks_are_handled() {
        let group = "  + Exception Group Traceback (most recent call last):\n  |   File \"a.py\", line 1\n  \
                     | ExceptionGroup: two (1 sub-exception)\n  +-+---------------- 1 ----------------\n";
        assert_eq!(found(group).lines.len(), 4);
        let cut = "Traceback (most recent call last):\n  File \"a.py\", line 1\n    work()";
        assert_eq!(found(cut).summary, "work()");
        assert_eq!(found(PYTHON).lines, [PYTHON]);
    }

    #[test]
    fn a_panic_is_extracted_with_its_message_and_backtrace() {
        let note = "note: run with `RUST_BACKTRACE=1` environment variable to display a backtrace";
        let text =
            format!("hi\nthread 'main' (4711) panicked at src/main.rs:2:5:\nfirst\n\nsecond\n{note}\nbye\n");
        let trace = found(&text);
        assert_eq!(trace.span, 1..5);
        assert_eq!(trace.summary, "panicked at src/main.rs:2:5: first");
        let text =
            "thread '<unnamed>' panicked at a.rs:1:1:\nboom\nstack backtrace:\n   0: f\n   1: g\n\nbye";
        assert_eq!(found(text).lines.len(), 5);
        assert_eq!(found("thread 'main' panicked at a.rs:1:1:").summary, "panicked at a.rs:1:1");
    }

    #[test]
    fn the_later_of_panic_and_traceback_counts() {
        let (panic, python) =
            ("thread 'main' panicked at a.rs:1:1:\nboom\n\n", "Traceback (most recent call last):\nE: 1\n\n");
        assert_eq!(found(&format!("{panic}{python}")).summary, "E: 1");
        assert_eq!(found(&format!("{python}{panic}")).summary, "panicked at a.rs:1:1: boom");
    }

    #[test]
    fn output_without_an_error_has_no_trace() {
        for text in ["", "all is well", "a thread 'x' was started", "\u{0}\u{1}\u{2}"] {
            assert_eq!(find(&lines_of(text.as_bytes())), None, "{text}");
        }
    }
}
