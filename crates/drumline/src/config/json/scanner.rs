//! Reads white space, comments, texts and words from a text, and keeps count of lines and columns.

use super::{JsonError, JsonProblem, Number, Position, Value};

type Result<T> = std::result::Result<T, JsonError>;

/// Where a text has been read to.
#[derive(Debug, Clone)]
pub(super) struct Scanner<'a> {
    rest: &'a str,
    at: Position,
}

/// Characters that end a word without quotes.
const ENDS: [char; 6] = [',', '}', ']', '{', '[', '\n'];

impl<'a> Scanner<'a> {
    pub(super) fn new(text: &'a str) -> Self {
        Self { rest: text.strip_prefix('\u{feff}').unwrap_or(text), at: Position { line: 1, column: 1 } }
    }

    pub(super) fn at(&self) -> Position {
        self.at
    }

    pub(super) fn peek(&self) -> Option<char> {
        self.rest.chars().next()
    }

    /// Reads one character.
    pub(super) fn next(&mut self) -> Option<char> {
        let letter = self.peek()?;
        self.rest = &self.rest[letter.len_utf8()..];
        self.at = if letter == '\n' {
            Position { line: self.at.line + 1, column: 1 }
        } else {
            Position { column: self.at.column + 1, ..self.at }
        };
        Some(letter)
    }

    /// Reads a character if it is this one.
    pub(super) fn accept(&mut self, letter: char) -> bool {
        let is_here = self.peek() == Some(letter);
        if is_here {
            self.next();
        }
        is_here
    }

    fn skip(&mut self, letters: usize) {
        for _ in 0..letters {
            self.next();
        }
    }

    /// Reads white space and comments.
    pub(super) fn skip_blank(&mut self) -> Result<()> {
        loop {
            if self.peek().is_some_and(char::is_whitespace) {
                self.next();
            } else if self.rest.starts_with('#') || self.rest.starts_with("//") {
                self.skip_line();
            } else if self.rest.starts_with("/*") {
                self.skip_block_comment()?;
            } else {
                return Ok(());
            }
        }
    }

    fn skip_line(&mut self) {
        while self.peek().is_some_and(|letter| letter != '\n') {
            self.next();
        }
    }

    fn skip_block_comment(&mut self) -> Result<()> {
        let begin = self.at;
        self.skip(2);
        while !self.rest.starts_with("*/") {
            if self.next().is_none() {
                return Err(fails(begin, JsonProblem::NoEnd { what: "a comment", end: "*/" }));
            }
        }
        self.skip(2);
        Ok(())
    }

    /// Reads a text in quotes, whose first one is next.
    pub(super) fn quoted(&mut self) -> Result<String> {
        let begin = self.at;
        let quote = self.next().unwrap_or('"');
        let end = if quote == '"' { "\"" } else { "'" };
        let mut text = String::new();
        loop {
            let at = self.at;
            match self.next() {
                None | Some('\n') => {
                    return Err(fails(begin, JsonProblem::NoEnd { what: "a text in quotes", end }));
                }
                Some('\\') => text.push(self.escape(at)?),
                Some(letter) if letter == quote => return Ok(text),
                Some(letter) => text.push(letter),
            }
        }
    }

    /// Reads what follows a backslash.
    fn escape(&mut self, at: Position) -> Result<char> {
        let letter = self.next();
        Ok(match letter {
            Some(letter @ ('"' | '\'' | '\\' | '/')) => letter,
            Some('n') => '\n',
            Some('t') => '\t',
            Some('r') => '\r',
            Some('b') => '\u{8}',
            Some('f') => '\u{c}',
            Some('u') => return self.unicode(at),
            other => {
                let escape = format!("\\{}", other.map(String::from).unwrap_or_default());
                return Err(fails(at, JsonProblem::Escape { escape }));
            }
        })
    }

