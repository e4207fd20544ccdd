//! The last rows of a terminal, where bars are redrawn: a row for each, below the lines.
//!
//! ```text
//!   [rank 0]: an ordinary line          scrolls up, never touched again
//!   [rank 0]:  37%|███▋      |          the region: drawn again for each change, at most every PAUSE
//!   [rank 1]:  36%|███▌      |
//!   █                                   the cursor
//! ```
//!
//! Rows are cut to the width of the terminal, as one that wraps could not be found again. Pure: size and time come in.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::{Duration, Instant};

use rustix::termios::Winsize;

/// The least time between two drawings.
const PAUSE: Duration = Duration::from_millis(100);

/// What a terminal has that does not say it.
const COLUMNS: u16 = 80;
const ROWS: u16 = 24;

/// Whose rows they are, in the order in which they stand.
pub(super) type Owner = (usize, u8);

#[derive(Debug, Default)]
pub(super) struct Region {
    rows: BTreeMap<Owner, Vec<Vec<u8>>>,
    /// How many rows of the terminal it takes now.
    drawn: usize,
    /// When it is drawn again.
    due: Option<Instant>,
    last: Option<Instant>,
}

impl Region {
    /// The rows of an owner from now on; none takes it out.
    pub(super) fn set(&mut self, owner: Owner, rows: Vec<Vec<u8>>, now: Instant) {
        let before = match rows.is_empty() {
            true => self.rows.remove(&owner),
            false => self.rows.insert(owner, rows),
        };
        if before.as_ref() != self.rows.get(&owner) {
            let soonest = self.last.map_or(now, |last| last + PAUSE);
            self.due.get_or_insert(soonest.max(now));
        }
    }

    /// It cannot be drawn now.
    pub(super) fn put_off(&mut self, now: Instant) {
        self.due = Some(now + PAUSE);
    }

    /// Nothing is drawn, and nothing is to be.
    pub(super) fn is_empty(&self) -> bool {
        self.drawn == 0 && self.rows.is_empty()
    }

    pub(super) fn due(&self) -> Option<Instant> {
        self.due
    }

    /// Appends what takes it off the terminal; the cursor stands where it began.
    pub(super) fn erase(&mut self, out: &mut Vec<u8>) {
        if self.drawn > 0 {
            out.extend_from_slice(format!("\r\x1b[{}A\x1b[J", self.drawn).as_bytes());
            self.drawn = 0;
        }
    }

    /// Appends what draws it, over what was drawn before.
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
            // Nothing is written in the last column, which some terminals wrap after.
            let cut = console::truncate_str(&row, usize::from(columns).saturating_sub(1), "");
            let _ = writeln!(text, "{cut}\x1b[0m\x1b[K");
        }
        if shown.len() < self.drawn {
            text += "\x1b[J";
        }
        self.drawn = shown.len();
        (self.due, self.last) = (None, Some(now));
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
    fn rows_stand_in_order_and_are_drawn_over_those_before() {
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
    fn rows_fit_the_terminal() {
        let (mut region, now) = (Region::default(), Instant::now());
        (0..9).for_each(|rank| region.set((rank, 0), vec!["\x1b[36m█████x".into()], now));
        let text = drawn(&mut region, size(5, 4), now);
        assert_eq!(text, "\x1b[36m████\n".repeat(3));
        assert_eq!(
            drawn(&mut region, size(0, 0), now).lines().count(),
            9,
            "control: a size that is not known"
        );
    }

    #[test]
    fn it_is_drawn_at_most_every_so_often() {
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
        assert_eq!(region.due(), Some(now + PAUSE), "it is not put off for ever");
    }
}
