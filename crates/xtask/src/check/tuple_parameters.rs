//! No function has a parameter that is a tuple: the fields of a struct, or separate arguments, have names.
//!
//! In: the files of all `src/` folders, without their unit tests. Out: each tuple, or reference to one, that a function takes. Closures
//! may take tuples. So may the methods of a trait's implementation, because the trait decides about their types.

use super::lexer::code_only;
use crate::workspace::Source;
use std::ops::Range;

/// Each function of the product with a parameter that is a tuple.
pub(crate) fn problems(sources: &[Source]) -> Vec<String> {
    let is_test = |path: &str| path.contains("/tests/") || path.ends_with("/tests.rs");
    let product = sources.iter().filter(|source| source.path.contains("/src/") && !is_test(&source.path));
    product.flat_map(of_source).collect()
}

fn of_source(source: &Source) -> Vec<String> {
    let code = code_only(&source.text);
    let code = without_tests(&code);
    let of_traits = trait_implementations(code);
    let functions = code.match_indices("fn ").filter(|(at, _)| starts_word(code, *at));
    let own = functions.filter(|(at, _)| !of_traits.iter().any(|range| range.contains(at)));
    let taking = own.filter_map(|(at, keyword)| {
        let (name, parameters) = signature(&code[at + keyword.len()..])?;
        let is_taking = pieces(parameters).into_iter().any(is_tuple);
        is_taking.then(|| (1 + code[..at].matches('\n').count(), name))
    });
    let problem = |(line, name)| {
        format!("{}:{line}: `{name}` takes a tuple; try a struct, or separate arguments", source.path)
    };
    taking.map(problem).collect()
}

/// The code before the tests at the foot of the file.
fn without_tests(code: &str) -> &str {
    let starts = code.match_indices("#[cfg(test)]").find(|(at, attribute)| {
        let item = code[at + attribute.len()..].trim_start().lines().next().unwrap_or_default();
        item.contains("mod ") && item.ends_with('{')
    });
    starts.map_or(code, |(at, _)| &code[..at])
}

/// Where the code of `impl Trait for Type` is.
fn trait_implementations(code: &str) -> Vec<Range<usize>> {
    let blocks = code.match_indices("impl").filter(|(at, _)| is_item(code, *at));
    let blocks = blocks.filter_map(|(at, _)| {
        let brace = at + code[at..].find('{')?;
        let is_of_trait = code[at..brace].split_whitespace().any(|word| word == "for");
        let body = enclosed(&code[brace..], "{}")?;
        is_of_trait.then(|| brace..brace + body.len())
    });
    blocks.collect()
}

fn starts_word(code: &str, at: usize) -> bool {
    !code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_')
}

/// Whether an item starts there, and not a type such as `impl Fn()`.
fn is_item(code: &str, at: usize) -> bool {
    let before = code[..at].trim_end();
    starts_word(code, at)
        && (before.is_empty() || before.ends_with(['}', ';', ']', '{']) || before.ends_with("unsafe"))
}

/// The name and the parameters of the function whose name `text` starts with.
fn signature(text: &str) -> Option<(&str, &str)> {
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '_')?;
    let (name, mut rest) = text.split_at(end);
    if rest.starts_with('<') {
        rest = &rest[enclosed(rest, BRACKETS)?.len() + 2..];
    }
    let is_function = !name.is_empty() && rest.starts_with('(');
    Some((name, enclosed(rest, BRACKETS)?)).filter(|_| is_function)
}

/// Whether this parameter, with its name or pattern, is a tuple or a reference to one.
fn is_tuple(parameter: &str) -> bool {
    let outside = outside_brackets(parameter);
    let is_colon = |at: usize| !parameter[..at].ends_with(':') && !parameter[at + 1..].starts_with(':');
    let Some((at, _)) = outside.iter().find(|(at, c)| *c == ':' && is_colon(*at)) else { return false };
    let of_reference = parameter[at + 1..].trim().trim_start_matches('&').trim_start();
    let words = of_reference.split_inclusive(' ').filter(|word| !word.starts_with('\'') && *word != "mut ");
    let plain: String = words.collect();
    plain.starts_with('(') && enclosed(&plain, BRACKETS).is_some_and(|inside| pieces(inside).len() > 1)
}