    /// Reads the digits of `\uXXXX`, and of a second one if the first is half of a pair.
    fn unicode(&mut self, at: Position) -> Result<char> {
        let escape = |digits: &str| fails(at, JsonProblem::Escape { escape: format!("\\u{digits}") });
        let first = self.hex();
        let code = u32::from_str_radix(&first, 16).ok().filter(|_| first.len() == 4);
        let code = code.ok_or_else(|| escape(&first))?;
        if !(0xd800..0xdc00).contains(&code) {
            return char::from_u32(code).ok_or_else(|| escape(&first));
        }
        let has_second = self.accept('\\') && self.accept('u');
        let second = if has_second { self.hex() } else { String::new() };
        let low = u32::from_str_radix(&second, 16).ok().filter(|low| (0xdc00..0xe000).contains(low));
        let low = low.ok_or_else(|| escape(&first))?;
        char::from_u32(0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00)).ok_or_else(|| escape(&first))
    }

    /// Up to four hexadecimal digits.
    fn hex(&mut self) -> String {
        let mut digits = String::new();
        while digits.len() < 4
            && let Some(digit) = self.peek().filter(char::is_ascii_hexdigit)
        {
            digits.push(digit);
            self.next();
        }
        digits
    }

    /// Reads a key without quotes, up to its colon.
    pub(super) fn plain_key(&mut self) -> Result<String> {
        let begin = self.at;
        let mut key = String::new();
        while let Some(letter) = self.peek()
            && !letter.is_whitespace()
            && !ENDS.contains(&letter)
            && !matches!(letter, ':' | '"' | '\'')
        {
            key.push(letter);
            self.next();
        }
        if key.is_empty() {
            return Err(fails(begin, unexpected("a key in quotes", self.peek())));
        }
        Ok(key)
    }

    /// Reads a value without quotes: a number, a word with a meaning, or a text up to the end of its line.
    pub(super) fn plain_value(&mut self) -> Result<Value> {
        let begin = self.at;
        let mut text = String::new();
        while let Some(letter) = self.peek()
            && !ENDS.contains(&letter)
            && !self.begins_comment(&text)
        {
            if letter == '"' {
                let got = format!("`{}`", text.trim_end());
                let expected = "a comma before the next text in quotes";
                return Err(fails(begin, JsonProblem::Unexpected { expected, got }));
            }
            text.push(letter);
            self.next();
        }
        let word = text.trim_end();
        if word.is_empty() {
            return Err(fails(begin, unexpected("a value", self.peek())));
        }
        meaning(word).map_err(|problem| fails(begin, problem))
    }

    /// Whether a comment follows the text. `//` in the middle of a text is none: it may be a path.
    fn begins_comment(&self, text: &str) -> bool {
        let is_apart = || text.is_empty() || text.ends_with(char::is_whitespace);
        let is_complete = || !matches!(meaning(text), Ok(Value::Text(_)) | Err(_));
        ["#", "//", "/*"].iter().any(|begin| self.rest.starts_with(begin)) && (is_apart() || is_complete())
    }
}

/// A word's meaning. What begins like a number must be one.
fn meaning(word: &str) -> std::result::Result<Value, JsonProblem> {
    let number = |value| Value::Number(Number { value, written: word.to_owned() });
    Ok(match word {
        "null" | "None" => Value::Null,
        "true" | "True" | "TRUE" => Value::Bool(true),
        "false" | "False" | "FALSE" => Value::Bool(false),
        "Infinity" | "inf" | "+Infinity" => number(f64::INFINITY),
        "-Infinity" | "-inf" => number(f64::NEG_INFINITY),
        "NaN" | "nan" => number(f64::NAN),
        _ => match numeric(word) {
            Some(value) if value.is_finite() => number(value),
            Some(_) => return Err(JsonProblem::Number { written: word.to_owned() }),
            None => Value::Text(word.to_owned()),
        },
    })
}

/// The value of a word that begins like a number; `NaN` if it is none.
fn numeric(word: &str) -> Option<f64> {
    let unsigned = word.strip_prefix(['-', '+']).unwrap_or(word);
    let begins = unsigned.starts_with(|letter: char| letter.is_ascii_digit())
        || unsigned.strip_prefix('.').is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
    begins.then(|| word.parse().unwrap_or(f64::NAN))
}

pub(super) fn fails(at: Position, problem: JsonProblem) -> JsonError {
    JsonError { at, problem }
}

pub(super) fn unexpected(expected: &'static str, got: Option<char>) -> JsonProblem {
    let got = got.map_or_else(|| "the end of the text".to_owned(), |letter| format!("`{letter}`"));
    JsonProblem::Unexpected { expected, got }
}
