//! Splits a stream into whole lines, each behind a prefix, so that output of different ranks never mixes within a line.
//!
//! In: bytes as they arrive. Out: `[rank 3]: …\n` pieces, each written at once. An unfinished line is held until its
//! end. A line longer than [`LONGEST_LINE`] is split there, so that a rank without newlines needs no more memory than
//! that.
//!
//! A row that is rewritten after a carriage return is a *bar* (tqdm, wandb): each text is a *state*, which replaces the
//! one before, as on a terminal. Text that was in the row before the bar is a line. Only the state that a newline ends
//! becomes a line. [`Lines::states`] and [`Lines::emit_states`] show the other states meanwhile. Bars below each other,
//! which move the cursor up again (`ESC [ A`), are separate rows. Nothing that a rank writes can change an emitted line
//! or a prefix.

use memchr::{memchr2, memmem};

use crate::logs::visible;

/// The length at which a line is split.
pub(crate) const LONGEST_LINE: usize = 64 << 10;

/// How much memory an unfinished line may keep between lines.
const SMALL: usize = 4 << 10;

/// How many bars below each other are tracked.
const MOST_ROWS: usize = 16;

/// Sequences that clear a row, or the rest of it.
const CLEARS: [&[u8]; 3] = [b"\x1b[K", b"\x1b[0K", b"\x1b[2K"];

/// How the bytes of a line are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rendering {
    /// Unchanged.
    Raw,
    /// Safe for a terminal.
    Visible,
}

/// One unfinished row.
#[derive(Debug, Default)]
struct Row {
    text: Vec<u8>,
    /// Whether the cursor is at its start, so that the next text replaces this one.
    returned: bool,
    /// Whether it began with a carriage return or was rewritten.
    is_bar: bool,
    /// Whether its text was emitted as a line.
    is_emitted: bool,
    /// The previous state, unless that was emitted.
    before: Vec<u8>,
}

impl Row {
    fn is_fresh(&self) -> bool {
        self.text.is_empty() && !self.returned
    }

    fn is_blank(&self) -> bool {
        bare(&self.text).is_empty()
    }

    fn has_state(&self) -> bool {
        self.is_bar && !self.is_blank()
    }

    /// Begins the next state.
    fn redraw(&mut self) {
        self.before.clear();
        if !self.is_emitted {
            std::mem::swap(&mut self.before, &mut self.text);
        }
        self.text.clear();
        self.returned = false;
        self.is_bar = true;
    }

    /// The text to show.
    fn shown(&self) -> &[u8] {
        if self.is_bar { bare(&self.text) } else { &self.text }
    }

    fn clear(&mut self) {
        if self.text.capacity() > SMALL {
            self.text = Vec::new();
        }
        self.text.clear();
        self.before.clear();
        self.returned = false;
        self.is_bar = false;
        self.is_emitted = false;
    }
}

/// One stream's unfinished rows; usually one.
#[derive(Debug)]
pub(crate) struct Lines {
    prefix: String,
    rendering: Rendering,
    /// If not empty, only lines that contain one of these are emitted.
    only: Vec<String>,
    rows: Vec<Row>,
    /// The index of the row with the cursor.
    at: usize,
    /// The last state of a bar that erased itself before that state was emitted.
    erased: Vec<u8>,
}

impl Lines {
    pub(crate) fn new(prefix: String, rendering: Rendering) -> Self {
        Self { prefix, rendering, only: Vec::new(), rows: vec![Row::default()], at: 0, erased: Vec::new() }
    }

    /// Emits only lines that contain one of `texts`, unchanged.
    pub(crate) fn filtered(prefix: String, texts: &[String]) -> Self {
        Self { only: texts.to_vec(), ..Self::new(prefix, Rendering::Raw) }
    }

    /// Processes bytes that were read, and appends each completed line to `out`.
    pub(crate) fn feed(&mut self, mut bytes: &[u8], out: &mut Vec<u8>) {
        while let Some(at) = memchr2(b'\n', b'\r', bytes) {
            match bytes[at] {
                b'\n' => self.line_feed(&bytes[..at], out),
                _ => self.carriage_return(&bytes[..at], out),
            }
            bytes = &bytes[at + 1..];
        }
        self.write(bytes, out);
    }

    /// Emits what is unfinished, at the end of the stream.
    pub(crate) fn finish(&mut self, out: &mut Vec<u8>) {
        if self.rows.len() > 1 || !self.rows[0].text.is_empty() {
            self.commit(out);
        }
    }

    /// The current states of the bars, each behind the prefix and without a newline.
    pub(crate) fn states(&self) -> impl Iterator<Item = Vec<u8>> {
        self.rows.iter().filter(|row| row.has_state()).map(|row| {
            let mut state = self.prefix.as_bytes().to_vec();
            self.show(row.shown(), &mut state);
            state
        })
    }

    /// Whether a bar has a state that was not emitted as a line.
    pub(crate) fn has_pending_state(&self) -> bool {
        let is_pending = self.rows.iter().any(|row| row.has_state() && !row.is_emitted);
        is_pending || (!self.erased.is_empty() && !self.rows.iter().any(Row::has_state))
    }

    /// Appends those states as lines. The last state of an erased bar is appended only if no other bar is drawn.
    pub(crate) fn emit_states(&mut self, out: &mut Vec<u8>) {
        let erased = std::mem::take(&mut self.erased);
        if !erased.is_empty() && !self.rows.iter().any(Row::has_state) {
            self.emit(&erased, out);
        }
        let mut rows = std::mem::take(&mut self.rows);
        for row in rows.iter_mut().filter(|row| row.has_state() && !row.is_emitted) {
            self.emit(row.shown(), out);
            row.is_emitted = true;
        }
        self.rows = rows;
    }

