//! Rust source with its comments and literals blanked out, so that words can be looked for in the code alone.
//!
//! In: any text. Out: the same number of lines; text that is not valid Rust gives an answer too, never a panic.

/// `source` with comments, strings and characters replaced by spaces; line ends stay.
pub(crate) fn code_only(source: &str) -> String {
    let mut rest = source;
    let mut previous = ' ';
    let mut code = String::with_capacity(source.len());
    while let Some(first) = rest.chars().next() {
        let starts_word = !is_word(previous);
        let length = comment(rest)
            .or_else(|| if starts_word { prefixed(rest) } else { None })
            .or_else(|| literal(rest));
        let (taken, is_code) = length.map_or((first.len_utf8(), true), |length| (length, false));
        let (piece, after) = rest.split_at(taken);
        if is_code {
            code.push_str(piece);
        } else {
            code.extend(piece.chars().map(|c| if c == '\n' { '\n' } else { ' ' }));
        }
        previous = piece.chars().next_back().unwrap_or(' ');
        rest = after;
    }
    code
}

/// The words of the code, each with its line (from 1).
pub(crate) fn words(code: &str) -> impl Iterator<Item = (usize, &str)> {
    let lines = code.lines().enumerate();
    lines.flat_map(|(index, line)| line.split(|c| !is_word(c)).map(move |word| (index + 1, word)))
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Length of the comment that `text` starts with. Block comments nest.
fn comment(text: &str) -> Option<usize> {
    if text.starts_with("//") {
        return Some(text.find('\n').unwrap_or(text.len()));
    }
    if !text.starts_with("/*") {
        return None;
    }
    let (mut depth, mut at) = (0, 0);
    while let Some(found) = text[at..].find(['/', '*']) {
        at += found;
        if text[at..].starts_with("/*") {
            (depth, at) = (depth + 1, at + 2);
        } else if text[at..].starts_with("*/") {
            (depth, at) = (depth - 1, at + 2);
            if depth == 0 {
                return Some(at);
            }
        } else {
            at += 1;
        }
    }
    Some(text.len())
}

/// Length of a raw string, a byte or C string, a byte, or a raw identifier (`r#unsafe` is a name, not the keyword).
fn prefixed(text: &str) -> Option<usize> {
    for prefix in ["br", "cr", "r"] {
        if let Some(length) = text.strip_prefix(prefix).and_then(raw_string) {
            return Some(prefix.len() + length);
        }
    }
    if let Some(name) = text.strip_prefix("r#") {
        let length = name.find(|c| !is_word(c)).unwrap_or(name.len());
        return Some("r#".len() + length);
    }
    let after = text.strip_prefix(['b', 'c'])?;
    literal(after).map(|length| 1 + length)
}

/// Length of `#…#"…"#…#`.
fn raw_string(text: &str) -> Option<usize> {
    let hashes = text.len() - text.trim_start_matches('#').len();
    let body = text[hashes..].strip_prefix('"')?;
    let end = format!("\"{}", "#".repeat(hashes));
    Some(body.find(&end).map_or(text.len(), |at| hashes + 1 + at + end.len()))
}

/// Length of `"…"` or `'…'`; a lifetime is not a literal.
fn literal(text: &str) -> Option<usize> {
    let body = text.strip_prefix('\'');
    if let Some(body) = body {
        let mut characters = body.chars();
        let is_escape = characters.next()? == '\\';
        let is_character = is_escape || characters.next() == Some('\'');
        if !is_character {
            return None;
        }
    }
    let quote = text.chars().next().filter(|c| matches!(c, '"' | '\''))?;
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        if escaped {
            escaped = false;
        } else if c == '\\' {
            escaped = true;
        } else if c == quote {
            return Some(at + 1);
        }
    }
    Some(text.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn has_unsafe(source: &str) -> bool {
        words(&code_only(source)).any(|(_, word)| word == "unsafe")
    }

    #[test]
    fn the_keyword_is_found_in_code() {
        for source in [
            "unsafe { }",
            "pub unsafe fn f() {}",
            "#[unsafe(no_mangle)]",
            "/* no */ unsafe impl Send for A {}",
            "let s = \"a\\\"\"; unsafe {}",
            "let s = r#\"\"#; unsafe {}",
            "let c = '\"'; unsafe {} // \"",
            "let c = '\\''; unsafe {} '\\''",
            "fn f<'a>(x: &'a u8) { unsafe {} } fn g<'a>() {}",
            "let b = b'\\\\'; unsafe {}",
            "/* /* nested */ */ unsafe {}",
            "let url = \"http://x\"; unsafe {}",
        ] {
            assert!(has_unsafe(source), "{source}");
        }
    }

    #[test]
    fn the_word_elsewhere_is_not() {
        for source in [
            "// unsafe",
            "/* unsafe /* nested */ unsafe */",
            "//! unsafe\n/// unsafe\nfn f() {}",
            "let s = \"unsafe\";",
            "let s = \"\\\" unsafe\";",
            "let s = r\"\\\"; let t = \" unsafe \";",
            "let s = r##\"a \"# unsafe \"##;",
            "let s = b\"unsafe\"; let t = br#\"unsafe\"#; let u = c\"unsafe\"; let v = cr\"unsafe\";",
            "#![forbid(unsafe_code)] let unsafely = not_unsafe;",
            "let r#unsafe = 1;",
            "let open = \"unsafe",
            "/* open unsafe",
        ] {
            assert!(!has_unsafe(source), "{source}");
        }
    }

    #[test]
    fn line_numbers_survive() {
        let source = "/* a\nb */\nlet s = \"x\ny\";\nunsafe {}";
        let code = code_only(source);
        let found: Vec<_> = words(&code).filter(|(_, word)| *word == "unsafe").collect();
        assert_eq!(found, [(5, "unsafe")]);
    }
}
