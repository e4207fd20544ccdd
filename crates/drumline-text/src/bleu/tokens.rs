//! Splits sentences into the tokens that BLEU compares.
//!
//! *13a* is a list of regular-expression replacements. Each runs over the whole line from left to right, and its matches do not
//! overlap.

use super::{BleuOptions, BleuTokens, Case};

impl BleuOptions {
    pub(super) fn split(&self, text: &str) -> Vec<String> {
        let text = match self.case {
            Case::Mixed => text.to_owned(),
            Case::Lower => text.to_lowercase(),
        };
        let text = text.trim_end_matches(is_space);
        match self.tokens {
            BleuTokens::Mteval13a => mteval_13a(text),
            BleuTokens::Characters => text.chars().filter(|c| !is_space(*c)).map(String::from).collect(),
            BleuTokens::Words => at_spaces(text),
        }
    }
}

/// White space as in Python, which includes four separators of ASCII.
fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\x1c'..='\x1f').contains(&c)
}

fn at_spaces(text: &str) -> Vec<String> {
    text.split(is_space).filter(|word| !word.is_empty()).map(str::to_owned).collect()
}

pub(super) fn mteval_13a(line: &str) -> Vec<String> {
    let line = line.replace("<skipped>", "").replace("-\n", "").replace('\n', " ");
    let line = line.replace("&quot;", "\"").replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">");
    let separate = |c| if is_symbol(c) { vec![' ', c, ' '] } else { vec![c] };
    let characters: Vec<char> = format!(" {line} ").chars().flat_map(separate).collect();
    let characters =
        replace_pairs(&characters, |a, b| (!a.is_ascii_digit() && is_stop(b)).then_some([a, ' ', b, ' ']));
    let characters =
        replace_pairs(&characters, |a, b| (is_stop(a) && !b.is_ascii_digit()).then_some([' ', a, ' ', b]));
    let characters =
        replace_pairs(&characters, |a, b| (a.is_ascii_digit() && b == '-').then_some([a, ' ', b, ' ']));
    at_spaces(&String::from_iter(characters))
}

/// The ASCII punctuation that is always a token of its own: all but the apostrophe, comma, dash and full stop.
fn is_symbol(c: char) -> bool {
    c.is_ascii_punctuation() && !matches!(c, '\'' | ',' | '-' | '.')
}

fn is_stop(c: char) -> bool {
    matches!(c, '.' | ',')
}

/// Replaces two consecutive characters by four where `replacement` returns them. Matches do not overlap.
fn replace_pairs(text: &[char], replacement: impl Fn(char, char) -> Option<[char; 4]>) -> Vec<char> {
    let mut out = Vec::with_capacity(text.len() + text.len() / 4);
    let mut rest = text;
    while let [first, behind @ ..] = rest {
        let four = behind.first().and_then(|second| replacement(*first, *second));
        match four {
            Some(four) => out.extend(four),
            None => out.push(*first),
        }
        rest = if four.is_some() { &behind[1..] } else { behind };
    }
    out
}
