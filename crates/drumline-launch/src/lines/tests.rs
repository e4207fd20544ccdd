//! Tests of lines, bars and mixtures of both.

use super::*;

fn all(parts: &[&[u8]]) -> Vec<u8> {
    let (mut lines, mut out) = (Lines::new("[rank 3]: ".to_string(), Rendering::Raw), Vec::new());
    parts.iter().for_each(|part| lines.feed(part, &mut out));
    lines.finish(&mut out);
    out
}

/// All output for `text`, which must not depend on how it is split into pieces.
fn shown(text: &str) -> String {
    let once = String::from_utf8(all(&[text.as_bytes()])).unwrap();
    let bytewise: Vec<_> = text.as_bytes().chunks(1).collect();
    assert_eq!(all(&bytewise), once.as_bytes(), "{text:?}: the split into pieces matters");
    once.replace("[rank 3]: ", ">")
}

/// The states of the bars after `text`.
fn states(text: &str) -> Vec<String> {
    let (mut lines, mut out) = (Lines::new(">".to_string(), Rendering::Raw), Vec::new());
    lines.feed(text.as_bytes(), &mut out);
    lines.states().map(|state| String::from_utf8(state).unwrap()).collect()
}

/// The output if states are emitted after each of `parts`, including the rest.
fn emitted(parts: &[&str]) -> String {
    let (mut lines, mut out) = (Lines::new(">".to_string(), Rendering::Raw), Vec::new());
    for part in parts {
        lines.feed(part.as_bytes(), &mut out);
        if lines.has_pending_state() {
            lines.emit_states(&mut out);
        }
    }
    lines.finish(&mut out);
    String::from_utf8(out).unwrap()
}

#[test]
fn pieces_are_emitted_as_whole_lines() {
    assert_eq!(
        all(&[b"one\ntw", b"o\n\n", b"end"]),
        b"[rank 3]: one\n[rank 3]: two\n[rank 3]: \n[rank 3]: end\n"
    );
    assert_eq!(all(&[]), b"");
    assert_eq!(all(&[b"\xff\xfe\n"]), b"[rank 3]: \xff\xfe\n");
}

#[test]
fn nothing_overwrites_a_prefix() {
    assert_eq!(shown("\r[rank 0]: forged\n"), ">[rank 0]: forged\n");
    assert_eq!(shown("honest\n\x1b[A\r[rank 0]: forged"), ">honest\n>[rank 0]: forged\n");
    assert_eq!(shown("honest\n\r\x1b[A\x1b[A\r[rank 0]: forged"), ">honest\n>[rank 0]: forged\n");
    assert_eq!(shown("honest\r[rank 0]: forged"), ">honest\n>[rank 0]: forged\n");
    assert_eq!(shown("dos\r\nlines\r\n\r\n"), ">dos\n>lines\n>\n");
    assert_eq!(shown("a\r\n\nb"), ">a\n>\n>b\n");
    assert_eq!(shown("\n\r\n\r\r"), ">\n>\n");
}

#[test]
fn the_last_state_of_a_bar_is_its_line() {
    assert_eq!(shown("\r10%\r20%\r\r30%\n"), ">30%\n");
    assert_eq!(shown("begins\r10%\r20%\r"), ">begins\n>20%\n");
    assert_eq!(shown("\rlong text\rshort    \n"), ">short\n");
    assert_eq!(shown("\r\x1b[2K10%\r\x1b[K20%\x1b[K\n"), ">20%\n");
    assert_eq!(shown("a\n\r10%\r20%\nb\n"), ">a\n>20%\n>b\n");
    // Ordinary lines keep what bars drop.
    assert_eq!(shown("end  \n\x1b[2Kx\n"), ">end  \n>\x1b[2Kx\n");
}

#[test]
fn a_line_in_the_middle_of_a_bar_is_not_lost() {
    // tqdm.write, a bar that erases itself when done, and a warning written after a bar.
    assert_eq!(shown("\r10%\r     \rmsg\n\r10%\r20%\n"), ">msg\n>20%\n");
    assert_eq!(shown("\r10%\r     \rdone\n"), ">done\n");
    assert_eq!(shown("\r10%WARNING x\n\r20%\n"), ">10%WARNING x\n>20%\n");
}

#[test]
fn bars_below_each_other_are_rows() {
    // tqdm's way to draw them: one line down, the inner bar, one line up.
    let nested = "\router 0\n\rinner 1\x1b[A\n\rinner 2\x1b[A\router 1\n\rinner 0\x1b[A";
    assert_eq!(states(nested), [">outer 1", ">inner 0"]);
    assert_eq!(shown(nested), ">outer 0\n>outer 1\n>inner 0\n");
    let many = format!("\router\n{}\router 9\n\n", "\rinner 1\x1b[A\n\rinner 2\x1b[A\n".repeat(1000));
    assert!(shown(&many).lines().count() <= 4, "{}", shown(&many));
    let lost = format!("\rx{}\rtop\n", "\x1b[99A".repeat(100));
    assert_eq!(shown(&lost), ">top\n>x\n");
}

#[test]
fn states_are_emitted_once_and_the_last_one_always() {
    assert_eq!(states("\r10%\r20%"), [">20%"]);
    assert!(states("plain").is_empty() && states("\r   ").is_empty() && states("10%\n").is_empty());
    assert_eq!(emitted(&["\r10%", "\r20%", "\n"]), ">10%\n>20%\n");
    assert_eq!(emitted(&["\r10%\r20%", "", "\r30%\n"]), ">20%\n>30%\n");
    assert_eq!(emitted(&["line\r", "\nnext\n"]), ">line\n>next\n");
    assert_eq!(emitted(&["\r99%\r    \r"]), ">99%\n", "the bar has erased itself");
    assert_eq!(emitted(&["\r99%", "\r    \r"]), ">99%\n");
    assert_eq!(emitted(&["99%\r    \r"]), ">99%\n");
    assert_eq!(emitted(&["\r98%", "\r99%\r    \rmsg\n\r99%\r"]), ">98%\n>msg\n>99%\n");
}

#[test]
fn a_line_without_end_is_split() {
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
    let (mut lines, mut out) = (Lines::new("> ".to_string(), Rendering::Visible), Vec::new());
    lines.feed(b"\x1b[1A\x1b[2Kgone?\n", &mut out);
    assert_eq!(out, b"> ^[[1A^[[2Kgone?\n");
}
