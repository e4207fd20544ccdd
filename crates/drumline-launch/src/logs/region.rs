//! The last rows of a terminal, in which bars are redrawn: one row for each bar, below the lines.
//!
//! ```text
//!   [rank 0]: an ordinary line          scrolls up, never touched again
//!   [rank 0]:  37%|███▋      |          the region: redrawn after each change, at most every PAUSE
//!   [rank 1]:  36%|███▌      |
//!   █                                   the cursor
//! ```
//!
//! Rows are cut to the width of the terminal, because a wrapped row could not be redrawn. Pure: size and time are
//! arguments.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::{Duration, Instant};

use rustix::termios::Winsize;

/// The shortest time between two drawings.
const PAUSE: Duration = Duration::from_millis(100);

/// The assumed size of a terminal that does not report it.
const COLUMNS: u16 = 80;
const ROWS: u16 = 24;

/// The owner of rows: a rank and a stream. Rows are sorted by owner.
pub(super) type Owner = (usize, u8);

#[derive(Debug, Default)]
pub(super) struct Region {
    rows: BTreeMap<Owner, Vec<Vec<u8>>>,
    /// How many rows of the terminal are drawn now.
    drawn: usize,
    /// When to draw again.
    due: Option<Instant>,
    last: Option<Instant>,
}

impl Region {
    /// Sets the rows of an owner; an empty list removes them.
    pub(super) fn set(&mut self, owner: Owner, rows: Vec<Vec<u8>>, now: Instant) {
        let before = if rows.is_empty() { self.rows.remove(&owner) } else { self.rows.insert(owner, rows) };
        if before.as_ref() != self.rows.get(&owner) {
            let soonest = self.last.map_or(now, |last| last + PAUSE);
            self.due.get_or_insert(soonest.max(now));
        }
    }

    /// Postpones the drawing, because it cannot be drawn now.
    pub(super) fn postpone(&mut self, now: Instant) {
        self.due = Some(now + PAUSE);
    }

    /// Whether nothing is drawn and nothing should be.
    pub(super) fn is_empty(&self) -> bool {
        self.drawn == 0 && self.rows.is_empty()
    }

    pub(super) fn due(&self) -> Option<Instant> {
        self.due
    }

    /// Appends the codes that erase it from the terminal; the cursor then is where it began.
    pub(super) fn erase(&mut self, out: &mut Vec<u8>) {
        if self.drawn > 0 {
            out.extend_from_slice(format!("\r\x1b[{}A\x1b[J", self.drawn).as_bytes());
            self.drawn = 0;
        }
    }

    /// Appends the codes that draw it over the previous drawing.
    pub(super) fn draw(&mut self, size: Option<Winsize>, now: Instant, out: &mut Vec<u8>) {
        let size = size.filter(|size| size.ws_col > 0 && size.ws_row > 0);
        let (columns, rows) = size.map_or((COLUMNS, ROWS), |size| (size.ws_col, size.ws_row));
        let most = usize::from(rows).saturating_sub(1).max(1);
        let mut text = match self.drawn {
            0 => String::new(),
            drawn => format!("\r\x1b[{drawn}A"),
        };
        let shown: Vec<_> = self.rows.values().flatten().take(most).collect();
        for row in &shown {
            let row = String::from_utf8_lossy(row);
            // The last column stays empty, as some terminals wrap after it.
            let cut = console::truncate_str(&row, usize::from(columns).saturating_sub(1), "");
            let _ = writeln!(text, "{cut}\x1b[0m\x1b[K");
        }
        if shown.len() < self.drawn {
            text += "\x1b[J";
        }
        self.drawn = shown.len();
        self.due = None;
        self.last = Some(now);
        out.extend_from_slice(text.as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size(ws_col: u16, ws_row: u16) -> Option<Winsize> {
        Some(Winsize { ws_col, ws_row, ws_xpixel: 0, ws_ypixel: 0 })
    }

    fn drawn(region: &mut Region, size: Option<Winsize>, now: Instant) -> String {
        let mut out = Vec::new();
        region.draw(size, now, &mut out);
        String::from_utf8(out).unwrap().replace("\x1b[0m\x1b[K", "")
    }

    #[test]
    fn rows_are_sorted_and_drawn_over_the_previous_ones() {
        let (mut region, now) = (Region::default(), Instant::now());
        region.set((1, 0), vec![b"one".to_vec()], now);
        region.set((0, 1), vec![b"zero".to_vec(), b"below".to_vec()], now);
        assert_eq!(drawn(&mut region, size(80, 24), now), "zero\nbelow\none\n");
        region.set((0, 1), vec![b"zero".to_vec()], now);
        assert_eq!(drawn(&mut region, size(80, 24), now), "\r\x1b[3Azero\none\n\x1b[J");
        let mut out = Vec::new();
        region.erase(&mut out);
        region.erase(&mut out);
        assert_eq!(out, b"\r\x1b[2A\x1b[J");
    }

    #[test]
    fn rows_are_cut_to_the_terminal() {
        let (mut region, now) = (Region::default(), Instant::now());
        (0..9).for_each(|rank| region.set((rank, 0), vec!["\x1b[36m█████x".into()], now));
        let text = drawn(&mut region, size(5, 4), now);
        assert_eq!(text, "\x1b[36m████\n".repeat(3));
        assert_eq!(drawn(&mut region, size(0, 0), now).lines().count(), 9, "control: the size is unknown");
    }

    #[test]
    fn it_is_drawn_at_most_once_per_pause() {
        let (mut region, now) = (Region::default(), Instant::now());
        region.set((0, 0), vec![b"1".to_vec()], now);
        assert_eq!(region.due(), Some(now));
        drawn(&mut region, None, now);
        assert_eq!(region.due(), None);
        region.set((0, 0), vec![b"1".to_vec()], now);
        assert_eq!(region.due(), None, "nothing has changed");
        region.set((0, 0), vec![b"2".to_vec()], now);
        assert_eq!(region.due(), Some(now + PAUSE));
        let late = now + 3 * PAUSE;
        region.set((0, 0), vec![b"3".to_vec()], late);
        assert_eq!(region.due(), Some(now + PAUSE), "it is not postponed forever");
    }
}
