//! The prefix of a worker's lines on the console.

/// The longest prefix that a template makes; the rest is cut.
const LONGEST: usize = 128;

/// Colours that are easy to distinguish on light and dark backgrounds; red is left to the programs' own errors.
const COLOURS: [&str; 6] = ["36", "33", "32", "35", "34", "96"];

/// The values that a prefix template may use.
#[derive(Debug, Clone, Copy)]
pub(super) struct Named<'a> {
    pub(super) role: &'a str,
    pub(super) rank: usize,
    pub(super) local_rank: usize,
}

/// The worker's prefix from `template`; `[rank 3]: ` by default.
pub(super) fn prefix(worker: &Named<'_>, template: Option<&str>) -> String {
    let mut text = match template {
        None => format!("[rank {}]: ", worker.rank),
        Some(template) => fill(template, worker),
    };
    text.truncate(text.floor_char_boundary(LONGEST));
    text
}

/// The prefix in the colour of its rank.
pub(super) fn coloured(prefix: &str, rank: usize) -> String {
    format!("\x1b[{}m{prefix}\x1b[0m", COLOURS[rank % COLOURS.len()])
}

/// Replaces `${name}` and `$name` by their values and `$$` by `$`; any other `$` stays.
fn fill(template: &str, worker: &Named<'_>) -> String {
    let mut parts = template.split('$');
    let mut text = parts.next().unwrap_or_default().to_string();
    while let Some(part) = parts.next() {
        let filled = match part {
            // `$$`: what follows the second one is plain text.
            "" => parts.next().map(|rest| format!("${rest}")),
            _ => variable(part, worker),
        };
        text += &filled.unwrap_or_else(|| format!("${part}"));
    }
    text
}

/// The value of the variable that `part` begins with, and what follows it.
fn variable(part: &str, worker: &Named<'_>) -> Option<String> {
    let (name, rest) = match part.strip_prefix('{') {
        Some(braced) => braced.split_once('}')?,
        None => {
            let end = part.find(|c: char| c != '_' && !c.is_ascii_alphanumeric()).unwrap_or(part.len());
            part.split_at(end)
        }
    };
    let value = match name {
        "role_name" => worker.role.to_string(),
        "rank" => worker.rank.to_string(),
        "local_rank" => worker.local_rank.to_string(),
        _ => return None,
    };
    Some(value + rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn templates_are_filled_as_torchrun_fills_them() {
        let worker = Named { role: "trainer", rank: 5, local_rank: 1 };
        for (template, filled) in [
            ("[${role_name}${local_rank}]:", "[trainer1]:"),
            ("[${rank}] ", "[5] "),
            ("$rank/$local_rank $role_name: ", "5/1 trainer: "),
            ("$$rank costs $$5 ", "$rank costs $5 "),
            ("$$", "$"),
            ("$$$rank", "$5"),
            ("${unknown} $ ${rank", "${unknown} $ ${rank"),
            ("100$", "100$"),
            ("", ""),
        ] {
            assert_eq!(prefix(&worker, Some(template)), filled, "{template}");
        }
        assert_eq!(prefix(&worker, None), "[rank 5]: ");
        assert_eq!(prefix(&worker, Some(&"é".repeat(1000))).len(), LONGEST);
        assert_eq!(coloured("[rank 6]: ", 6), "\x1b[36m[rank 6]: \x1b[0m");
    }
}
