//! Recognizes texts that a report has shown already, so that each thing is printed once.
//!
//! The same error reaches a report in several forms: with `error: ` before it where a program printed it, with
//! `on rank 0: ` where another rank repeats it, and with its causes on one line or on a line each.

/// What a trace puts before a cause.
const CAUSE: &str = "caused by: ";
/// The standard library's advice after a panic, with and without a backtrace. A report has its own.
const BACKTRACE_NOTES: [&str; 2] =
    ["note: run with `RUST_BACKTRACE=1`", "note: Some details are omitted, run with `RUST_BACKTRACE"];

/// The error that a report has shown.
pub(super) struct Shown<'a> {
    lines: Vec<&'a str>,
    /// The lines as programs print an error with its causes.
    chain: String,
}

impl<'a> Shown<'a> {
    /// `traced` are the lines of the error, `message` is its summary, which may be cut.
    pub(super) fn new(traced: &'a [String], message: &'a str) -> Self {
        let lines: Vec<_> = traced.iter().map(|line| without_cause(line)).collect();
        let chain = lines.join(": ");
        Self { lines: lines.into_iter().chain([bare(message)]).collect(), chain }
    }

    /// Whether a line of stderr repeats it, or is a remark that the report replaces.
    pub(super) fn has(&self, line: &str) -> bool {
        let text = bare(line);
        let is_shown = |shown: &&str| match shown.strip_suffix('…') {
            Some(cut) => text.starts_with(cut),
            None => text == *shown,
        };
        let is_text = !text.is_empty() && (self.chain == text || self.lines.iter().any(is_shown));
        is_text || BACKTRACE_NOTES.iter().any(|note| text.starts_with(note))
    }
}

fn without_cause(line: &str) -> &str {
    bare(line.trim().trim_start_matches(CAUSE))
}

/// An error without what programs and ranks put before it.
pub(super) fn bare(text: &str) -> &str {
    let mut text = text.trim();
    while let Some(rest) = without_word(text).or_else(|| without_rank(text)) {
        text = rest;
    }
    text
}

fn without_word(text: &str) -> Option<&str> {
    text.strip_prefix("error: ").or_else(|| text.strip_prefix("Error: "))
}

/// Strips `rank 3: ` and `on rank 3: `.
fn without_rank(text: &str) -> Option<&str> {
    let (rank, rest) = text.strip_prefix("on ").unwrap_or(text).strip_prefix("rank ")?.split_once(": ")?;
    rank.parse::<usize>().is_ok().then_some(rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_ranks_and_programs_put_before_an_error_is_removed() {
        for text in [
            "no disk",
            "error: no disk",
            "on rank 0: no disk",
            "Error: rank 12: no disk",
            " error: on rank 3: no disk",
        ] {
            assert_eq!(bare(text), "no disk", "{text}");
        }
        for text in ["rank 3 failed", "rank x: no disk", "an error: no disk", ""] {
            assert_eq!(bare(text), text, "control");
        }
    }

    #[test]
    fn an_error_is_recognized_in_every_form() {
        let traced =
            ["cannot save the model", "  caused by: no disk", "  caused by: it is full"].map(str::to_owned);
        let shown = Shown::new(&traced, "cannot save the model");
        for again in [
            "error: cannot save the model: no disk: it is full",
            "error: on rank 0: cannot save the model",
            "no disk",
            "note: run with `RUST_BACKTRACE=1` environment variable to display a backtrace",
        ] {
            assert!(shown.has(again), "{again}");
        }
        for other in ["", "cannot save the model at once", "disk", "note: run with care"] {
            assert!(!shown.has(other), "control: {other}");
        }
        assert!(Shown::new(&[], "a long mess…").has("error: a long message"), "a summary that was cut");
        assert!(!Shown::new(&[], "").has("text"), "control: nothing was shown");
    }
}
