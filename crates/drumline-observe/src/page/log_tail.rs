//! The last lines of a run's log, as plain text.

use std::collections::VecDeque;

use serde::Serialize;

/// Lines that are kept, here and in the browser.
const MOST_LINES: usize = 500;
/// Characters of a line that are shown.
const LONGEST: usize = 2000;

/// The lines, each with the version at which it came.
#[derive(Debug, Default)]
pub(super) struct LogTail {
    lines: VecDeque<(u64, String)>,
    /// The version at which the file was replaced.
    reset: u64,
}

/// Lines that a browser does not have yet.
#[derive(Debug, Serialize)]
pub(super) struct LogNews<'a> {
    /// Whether the lines that it has no longer count.
    reset: bool,
    lines: Vec<&'a str>,
}

impl LogTail {
    pub(super) fn start_over(&mut self, version: u64) {
        self.lines.clear();
        self.reset = version;
    }

    pub(super) fn push(&mut self, line: &[u8], version: u64) {
        if self.lines.len() == MOST_LINES {
            self.lines.pop_front();
        }
        self.lines.push_back((version, plain(&String::from_utf8_lossy(line))));
    }

    pub(super) fn news(&self, since: u64) -> LogNews<'_> {
        let from = self.lines.partition_point(|(version, _)| *version <= since);
        let lines = self.lines.range(from..).map(|(_, line)| line.as_str()).collect();
        LogNews { reset: self.reset > since, lines }
    }
}

/// The text without colours and other terminal codes.
fn plain(line: &str) -> String {
    let mut text = String::new();
    let mut rest = line.trim_end().chars();
    while let Some(next) = rest.next() {
        match next {
            // ESC [ … letter
            '\u{1b}' if rest.next() == Some('[') => drop(rest.find(|end| ('@'..='~').contains(end))),
            '\t' => text.push(next),
            next if next.is_control() => {}
            next => text.push(next),
        }
    }
    text.chars().take(LONGEST).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_come_once_and_the_oldest_go() {
        let mut log = LogTail::default();
        (0..MOST_LINES + 5).for_each(|number| log.push(number.to_string().as_bytes(), 1));
        log.push(b"new", 2);
        let all = log.news(0);
        assert_eq!((all.lines.len(), all.lines[0], all.reset), (MOST_LINES, "6", false));
        assert_eq!(log.news(1).lines, ["new"]);
        log.start_over(3);
        log.push(b"again", 3);
        let reset = log.news(2);
        assert_eq!((reset.reset, reset.lines), (true, vec!["again"]));
    }

    #[test]
    fn terminal_codes_are_removed() {
        assert_eq!(plain("\u{1b}[1;31mred\u{1b}[0m\tb\u{7}\r"), "red\tb");
        assert_eq!(plain("<b>é"), "<b>é");
        assert_eq!(plain(&"x".repeat(5000)).len(), LONGEST);
    }
}
