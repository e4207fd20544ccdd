//! Progress bars where they cannot be redrawn: in a file, in a pipe, or on a console that several launchers share.
//!
//! A bar that is redrawn ten times a second would become ten lines a second. Here, a state becomes a line at most every
//! [`EVERY`]. The last state always does: when a newline ends it, when the stream ends, or when it has not changed for
//! that long. Ordinary lines pass at once.

use std::time::{Duration, Instant};

use crate::lines::Lines;

/// The time between two states of one stream's bars.
const EVERY: Duration = Duration::from_secs(10);

/// A stream's lines, with the states of its bars between them.
#[derive(Debug)]
pub(super) struct Paced {
    lines: Lines,
    /// When the next state may be emitted.
    not_before: Option<Instant>,
}

impl Paced {
    pub(super) fn new(lines: Lines) -> Self {
        Self { lines, not_before: None }
    }

    pub(super) fn feed(&mut self, bytes: &[u8], now: Instant, out: &mut Vec<u8>) {
        self.lines.feed(bytes, out);
        self.tick(now, out);
    }

    /// Emits a state that is due.
    pub(super) fn tick(&mut self, now: Instant, out: &mut Vec<u8>) {
        if self.lines.has_pending_state() && self.not_before.is_none_or(|allowed| allowed <= now) {
            self.lines.emit_states(out);
            self.not_before = Some(now + EVERY);
        }
    }

    /// When [`tick`](Self::tick) has something to do.
    pub(super) fn due(&self) -> Option<Instant> {
        self.not_before.filter(|_| self.lines.has_pending_state())
    }

    pub(super) fn finish(&mut self, out: &mut Vec<u8>) {
        self.lines.emit_states(out);
        self.lines.finish(out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lines::Rendering;

    /// The output, as text, for pieces that arrive at these seconds.
    fn paced(pieces: &[(u64, &str)], end: impl Fn(&mut Paced, Instant, &mut Vec<u8>)) -> String {
        let (mut paced, mut out) = (Paced::new(Lines::new(">".to_string(), Rendering::Raw)), Vec::new());
        let begin = Instant::now();
        for (second, piece) in pieces {
            let now = begin + Duration::from_secs(*second);
            if paced.due().is_some_and(|due| due <= now) {
                paced.tick(now, &mut out);
            }
            paced.feed(piece.as_bytes(), now, &mut out);
        }
        end(&mut paced, begin, &mut out);
        String::from_utf8(out).unwrap()
    }

    fn to_the_end(pieces: &[(u64, &str)]) -> String {
        paced(pieces, |paced, _, out| paced.finish(out))
    }

    #[test]
    fn a_bar_becomes_a_line_at_intervals_and_at_its_end() {
        let states: Vec<_> = (0..300).map(|n| (n / 10, format!("\r{n}"))).collect();
        let mut pieces: Vec<_> = states.iter().map(|(second, state)| (*second, state.as_str())).collect();
        pieces.push((29, "\ndone\n"));
        assert_eq!(to_the_end(&pieces), ">0\n>99\n>199\n>299\n>done\n");
        assert_eq!(to_the_end(&[(0, "\r1\r2\r3\n")]), ">3\n", "a bar that arrived at once");
        assert_eq!(
            to_the_end(&[(0, "\r1"), (1, "\r2"), (2, "\r  \r")]),
            ">1\n>2\n",
            "a bar that erased itself"
        );
    }

    #[test]
    fn ordinary_lines_never_wait() {
        let plain: Vec<_> = (0..50).map(|_| (0, "line\n")).collect();
        assert_eq!(to_the_end(&plain).lines().count(), 50);
        let mixed = [(0, "\r1"), (1, "\r2"), (1, "\r  \rWARNING\n\r2"), (2, "\r3"), (3, "\n")];
        assert_eq!(to_the_end(&mixed), ">1\n>WARNING\n>3\n");
    }

    #[test]
    fn a_bar_that_stops_changing_is_emitted() {
        let shown = paced(&[(0, "\r1"), (3, "\r2")], |paced, begin, out| {
            assert_eq!(paced.due(), Some(begin + EVERY));
            paced.tick(begin + EVERY - Duration::from_secs(1), out);
            assert_eq!(out, b">1\n", "control: not yet");
            paced.tick(begin + EVERY, out);
            assert_eq!(paced.due(), None);
        });
        assert_eq!(shown, ">1\n>2\n");
    }
}
