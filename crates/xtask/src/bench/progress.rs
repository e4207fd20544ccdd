//! The line that says what is under way and how long it will take.

use std::fmt;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

/// Rewritten in place on a terminal; elsewhere a new line every ten seconds.
pub(crate) struct Progress {
    total: usize,
    start: Instant,
    shown: Option<Instant>,
    live: bool,
}

impl Progress {
    pub(crate) fn new(total: usize) -> Self {
        Self { total, start: Instant::now(), shown: None, live: std::io::stderr().is_terminal() }
    }

    pub(crate) fn show(&mut self, done: usize, block: usize, unit: &impl fmt::Display) {
        let every = Duration::from_secs(10);
        if !self.live && self.shown.is_some_and(|shown| shown.elapsed() < every) {
            return;
        }
        self.shown = Some(Instant::now());
        let left = self.start.elapsed().as_secs_f64() / done.max(1) as f64 * (self.total - done) as f64;
        let left = if done == 0 { "?".to_owned() } else { format!("{:.0} min", (left / 60.0).ceil()) };
        let line = format!("[{}/{}] block {}: {unit}; about {left} left", done + 1, self.total, block + 1);
        if self.live { eprint!("\r\x1b[2K{line}") } else { eprintln!("{line}") }
    }

    pub(crate) fn clear(&self) {
        if self.live {
            eprint!("\r\x1b[2K");
        }
    }
}
