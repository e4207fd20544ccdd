//! Makes a worker's line safe for a terminal: it may set colours, and nothing else.
//!
//! Colour and weight (`ESC [ … m`) pass, and are reset at the end of the line. Every other control character is shown
//! as `^X`, so that no title, cursor movement, clipboard or report request reaches the terminal. Invalid UTF-8 and
//! characters that reverse the text direction are shown as `\u{fffd}`.

/// The longest sequence that counts as a colour.
const LONGEST_COLOUR: usize = 32;

/// Appends `line`, which has no newline, to `out`.
pub(crate) fn visible(line: &[u8], out: &mut Vec<u8>) {
    let before = out.len();
    for chunk in line.utf8_chunks() {
        show(chunk.valid(), out);
        if !chunk.invalid().is_empty() {
            out.extend_from_slice("\u{fffd}".as_bytes());
        }
    }
    if out[before..].contains(&0x1b) {
        out.extend_from_slice(b"\x1b[0m");
    }
}

fn show(mut text: &str, out: &mut Vec<u8>) {
    while let Some((at, harmful)) = text.char_indices().find(|(_, c)| is_harmful(*c)) {
        out.extend_from_slice(&text.as_bytes()[..at]);
        text = &text[at..];
        let taken = match colour_len(text) {
            Some(len) => {
                out.extend_from_slice(&text.as_bytes()[..len]);
                len
            }
            None => {
                show_harmful(harmful, out);
                harmful.len_utf8()
            }
        };
        text = &text[taken..];
    }
    out.extend_from_slice(text.as_bytes());
}

fn is_harmful(c: char) -> bool {
    (c.is_control() && c != '\t') || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// The length of the colour sequence that `text` begins with.
fn colour_len(text: &str) -> Option<usize> {
    let parameters = text.strip_prefix("\x1b[")?;
    let len = parameters.bytes().take_while(|byte| matches!(byte, b'0'..=b'9' | b';' | b':')).count();
    (parameters.as_bytes().get(len) == Some(&b'm') && len <= LONGEST_COLOUR).then_some(len + 3)
}

fn show_harmful(c: char, out: &mut Vec<u8>) {
    match u8::try_from(c) {
        Ok(ascii) if ascii.is_ascii() => out.extend_from_slice(&[b'^', ascii ^ 0x40]),
        _ => out.extend_from_slice("\u{fffd}".as_bytes()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_colours_pass() {
        for (line, shown) in [
            (&b"plain \xc3\xa9\t!"[..], "plain é\t!"),
            (b"\x1b[1;31mred\x1b[m", "\x1b[1;31mred\x1b[m\x1b[0m"),
            (b"\x1b[38:2:1:2:3mtrue colour", "\x1b[38:2:1:2:3mtrue colour\x1b[0m"),
            (b"\x1b[2J\x1b[H", "^[[2J^[[H"),
            (b"\x1b]0;title\x07", "^[]0;title^G"),
            (b"\x1b[6n\x1bc", "^[[6n^[c"),
            (b"\x1b[1;31", "^[[1;31"),
            (b"\x1b", "^["),
            (b"\x1b[>4m", "^[[>4m"),
            (b"\x08\x7f\0\x0b", "^H^?^@^K"),
            (b"\x9b2J", "\u{fffd}2J"),
            (b"\xc2\x9b2J", "\u{fffd}2J"),
            ("\u{202e}txet".as_bytes(), "\u{fffd}txet"),
            (b"\xff\xfe", "\u{fffd}\u{fffd}"),
            (b"", ""),
        ] {
            let mut out = Vec::new();
            visible(line, &mut out);
            assert_eq!(String::from_utf8(out).unwrap(), shown);
        }
        let mut out = Vec::new();
        visible(format!("\x1b[{}m", "1".repeat(LONGEST_COLOUR + 1)).as_bytes(), &mut out);
        assert!(!out.contains(&0x1b));
    }
}
