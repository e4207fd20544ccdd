//! Turns a worker's output into lines that are safe to print: no control codes, limited line length, limited size.

/// How many of a failed worker's last lines are reported.
pub(crate) const LAST_LINES: usize = 40;
/// Only this many of the last bytes are used.
const WINDOW: usize = 1 << 20;
/// Longer lines are cut.
const LONGEST_LINE: usize = 500;

/// The lines of the last bytes, without control codes and without blank lines at the end.
pub(crate) fn lines_of(bytes: &[u8]) -> Vec<String> {
    let window = &bytes[bytes.len().saturating_sub(WINDOW)..];
    let mut lines: Vec<_> = window.split(|byte| *byte == b'\n').map(clean).collect();
    while lines.last().is_some_and(|line| line.trim().is_empty()) {
        lines.pop();
    }
    lines
}

/// What a terminal would show of a line: the last state of a progress bar, and no escape codes.
fn clean(line: &[u8]) -> String {
    let line = line.trim_ascii_end();
    let shown = line.rsplit(|byte| *byte == b'\r').next().unwrap_or_default();
    let cut = &shown[..shown.len().min(4 * LONGEST_LINE)];
    let text = without_escapes(&String::from_utf8_lossy(cut));
    let end = text.char_indices().nth(LONGEST_LINE).map_or(text.len(), |(index, _)| index);
    let is_cut = end < text.len() || cut.len() < shown.len();
    if is_cut { format!("{}… ({} bytes in all)", &text[..end], shown.len()) } else { text }
}

/// Drops whole escape sequences; any other control character becomes a replacement character.
fn without_escapes(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '\x1b' if chars.next_if_eq(&'[').is_some() => drop(chars.find(|c| ('@'..='~').contains(c))),
            '\x1b' if chars.next_if_eq(&']').is_some() => drop(chars.find(|c| matches!(c, '\x07' | '\\'))),
            '\x1b' => drop(chars.next()),
            '\t' => out.push_str("    "),
            c if c.is_control() => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_come_out_as_a_terminal_would_show_them() {
        let cases: [(&[u8], &[&str]); 9] = [
            (b"", &[]),
            (b"\n\n  \n", &[]),
            (b"one\ntwo", &["one", "two"]),
            (b"one\r\n\ntwo\r\n\n", &["one", "", "two"]),
            (b"10%\r50%\r100%\ndone\n", &["100%", "done"]),
            (b"\x1b[1;31mred\x1b[0m \x1b]0;title\x07end\n", &["red end"]),
            (b"\xff\xfe\x00x\n", &["\u{fffd}\u{fffd}\u{fffd}x"]),
            (b"\x1b", &[]),
            (b"a\tb\x07\n", &["a    b\u{fffd}"]),
        ];
        for (bytes, expected) in cases {
            assert_eq!(lines_of(bytes), expected, "{bytes:?}");
        }
    }

    #[test]
    fn only_the_last_window_of_ten_megabytes_is_used() {
        let mut bytes = b"early\n".to_vec();
        bytes.resize(10 << 20, b'x');
        bytes.extend_from_slice(b"\nlate\n");
        let lines = lines_of(&bytes);
        assert_eq!(lines.len(), 2);
        assert!(lines[0].starts_with("xxx") && lines[0].ends_with(" bytes in all)"), "{}", lines[0]);
        assert!(lines[0].len() < 600 && lines[1] == "late");
        let lines = lines_of(&b"short\n".repeat(2 << 20));
        assert!(lines.len() < WINDOW / 5 && lines[1] == "short");
    }

    #[test]
    fn random_bytes_leave_no_control_characters() {
        let mut state = 7_u64;
        let bytes: Vec<u8> = std::iter::repeat_with(|| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        })
        .take(100_000)
        .collect();
        assert!(lines_of(&bytes).iter().all(|line| !line.contains(char::is_control)));
    }
}
