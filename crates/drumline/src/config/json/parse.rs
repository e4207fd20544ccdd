//! Reads maps and lists, within limits.

use super::scanner::{Scanner, fails, unexpected};
use super::{Entry, JsonError, JsonProblem, MAX_BYTES, MAX_DEPTH, Node, Position, Value};

type Result<T> = std::result::Result<T, JsonError>;

/// Reads a text that is one value, usually a map.
///
/// ```
/// use drumline::config::json::parse;
///
/// let config = parse("{\"fp16\": {\"enabled\": True,}, # both\n steps: 5e8}").unwrap();
/// assert_eq!(config.value.to_string(), r#"{"fp16": {"enabled": true}, "steps": 5e8}"#);
/// assert_eq!(config.get("steps").unwrap().at.line, 2);
///
/// let error = parse("{\n\"a\": 1,\n\"a\": 2}").unwrap_err();
/// assert_eq!(error.to_string(), "3:1: the key a appears twice, first in line 2; try to remove one of them");
/// ```
pub fn parse(text: &str) -> Result<Node> {
    let start = Position { line: 1, column: 1 };
    if text.len() > MAX_BYTES {
        return Err(fails(start, JsonProblem::TooLong { bytes: text.len() }));
    }
    let mut scanner = Scanner::new(text);
    scanner.skip_blank()?;
    if scanner.peek().is_none() {
        return Err(fails(start, JsonProblem::Empty));
    }
    let root = value(&mut scanner, 0)?;
    scanner.skip_blank()?;
    match scanner.peek() {
        None => Ok(root),
        got => Err(fails(scanner.at(), unexpected("the end of the text", got))),
    }
}

fn value(scanner: &mut Scanner<'_>, depth: usize) -> Result<Node> {
    let at = scanner.at();
    let value = match scanner.peek() {
        Some('{' | '[') if depth == MAX_DEPTH => return Err(fails(at, JsonProblem::TooDeep)),
        Some('{') => Value::Map(map(scanner, depth + 1)?),
        Some('[') => Value::List(list(scanner, depth + 1)?),
        Some('"' | '\'') => Value::Text(scanner.quoted()?),
        _ => scanner.plain_value()?,
    };
    Ok(Node { value, at })
}

fn map(scanner: &mut Scanner<'_>, depth: usize) -> Result<Vec<Entry>> {
    let begin = scanner.at();
    scanner.next();
    let mut entries: Vec<Entry> = Vec::new();
    loop {
        scanner.skip_blank()?;
        let at = scanner.at();
        match scanner.peek() {
            None => return Err(fails(begin, JsonProblem::NoEnd { what: "a map", end: "}" })),
            Some('}') => break,
            _ => {}
        }
        let key = match scanner.peek() {
            Some('"' | '\'') => scanner.quoted()?,
            _ => scanner.plain_key()?,
        };
        if let Some(first) = entries.iter().find(|entry| entry.key == key) {
            return Err(fails(at, JsonProblem::Duplicate { key, first: first.at.line }));
        }
        scanner.skip_blank()?;
        if !scanner.accept(':') {
            return Err(fails(scanner.at(), unexpected("a colon after the key", scanner.peek())));
        }
        scanner.skip_blank()?;
        entries.push(Entry { key, at, node: value(scanner, depth)? });
        separator(scanner, '}')?;
    }
    scanner.next();
    Ok(entries)
}

fn list(scanner: &mut Scanner<'_>, depth: usize) -> Result<Vec<Node>> {
    let begin = scanner.at();
    scanner.next();
    let mut nodes = Vec::new();
    loop {
        scanner.skip_blank()?;
        match scanner.peek() {
            None => return Err(fails(begin, JsonProblem::NoEnd { what: "a list", end: "]" })),
            Some(']') => break,
            _ => {}
        }
        nodes.push(value(scanner, depth)?);
        separator(scanner, ']')?;
    }
    scanner.next();
    Ok(nodes)
}