    fn line_feed(&mut self, piece: &[u8], out: &mut Vec<u8>) {
        if self.rows.len() == 1 && self.rows[0].is_fresh() && piece.len() <= LONGEST_LINE {
            return self.emit(piece, out);
        }
        self.write(piece, out);
        self.follow_cursor_up();
        if self.at + 1 == self.rows.len() {
            return self.commit(out);
        }
        self.at += 1;
        self.rows[self.at].returned = true;
    }

    fn carriage_return(&mut self, piece: &[u8], out: &mut Vec<u8>) {
        self.write(piece, out);
        self.follow_cursor_up();
        let row = &mut self.rows[self.at];
        row.returned = true;
        row.is_bar |= row.text.is_empty();
        if !row.is_blank() {
            self.erased.clear();
        } else if !bare(&row.before).is_empty() {
            self.erased = bare(&row.before).to_vec();
            row.before.clear();
        }
    }

    /// Appends text to the row with the cursor.
    fn write(&mut self, mut piece: &[u8], out: &mut Vec<u8>) {
        if piece.is_empty() {
            return;
        }
        if self.rows[self.at].returned {
            self.redraw(out);
        }
        self.rows[self.at].is_emitted = false;
        while self.rows[self.at].text.len() + piece.len() > LONGEST_LINE {
            let mut text = std::mem::take(&mut self.rows[self.at].text);
            let (head, rest) = piece.split_at(LONGEST_LINE - text.len());
            text.extend_from_slice(head);
            self.emit(&text, out);
            piece = rest;
        }
        self.rows[self.at].text.extend_from_slice(piece);
    }

    /// Makes room for the next text of the row. The old text is a state of a bar, or a line from before the bar.
    fn redraw(&mut self, out: &mut Vec<u8>) {
        let row = &self.rows[self.at];
        let is_line = !row.is_bar && !row.is_blank();
        if is_line {
            self.emit(&row.text, out);
        }
        let row = &mut self.rows[self.at];
        row.is_emitted |= is_line;
        row.redraw();
    }

    /// Follows a bar that ends by moving the cursor up. Lines above its rows were emitted and do not change.
    fn follow_cursor_up(&mut self) {
        let row = &mut self.rows[self.at];
        let mut up = 0;
        while let Some((len, rows)) = moves_up(&row.text).filter(|_| row.is_bar) {
            row.text.truncate(len);
            up += rows;
        }
        for _ in 0..up.min(MOST_ROWS) {
            match self.at {
                0 if self.rows.len() < MOST_ROWS => self.rows.insert(0, Row::default()),
                at => self.at = at.saturating_sub(1),
            }
        }
    }

    /// Emits all rows as lines. Of bars, and of several rows, only those that are not blank.
    fn commit(&mut self, out: &mut Vec<u8>) {
        let mut rows = std::mem::take(&mut self.rows);
        let is_alone = rows.len() == 1;
        let is_empty_line = |row: &Row| is_alone && (!row.is_bar || row.text.is_empty());
        let is_line = |row: &&Row| !row.is_emitted && (!row.is_blank() || is_empty_line(row));
        for row in rows.iter().filter(is_line) {
            self.emit(row.shown(), out);
        }
        rows.truncate(1);
        rows[0].clear();
        self.rows = rows;
        self.at = 0;
    }

    fn emit(&self, line: &[u8], out: &mut Vec<u8>) {
        let holds = |text: &String| memmem::find(line, text.as_bytes()).is_some();
        if !self.only.is_empty() && !self.only.iter().any(holds) {
            return;
        }
        out.extend_from_slice(self.prefix.as_bytes());
        self.show(line, out);
        out.push(b'\n');
    }

    fn show(&self, line: &[u8], out: &mut Vec<u8>) {
        match self.rendering {
            Rendering::Raw => out.extend_from_slice(line),
            Rendering::Visible => visible(line, out),
        }
    }
}

/// A bar's state without trailing blanks and without the sequences that only clear or leave its row.
fn bare(state: &[u8]) -> &[u8] {
    let mut state = state.trim_ascii_end();
    let clear_at_end =
        |state: &'_ [u8]| CLEARS.iter().find(|clear| state.ends_with(clear)).map(|clear| clear.len());
    while let Some(len) =
        clear_at_end(state).map(|len| state.len() - len).or(moves_up(state).map(|(len, _)| len))
    {
        state = state[..len].trim_ascii_end();
    }
    while let Some(rest) = CLEARS.iter().find_map(|clear| state.strip_prefix(*clear)) {
        state = rest;
    }
    state
}

/// If the text ends in `ESC [ n A`: the length before it, and n.
fn moves_up(text: &[u8]) -> Option<(usize, usize)> {
    let parameter = text.strip_suffix(b"A")?;
    let digits = parameter.iter().rev().take_while(|byte| byte.is_ascii_digit()).count();
    let (rest, number) = parameter.split_at(parameter.len() - digits);
    let before = rest.strip_suffix(b"\x1b[")?;
    let number = std::str::from_utf8(number).ok()?;
    let rows = if number.is_empty() { 1 } else { number.parse().ok()? };
    Some((before.len(), rows))
}

#[cfg(test)]
mod tests;
