//! Lines of prose on pages have at most [`WIDTH`] characters.
//!
//! In: the pages. Tables and code blocks may be wider, and so may a line without a space at which it could be broken, such as an
//! address. Out: a line for each line of a page that is too long.

use super::pages::Page;

/// The most characters of a line.
const WIDTH: usize = 120;

/// The lines of prose that are too long.
pub(crate) fn problems(pages: &[Page]) -> Vec<String> {
    pages.iter().flat_map(problems_of_page).collect()
}

fn problems_of_page(page: &Page) -> Vec<String> {
    let (mut problems, mut is_code) = (Vec::new(), false);
    for (at, line) in page.text.lines().enumerate() {
        let (text, width) = (line.trim(), line.chars().count());
        if text.starts_with("```") {
            is_code = !is_code;
        } else if width > WIDTH && !is_code && !text.starts_with('|') && can_be_broken(text) {
            problems.push(format!("{}:{}: {width} characters, expected at most {WIDTH}", page.path, at + 1));
        }
    }
    problems
}

/// Whether a line is more than one word, or an item of a list with more than one word.
fn can_be_broken(text: &str) -> bool {
    let is_marker =
        |word: &str| matches!(word, "-" | "*" | ">") || word.trim_end_matches('.').parse::<u32>().is_ok();
    text.split_whitespace().skip_while(|word| is_marker(word)).nth(1).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> Vec<String> {
        problems(&[Page { path: "a.md".to_owned(), text: text.to_owned() }])
    }

    #[test]
    fn long_prose_is_named_with_its_line_and_width() {
        let long = format!("{} {}", "a".repeat(60), "中".repeat(60));
        assert_eq!(found(&format!("short\n{long}\n")), ["a.md:2: 121 characters, expected at most 120"]);
        assert_eq!(found(&format!("- {long}\n")), ["a.md:1: 123 characters, expected at most 120"]);
        let closed = format!("```sh\n{long}\n```\n{long}\n");
        assert_eq!(found(&closed), ["a.md:4: 121 characters, expected at most 120"]);
    }

    #[test]
    fn tables_code_and_long_words_are_no_problem() {
        let (long, word) = ("a ".repeat(100), "a".repeat(200));
        let text =
            format!("| {long} |\n```sh\n{long}\n```\n{word}\n- {word}\n12. {word}\n{}\n", "a".repeat(120));
        assert_eq!(found(&text), Vec::<String>::new());
    }
}
