//! Cuts a stream into whole lines, each behind a prefix, so that ranks never mix inside a line.
//!
//! In: bytes as they come. Out: `[rank 3]: …\n` pieces that are written in one go. A carriage return ends a line as a
//! newline does (both together are one end), so that nothing can be written over a prefix and each state of a progress
//! bar is seen; a carriage return with nothing before it shows nothing. An unfinished line is held until its end. One
//! longer than [`LONGEST_LINE`] is cut there, so that a rank without newlines costs no more memory than that.

use memchr::{memchr2, memmem};

use crate::logs::visible;

/// Where a line is cut.
pub(crate) const LONGEST_LINE: usize = 64 << 10;

/// What an unfinished line may keep allocated between lines.
const SMALL: usize = 4 << 10;

/// How the bytes of a line are shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Look {
    /// As they are.
    Raw,
    /// As a terminal may see them.
    Visible,
}

/// One stream's unfinished line.
#[derive(Debug)]
pub(crate) struct Lines {
    prefix: String,
    look: Look,
    /// If there is any, only lines with one of these in them come out.
    only: Vec<String>,
    partial: Vec<u8>,
    /// The last line was ended by a carriage return, and a newline that follows belongs to it.
    returned: bool,
}

impl Lines {
    pub(crate) fn new(prefix: String, look: Look) -> Self {
        Self { prefix, look, only: Vec::new(), partial: Vec::new(), returned: false }
    }

    /// Only lines with one of `texts` in them, as they are.
    pub(crate) fn filtered(prefix: String, texts: &[String]) -> Self {
        Self { only: texts.to_vec(), ..Self::new(prefix, Look::Raw) }
    }

    /// Takes what was read, appends each line it completes to `out`.
    pub(crate) fn feed(&mut self, mut bytes: &[u8], out: &mut Vec<u8>) {
        while let Some(at) = memchr2(b'\n', b'\r', bytes) {
            let (piece, is_return) = (&bytes[..at], bytes[at] == b'\r');
            let empty = piece.is_empty() && self.partial.is_empty();
            let second_half = empty && self.returned && !is_return;
            self.returned = is_return && !empty;
            if !(second_half || (empty && is_return)) {
                self.end_line(piece, out);
            }
            bytes = &bytes[at + 1..];
        }
        if !bytes.is_empty() {
            self.returned = false;
            self.hold(bytes, out);
        }
    }

    /// Adds to the unfinished line.
    fn hold(&mut self, mut piece: &[u8], out: &mut Vec<u8>) {
        while self.partial.len() + piece.len() > LONGEST_LINE {
            let (head, rest) = piece.split_at(LONGEST_LINE - self.partial.len());
            self.partial.extend_from_slice(head);
            self.finish(out);
            piece = rest;
        }
        self.partial.extend_from_slice(piece);
    }

    fn end_line(&mut self, piece: &[u8], out: &mut Vec<u8>) {
        if self.partial.is_empty() && piece.len() <= LONGEST_LINE {
            return self.emit(piece, out);
        }
        self.hold(piece, out);
        self.finish(out);
    }

    /// Ends the unfinished line, if there is one.
    pub(crate) fn finish(&mut self, out: &mut Vec<u8>) {
        let mut partial = std::mem::take(&mut self.partial);
        if !partial.is_empty() {
            self.emit(&partial, out);
        }
        if partial.capacity() <= SMALL {
            partial.clear();
            self.partial = partial;
        }
    }

    fn emit(&self, line: &[u8], out: &mut Vec<u8>) {
        let holds = |text: &String| memmem::find(line, text.as_bytes()).is_some();
        if !self.only.is_empty() && !self.only.iter().any(holds) {
            return;
        }
        out.extend_from_slice(self.prefix.as_bytes());
        match self.look {
            Look::Raw => out.extend_from_slice(line),
            Look::Visible => visible(line, out),
        }
        out.push(b'\n');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(parts: &[&[u8]]) -> Vec<u8> {
        let (mut lines, mut out) = (Lines::new("[rank 3]: ".to_string(), Look::Raw), Vec::new());
        parts.iter().for_each(|part| lines.feed(part, &mut out));
        lines.finish(&mut out);
        out
    }

    #[test]
    fn pieces_come_out_as_whole_lines() {
        assert_eq!(
            all(&[b"one\ntw", b"o\n\n", b"end"]),
            b"[rank 3]: one\n[rank 3]: two\n[rank 3]: \n[rank 3]: end\n"
        );
        assert_eq!(all(&[]), b"");
        assert_eq!(all(&[b"\xff\xfe\n"]), b"[rank 3]: \xff\xfe\n");
    }

    #[test]
    fn nothing_is_written_over_a_prefix() {
        let shown = |text: &str| {
            let once = String::from_utf8(all(&[text.as_bytes()])).unwrap();
            let bytewise: Vec<_> = text.as_bytes().chunks(1).collect();
            assert_eq!(all(&bytewise), once.as_bytes(), "{text:?}: the pieces it came in do not matter");
            once.replace("[rank 3]: ", ">")
        };
        assert_eq!(shown("\r[rank 0]: forged\n"), ">[rank 0]: forged\n");
        assert_eq!(shown("honest\r[rank 0]: forged"), ">honest\n>[rank 0]: forged\n");
        assert_eq!(shown("\r10%\r20%\r\r30%\n"), ">10%\n>20%\n>30%\n");
        assert_eq!(shown("dos\r\nlines\r\n\r\n"), ">dos\n>lines\n>\n");
        assert_eq!(shown("a\r\n\nb"), ">a\n>\n>b\n");
        assert_eq!(shown("\n\r\n\r\r"), ">\n>\n");
    }

    #[test]
    fn a_line_without_end_is_cut() {
        let out = all(&[&vec![b'x'; LONGEST_LINE * 2 + 1], b"\n"]);
        let lengths: Vec<_> = out.split(|byte| *byte == b'\n').map(<[u8]>::len).collect();
        assert_eq!(lengths, [LONGEST_LINE + 10, LONGEST_LINE + 10, 11, 0]);
        assert_eq!(all(&[&[vec![b'x'; LONGEST_LINE], vec![b'\n']].concat()]).len(), LONGEST_LINE + 11);
    }

    #[test]
    fn only_lines_with_a_text_pass_a_filter() {
        let texts = ["loss".to_string(), "a,b".to_string()];
        let (mut lines, mut out) = (Lines::filtered("> ".to_string(), &texts), Vec::new());
        for part in [&b"lo"[..], b"ss 1\nnothing\rLOSS\n\xffloss", b"es\n\na b\na,b"] {
            lines.feed(part, &mut out);
        }
        lines.finish(&mut out);
        assert_eq!(out, b"> loss 1\n> \xfflosses\n> a,b\n");
    }

    #[test]
    fn a_terminal_sees_no_escape_codes() {
        let (mut lines, mut out) = (Lines::new("> ".to_string(), Look::Visible), Vec::new());
        lines.feed(b"\x1b[1A\x1b[2Kgone?\n", &mut out);
        assert_eq!(out, b"> ^[[1A^[[2Kgone?\n");
    }
}
