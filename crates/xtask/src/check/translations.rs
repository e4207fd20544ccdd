//! Chinese pages stay in step with the English ones: `X.zh.md` shows the commands of `X.md`, all of them and in order.
//!
//! In: the pages. A command is a line of a `console` block that begins with `$ `, with its continuation lines and without its comment,
//! which may be translated. Out: a line for each Chinese page whose commands differ.

use super::pages::Page;

const CHINESE: &str = ".zh.md";

/// The Chinese pages whose commands are not those of the English page.
pub(crate) fn problems(pages: &[Page]) -> Vec<String> {
    pages.iter().filter_map(|page| problem(page, pages)).collect()
}

fn problem(page: &Page, pages: &[Page]) -> Option<String> {
    let english = format!("{}.md", page.path.strip_suffix(CHINESE)?);
    let Some(original) = pages.iter().find(|page| page.path == english) else {
        return Some(format!("{} has no English page {english}", page.path));
    };
    let (ours, theirs) = (commands(&page.text), commands(&original.text));
    let at = (0..ours.len().max(theirs.len())).find(|at| ours.get(*at) != theirs.get(*at))?;
    let shown =
        |command: Option<&String>| command.map_or("no more commands".to_owned(), |text| format!("`{text}`"));
    Some(format!(
        "{}: command {} is {}, but {english} has {}",
        page.path,
        at + 1,
        shown(ours.get(at)),
        shown(theirs.get(at))
    ))
}

fn commands(text: &str) -> Vec<String> {
    let (mut commands, mut is_console, mut is_continued) = (Vec::<String>::new(), false, false);
    for line in text.lines() {
        if line.starts_with("```") {
            (is_console, is_continued) = (!is_console && line == "```console", false);
            continue;
        }
        let begins = line.strip_prefix("$ ").filter(|_| is_console);
        let part = begins.or(if is_continued { Some(line) } else { None });
        let Some(part) = part.map(without_comment) else { continue };
        match commands.last_mut().filter(|_| is_continued) {
            Some(command) => command.push_str(part),
            None => commands.push(part.to_owned()),
        }
        is_continued = part.ends_with('\\');
    }
    commands
}

fn without_comment(command: &str) -> &str {
    command.split_once(" #").map_or(command, |(command, _)| command).trim_end()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(path: &str, text: &str) -> Page {
        Page { path: path.to_owned(), text: text.to_owned() }
    }

    const ENGLISH: &str =
        "Text\n```console\n$ one   # first\noutput\n$ two \\\n   --flag\n```\n```text\n$ no command\n```\n";

    #[test]
    fn translated_comments_and_texts_are_no_problem() {
        let chinese = "文字\n```console\n$ one   # 第一\n输出\n$ two \\\n   --flag\n```\n";
        let pages = [page("a.md", ENGLISH), page("a.zh.md", chinese), page("b.md", "")];
        assert_eq!(problems(&pages), Vec::<String>::new());
    }

    #[test]
    fn other_commands_are_named() {
        let other = "```console\n$ one\n$ two \\\n   --other\n```\n";
        let missing = "```console\n$ one\n```\n";
        let pages = [
            page("a.md", ENGLISH),
            page("b.md", ENGLISH),
            page("a.zh.md", other),
            page("b.zh.md", missing),
            page("c.zh.md", ""),
        ];
        let expected = [
            "a.zh.md: command 2 is `two \\   --other`, but a.md has `two \\   --flag`",
            "b.zh.md: command 2 is no more commands, but b.md has `two \\   --flag`",
            "c.zh.md has no English page c.md",
        ];
        assert_eq!(problems(&pages), expected);
    }
}
