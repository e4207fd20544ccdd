//! Cuts a stream into whole lines, each behind a prefix, so that ranks never mix inside a line.
//!
//! In: bytes as they come. Out: `[rank 3]: …\n` pieces that are written in one go. A line longer than
//! [`LONGEST_LINE`] is cut there, so that a rank without newlines costs no more memory than that.

/// Where a line is cut.
pub(crate) const LONGEST_LINE: usize = 64 << 10;

/// One stream's unfinished line.
#[derive(Debug)]
pub(crate) struct Lines {
    prefix: String,
    partial: Vec<u8>,
}

impl Lines {
    pub(crate) fn new(prefix: String) -> Self {
        Self { prefix, partial: Vec::new() }
    }

    /// Takes what was read, appends each line it completes to `out`.
    pub(crate) fn feed(&mut self, bytes: &[u8], out: &mut Vec<u8>) {
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            self.feed_piece(piece, out);
        }
    }

    /// `piece` has a newline at its end or nowhere.
    fn feed_piece(&mut self, mut piece: &[u8], out: &mut Vec<u8>) {
        loop {
            let room = LONGEST_LINE - self.partial.len();
            let line_len = piece.strip_suffix(b"\n").unwrap_or(piece).len();
            if line_len <= room {
                break;
            }
            self.partial.extend_from_slice(&piece[..room]);
            piece = &piece[room..];
            self.finish(out);
        }
        match piece.strip_suffix(b"\n") {
            Some(end) => {
                self.partial.extend_from_slice(end);
                self.emit(out);
            }
            None => self.partial.extend_from_slice(piece),
        }
    }

    /// The stream has ended: a last line without a newline gets one.
    pub(crate) fn finish(&mut self, out: &mut Vec<u8>) {
        if !self.partial.is_empty() {
            self.emit(out);
        }
    }

    fn emit(&mut self, out: &mut Vec<u8>) {
        out.extend_from_slice(self.prefix.as_bytes());
        out.append(&mut self.partial);
        out.push(b'\n');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(parts: &[&[u8]]) -> Vec<u8> {
        let (mut lines, mut out) = (Lines::new("[rank 3]: ".to_string()), Vec::new());
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
    fn a_line_without_end_is_cut() {
        let out = all(&[&vec![b'x'; LONGEST_LINE * 2 + 1], b"\n"]);
        let lengths: Vec<_> = out.split(|byte| *byte == b'\n').map(<[u8]>::len).collect();
        assert_eq!(lengths, [LONGEST_LINE + 10, LONGEST_LINE + 10, 11, 0]);
        assert_eq!(all(&[&[vec![b'x'; LONGEST_LINE], vec![b'\n']].concat()]).len(), LONGEST_LINE + 11);
    }
}
