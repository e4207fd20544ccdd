//! Chinese pages stay in step with the English ones: `X.zh.md` shows the commands and outputs of `X.md`, all of them and in order.
//!
//! In: the pages, of which the `console` and `text` blocks are compared, without the comments of commands, which may be translated. Out: a
//! line for each Chinese page that differs, with the first line that does.

use super::pages::Page;

const CHINESE: &str = ".zh.md";

/// The Chinese pages whose commands and outputs are not those of the English page.
pub(crate) fn problems(pages: &[Page]) -> Vec<String> {
    pages.iter().filter_map(|page| problem(page, pages)).collect()
}

fn problem(page: &Page, pages: &[Page]) -> Option<String> {
    let english = format!("{}.md", page.path.strip_suffix(CHINESE)?);
    let Some(original) = pages.iter().find(|page| page.path == english) else {
        return Some(format!("{} has no English page {english}", page.path));
    };
    let (ours, theirs) = (shown(&page.text), shown(&original.text));
    let at = (0..ours.len().max(theirs.len())).find(|at| ours.get(*at) != theirs.get(*at))?;
    let quoted = |line: Option<&&str>| line.map_or("nothing more".to_owned(), |text| format!("`{text}`"));
    Some(format!(
        "{} shows {} where {english} shows {}",
        page.path,
        quoted(ours.get(at)),
        quoted(theirs.get(at))
    ))
}

/// The lines of all `console` and `text` blocks.
fn shown(text: &str) -> Vec<&str> {
    let (mut lines, mut is_code, mut is_shown) = (Vec::new(), false, false);
    for line in text.lines() {
        if line.starts_with("```") {
            is_code = !is_code;
            is_shown = is_code && matches!(line, "```console" | "```text");
        } else if is_shown {
            lines.push(without_comment(line));
        }
    }
    lines
}

fn without_comment(line: &str) -> &str {
    line.split_once(" #").map_or(line, |(command, _)| command).trim_end()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(path: &str, text: &str) -> Page {
        Page { path: path.to_owned(), text: text.to_owned() }
    }

    const ENGLISH: &str =
        "Text\n```console\n$ one   # first\noutput\n$ two \\\n   --flag\n```\n```rust\na(); // one\n```\n";

    #[test]
    fn translated_comments_and_texts_are_no_problem() {
        let chinese =
            "文字\n```console\n$ one   # 第一\noutput\n$ two \\\n   --flag\n```\n```rust\na(); // 一\n```\n";
        let pages = [page("a.md", ENGLISH), page("a.zh.md", chinese), page("b.md", "")];
        assert_eq!(problems(&pages), Vec::<String>::new());
    }

    #[test]
    fn other_commands_and_outputs_are_named() {
        let other = "```console\n$ one\noutput\n$ two \\\n   --other\n```\n";
        let missing = "```console\n$ one\noutput\n```\n";
        let older = "```console\n$ one\nold output\n```\n";
        let pages = [
            page("a.md", ENGLISH),
            page("b.md", ENGLISH),
            page("d.md", ENGLISH),
            page("a.zh.md", other),
            page("b.zh.md", missing),
            page("c.zh.md", ""),
            page("d.zh.md", older),
        ];
        let expected = [
            "a.zh.md shows `   --other` where a.md shows `   --flag`",
            "b.zh.md shows nothing more where b.md shows `$ two \\`",
            "c.zh.md has no English page c.md",
            "d.zh.md shows `old output` where d.md shows `output`",
        ];
        assert_eq!(problems(&pages), expected);
    }
}
