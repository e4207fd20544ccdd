//! What all reports have in common: the head, tables, the section on goals, and the files that keep them.

use super::machine;
use crate::workspace;
use anyhow::Context;
use std::fmt::Write;
use std::fs;
use std::path::PathBuf;

/// A name that ends so is that of a quick run, whose files are overwritten by the next.
const QUICK: &str = "-quick";

/// The title of a report, and a list of lines about the machine and the way of measuring.
pub(crate) fn head(title: &str, about: impl IntoIterator<Item = String>) -> String {
    let mut text = format!("# {title}\n\n");
    for line in about {
        let _ = writeln!(text, "- {line}");
    }
    text
}

/// A row of a table, from anything that can be shown.
macro_rules! row {
    ($($cell:expr),* $(,)?) => { vec![$($cell.to_string()),*] };
}
pub(crate) use row;

/// A Markdown table that is also aligned in a terminal: the first row is the heading.
pub(crate) fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.first().map_or(0, Vec::len);
    let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0).max(3);
    let widths: Vec<_> = (0..columns).map(width).collect();
    let mut text = String::new();
    for (index, row) in rows.iter().enumerate() {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        let _ = writeln!(text, "| {} |", cells.collect::<Vec<_>>().join(" | "));
        if index == 0 {
            let dashes = widths.iter().map(|width| "-".repeat(*width));
            let _ = writeln!(text, "| {} |", dashes.collect::<Vec<_>>().join(" | "));
        }
    }
    text
}

/// The section on goals: a table whose first column begins with PASS, MISS, or none for what was not measured.
pub(crate) fn goals(rows: &[Vec<String>]) -> String {
    let count = |word: &str| rows.iter().filter(|row| row[0].split(' ').next() == Some(word)).count();
    let (passed, missed, missing) = (count("PASS"), count("MISS"), count("none"));
    format!("\n## Goals: {passed} PASS, {missed} MISS, {missing} not measured\n\n{}", table(rows))
}

/// The name of a report's files: a quick run has one of its own.
pub(crate) fn name(subject: &str, quick: bool) -> String {
    if quick { format!("{subject}{QUICK}") } else { subject.to_owned() }
}

/// Keeps a report and its figures in `bench/results/`, under today's date and this name.
pub(crate) fn save(name: &str, text: &str, csv: &str) -> anyhow::Result<()> {
    let base = free_name(name)?;
    for (ending, content) in [("md", text), ("csv", csv)] {
        let path = base.with_extension(ending);
        fs::write(&path, content).with_context(|| format!("cannot write {}", path.display()))?;
        eprintln!("written: {}", path.display());
    }
    Ok(())
}

/// `bench/results/<date>-<name>`, with a number when the day has one already.
fn free_name(name: &str) -> anyhow::Result<PathBuf> {
    let folder = workspace::root().join("bench/results");
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let stem = format!("{}-{name}", machine::today());
    let named = |n: usize| folder.join(if n == 1 { stem.clone() } else { format!("{stem}-{n}") });
    let is_free = |base: &PathBuf| name.ends_with(QUICK) || !base.with_extension("md").exists();
    (1..).map(named).find(is_free).context("no free name for the results")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_aligned_and_goals_are_counted() {
        let rows = [row!["", "what"], row!["PASS", 1.5], row!["MISS ?", "two"], row!["none", 3], row!["", 4]];
        let text = goals(&rows);
        assert!(text.contains("1 PASS, 1 MISS, 1 not measured\n\n"), "{text}");
        assert!(text.contains("| PASS   | 1.5  |\n| MISS ? | two  |\n"), "{text}");
    }

    #[test]
    fn the_head_lists_what_is_known() {
        assert_eq!(head("A", ["b".to_owned(), "c".to_owned()]), "# A\n\n- b\n- c\n");
    }
}