/// Pairs of brackets.
const BRACKETS: &str = "()[]{}<>";

/// What the bracket at the start of `text` encloses.
fn enclosed<'a>(text: &'a str, brackets: &str) -> Option<&'a str> {
    let mut depths = depths(text, brackets);
    let (_, first) = depths.next()?;
    let (end, _) = depths.find(|(_, depth)| *depth < first)?;
    Some(&text[1..end])
}

/// The pieces between commas that are outside all brackets.
fn pieces(text: &str) -> Vec<&str> {
    let commas = outside_brackets(text).into_iter().filter(|(_, c)| *c == ',').map(|(at, _)| at);
    let ends: Vec<_> = commas.chain([text.len()]).collect();
    let starts = std::iter::once(0).chain(ends.iter().map(|end| end + 1));
    let pieces = starts.zip(&ends).map(|(start, end)| text[start..*end].trim());
    pieces.filter(|piece| !piece.is_empty()).collect()
}

fn outside_brackets(text: &str) -> Vec<(usize, char)> {
    let places = text.char_indices().zip(depths(text, BRACKETS));
    places.filter(|(_, (_, depth))| *depth == 0).map(|(place, _)| place).collect()
}

/// How many brackets are open after each character. The `>` of an arrow is none.
fn depths<'a>(text: &'a str, brackets: &'a str) -> impl Iterator<Item = (usize, usize)> + 'a {
    let (mut depth, mut before) = (0usize, ' ');
    text.char_indices().map(move |(at, c)| {
        let is_arrow = c == '>' && matches!(before, '-' | '=');
        match brackets.find(c).filter(|_| !is_arrow) {
            Some(place) if place % 2 == 0 => depth += 1,
            Some(_) => depth = depth.saturating_sub(1),
            None => {}
        }
        before = c;
        (at, depth)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(path: &str, text: &str) -> Vec<String> {
        problems(&[Source { path: path.to_owned(), text: text.to_owned() }])
    }

    #[test]
    fn tuples_are_found_with_their_lines() {
        for (line, text) in [
            (1, "fn f(a: (u8, u8)) {}"),
            (2, "\npub(crate) fn f(&self, (a, b): (u8, Vec<u8>)) -> u8 { 0 }"),
            (
                3,
                "impl A {\n\n    fn f<T: Fn(u8) -> u8>(\n        t: T,\n        a: &'a mut (T, u8),\n    ) {}\n}",
            ),
            (1, "const fn f(Size { w, h }: Size, at: &(usize, usize)) {}"),
            (1, "trait A { fn f(&self, at: (u8, u8)); }"),
            (1, "impl<F> A<F> where F: for<'a> Fn(&'a u8) { fn f(at: (u8, u8)) {} }"),
        ] {
            let expected =
                format!("crates/a/src/b.rs:{line}: `f` takes a tuple; try a struct, or separate arguments");
            assert_eq!(found("crates/a/src/b.rs", text), [expected], "{text}");
        }
    }

    #[test]
    fn what_is_no_tuple_or_not_our_choice_is_no_problem() {
        for text in [
            "fn f(a: &(dyn Error + 'static), b: (), c: (u8)) -> (u8, u8) { (1, 2) }",
            "fn f(a: &[(u8, u8)], b: Option<(u8, u8)>, c: impl Fn((u8, u8)) -> u8, d: std::io::Error) {}",
            "fn f() { let g = |(a, b): (u8, u8)| a + b; }",
            "impl<T> Model<(T, T)> for Net { fn forward(&self, batch: &(T, T)) {} }",
            "// fn f(a: (u8, u8)) {}\nlet often = (1, 2);",
            "fn f() {}\n#[cfg(test)]\nmod tests {\n    fn g(a: (u8, u8)) {}\n}\n",
        ] {
            assert_eq!(found("crates/a/src/b.rs", text), Vec::<String>::new(), "{text}");
        }
        for path in ["crates/a/tests/it/b.rs", "crates/a/src/b/tests.rs"] {
            assert_eq!(found(path, "fn f(a: (u8, u8)) {}"), Vec::<String>::new(), "{path}");
        }
    }
}