/// Reads what separates two values: a comma or the end of the line. Before the end of the map or list nothing is needed.
fn separator(scanner: &mut Scanner<'_>, end: char) -> Result<()> {
    let line = scanner.at().line;
    scanner.skip_blank()?;
    let is_apart = scanner.accept(',') || scanner.at().line > line;
    match scanner.peek() {
        None => Ok(()),
        Some(letter) if is_apart || letter == end => Ok(()),
        got => Err(fails(scanner.at(), unexpected("a comma", got))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read(text: &str) -> String {
        parse(text).unwrap().value.to_string()
    }

    fn error(text: &str) -> String {
        parse(text).unwrap_err().to_string()
    }

    #[test]
    fn plain_json_is_read_as_json() {
        let text = r#"{"a": [1, -2.5, 5e8, 1E-5], "b": {"c": null}, "d": "x\n\"\u00e9\ud83e\udd41", "e": [], "f": {}}"#;
        let node = parse(text).unwrap();
        let again: serde_json::Value = serde_json::from_str(&node.value.to_string()).unwrap();
        assert_eq!(again, serde_json::from_str::<serde_json::Value>(text).unwrap());
    }

    #[test]
    fn what_people_write_beside_json_is_accepted() {
        for (text, read_as) in [
            ("{\"a\": 1, // one\n \"b\": 2 # two\n}", r#"{"a": 1, "b": 2}"#),
            ("/* both\nlines */ {\"a\": 1,}", r#"{"a": 1}"#),
            ("{\"a\": [1, 2,],}", r#"{"a": [1, 2]}"#),
            ("{'a': 'it is \"so\"'}", r#"{"a": "it is \"so\""}"#),
            ("{a: True, b: False, c: None}", r#"{"a": true, "b": false, "c": null}"#),
            ("{a: TRUE\n b: auto\n}", r#"{"a": true, "b": "auto"}"#),
            ("{nvme_path: /local//nvme, x: 1}", r#"{"nvme_path": "/local//nvme", "x": 1}"#),
            ("{path: /a b/c // why\n}", r#"{"path": "/a b/c"}"#),
            ("{a: 5e8//all\n, b: True/* so */}", r#"{"a": 5e8, "b": true}"#),
            (
                "{steps: Infinity, low: -Infinity, no: NaN}",
                r#"{"steps": Infinity, "low": -Infinity, "no": NaN}"#,
            ),
            ("\u{feff}{\"a\": +1, \"b\": .5, \"c\": 5.}", r#"{"a": +1, "b": .5, "c": 5.}"#),
            ("{\"a\"\n:\n1\n,\"b\":2}", r#"{"a": 1, "b": 2}"#),
            ("[]", "[]"),
        ] {
            assert_eq!(read(text), read_as, "{text}");
        }
    }

    #[test]
    fn positions_are_those_of_an_editor() {
        let node = parse("{\n  \"é\": {\n    \"b\": [7]\n  }\n}").unwrap();
        assert_eq!(node.get("é").unwrap().at, Position { line: 2, column: 8 });
        let Value::List(list) = &node.get("é").unwrap().get("b").unwrap().value else { panic!("a list") };
        assert_eq!(list[0].at, Position { line: 3, column: 11 });
    }

    #[test]
    fn errors_name_line_and_column() {
        for (text, words) in [
            ("", "1:1: there is nothing but white space; try {\"train_batch_size\": 32}"),
            ("{\"a\": 1", "1:1: a map has no end; try } after it"),
            ("{\"a\": [1, 2", "1:7: a list has no end; try ] after it"),
            ("{\"a\n\": 1}", "1:2: a text in quotes has no end; try \" after it"),
            ("{\n/* x", "2:1: a comment has no end; try */ after it"),
            ("{\"a\" 1}", "1:6: expected a colon after the key, got `1`"),
            ("{\"a\": }", "1:7: expected a value, got `}`"),
            ("{\"a\": 1 \"b\": 2}", "1:7: expected a comma before the next text in quotes, got `1`"),
            ("{\"a\": {} \"b\": 2}", "1:10: expected a comma, got `\"`"),
            ("{,}", "1:2: expected a key in quotes, got `,`"),
            ("{} x", "1:4: expected the end of the text, got `x`"),
            ("{\"a\": 1e400}", "1:7: 1e400 is not a number; try one such as 0.1, 500 or 5e8"),
            ("{\"a\": 1_000}", "1:7: 1_000 is not a number; try one such as 0.1, 500 or 5e8"),
            (
                "{\"a\": \"C:\\data\"}",
                "1:10: a text has the escape \\d, which does not exist; try two backslashes",
            ),
            (
                "{\"a\": \"\\ud800\"}",
                "1:8: a text has the escape \\ud800, which does not exist; try two backslashes",
            ),
        ] {
            assert_eq!(error(text), words, "{text}");
        }
    }

    #[test]
    fn a_key_twice_is_an_error_at_any_depth() {
        assert_eq!(
            error("{\"z\": {\"a\": 1,\n \"b\": 2,\n 'a': 3}}"),
            "3:2: the key a appears twice, first in line 1; try to remove one of them"
        );
        assert_eq!(read("{\"z\": {\"a\": 1}, \"a\": 2}"), r#"{"z": {"a": 1}, "a": 2}"#);
    }

    #[test]
    fn size_and_depth_are_limited() {
        let deep = |depth: usize| "[".repeat(depth) + &"]".repeat(depth);
        assert!(parse(&deep(MAX_DEPTH)).is_ok());
        assert_eq!(error(&deep(MAX_DEPTH + 1)), "1:65: maps and lists are more than 64 deep; try fewer");
        assert!(error(&" ".repeat(MAX_BYTES + 1)).contains("the text has 1048577 bytes"));
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_is_an_error_in_it(text in r#"[\[\]{}:,"'\\/*#\n a1.eé_-]{0,40}"#) {
            match parse(&text) {
                Ok(node) => {
                    let shown = node.value.to_string();
                    prop_assert_eq!(parse(&shown).unwrap().value.to_string(), shown);
                }
                Err(error) => {
                    let lines: Vec<_> = text.split('\n').collect();
                    let line = lines.get(error.at.line - 1);
                    prop_assert!(line.is_some_and(|line| error.at.column <= line.chars().count() + 1), "{}", error);
                }
            }
        }
    }

    #[test]
    fn what_is_shown_is_read_as_the_same() {
        for text in ["{a: [1, {b: 'x\\ny'}], c: None, d: Infinity}", "[\"\\u0001\", \"#no\", -0.0]"] {
            let shown = read(text);
            assert_eq!(read(&shown), shown);
        }
    }
}
