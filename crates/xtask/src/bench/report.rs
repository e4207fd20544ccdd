//! What was measured, for people (Markdown, also shown in the terminal) and for programs (CSV).

use super::contender::{Case, OURS_AGAIN, OURS_HEAP, OURS_PRIVATE, OURS_TCP};
use super::goals::{GOALS, Goal, Need, Verdict};
use super::machine;
use super::sizes::ByteSize;
use super::tally::Tally;
use crate::workspace;
use anyhow::Context;
use std::fmt::Write;
use std::fs;

/// Columns, in order; those that nobody filled are left out.
const SERIES: &[&str] = &[
    OURS_HEAP,
    OURS_PRIVATE,
    OURS_AGAIN,
    OURS_TCP,
    "floor",
    "openmpi",
    "mpich",
    "gloo",
    "socket",
    "socket-duplex",
];

/// All of the report in Markdown. `about`: lines on the machine and the manner.
pub(crate) fn markdown(tally: &Tally, about: &[String]) -> String {
    let mut text = String::from("# Collectives: ours and the peers in one run\n\n");
    for line in about {
        text += &format!("- {line}\n");
    }
    text += "\nMicroseconds, median over blocks of each block's median; `?` marks a figure with no steady block, and a verdict on one.\n";
    for (op, world) in groups(tally) {
        let cases: Vec<_> = tally.cases().into_iter().filter(|c| (c.op, c.world) == (op, world)).collect();
        let _ = write!(text, "\n## {op}, {world} ranks\n\n{}", figures(tally, &cases));
        text += &settings(tally, &cases);
        text += &control(tally, &cases);
    }
    text + &verdicts(tally)
}

fn groups(tally: &Tally) -> Vec<(super::contender::Op, usize)> {
    let mut groups: Vec<_> = tally.cases().iter().map(|case| (case.op, case.world)).collect();
    groups.dedup();
    groups
}

fn figures(tally: &Tally, cases: &[Case]) -> String {
    let filled = |series: &&&str| cases.iter().any(|case| tally.figure(*case, series).is_some());
    let series: Vec<_> = SERIES.iter().filter(filled).collect();
    let mut rows =
        vec![std::iter::once("size").chain(series.iter().map(|s| **s)).map(str::to_owned).collect()];
    for case in cases {
        let cell = |series: &&&str| match tally.figure(*case, series) {
            Some(figure) => {
                format!("{}{}", micros(figure.median_us), if figure.doubtful { " ?" } else { "" })
            }
            None => "-".to_owned(),
        };
        rows.push(std::iter::once(ByteSize(case.bytes).to_string()).chain(series.iter().map(cell)).collect());
    }
    table(&rows)
}

/// Which setting won, where there was a choice.
fn settings(tally: &Tally, cases: &[Case]) -> String {
    let mut text = String::new();
    for series in ["openmpi", "mpich", "gloo"] {
        let won: Vec<_> =
            cases.iter().filter_map(|c| Some((c.bytes, tally.figure(*c, series)?.setting))).collect();
        let Some((_, first)) = won.first() else { continue };
        if won.iter().all(|(_, setting)| setting == first) {
            let _ = writeln!(text, "\n{series}: {first}.");
        } else {
            let each = won.iter().map(|(bytes, setting)| format!("{} {setting}", ByteSize(*bytes)));
            let _ =
                writeln!(text, "\n{series}, the better setting: {}.", each.collect::<Vec<_>>().join("; "));
        }
    }
    text
}

/// The same thing measured twice: how far a ratio may be off by chance.
fn control(tally: &Tally, cases: &[Case]) -> String {
    let ratio = |case: &Case| {
        let (a, b) = (tally.figure(*case, OURS_PRIVATE)?, tally.figure(*case, OURS_AGAIN)?);
        Some(format!("{} {:.2}", ByteSize(case.bytes), b.median_us / a.median_us))
    };
    let ratios: Vec<_> = cases.iter().filter_map(ratio).collect();
    if ratios.is_empty() {
        String::new()
    } else {
        format!("\nA/A control (1 is ideal): {}.\n", ratios.join(", "))
    }
}

fn verdicts(tally: &Tally) -> String {
    let mut rows =
        vec![["", "operation", "size", "contender", "goal", "measured"].map(str::to_owned).to_vec()];
    let (mut passed, mut missed, mut missing) = (0, 0, 0);
    for case in tally.cases() {
        for goal in GOALS.iter().filter(|goal| goal.covers(case)) {
            let verdict = goal.judge(case, tally);
            match verdict {
                Verdict::Pass(_) => passed += 1,
                Verdict::Miss(_) => missed += 1,
                Verdict::Missing(_) => missing += 1,
            }
            let mut row = verdict_row(case, goal, &verdict);
            if goal.is_doubtful(case, tally) {
                row[0] += " ?";
            }
            rows.push(row);
        }
    }
    format!("\n## Goals: {passed} PASS, {missed} MISS, {missing} not measured\n\n{}", table(&rows))
}

fn verdict_row(case: Case, goal: &Goal, verdict: &Verdict) -> Vec<String> {
    let (word, measured) = match verdict {
        Verdict::Pass(value) => ("PASS", value_of(goal, *value)),
        Verdict::Miss(value) => ("MISS", value_of(goal, *value)),
        Verdict::Missing(who) => ("none", format!("no figure of {}", who.join(", "))),
    };
    let against = match goal.against {
        [] => String::new(),
        [one] => format!(" {one}"),
        several => format!(" the better of {}", several.join(", ")),
    };
    let wanted = match goal.need {
        Need::Times(ratio) => format!(">= {ratio:.2}x{against}"),
        Need::MicrosAtMost(limit) => format!("<= {limit} us"),
    };
    let operation = format!("{} x{}", case.op, case.world);
    vec![word.into(), operation, ByteSize(case.bytes).to_string(), goal.ours.into(), wanted, measured]
}

fn value_of(goal: &Goal, value: f64) -> String {
    match goal.need {
        Need::Times(_) => format!("{value:.2}x"),
        Need::MicrosAtMost(_) => format!("{} us", micros(value)),
    }
}

/// Three figures that matter, no exponent.
fn micros(value: f64) -> String {
    match value {
        v if v < 10.0 => format!("{v:.2}"),
        v if v < 1000.0 => format!("{v:.1}"),
        v => format!("{v:.0}"),
    }
}

/// A Markdown table that is also aligned in a terminal: first row the heading.
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

/// The section on goals: a table whose first column says PASS, MISS, or none for what was not measured.
pub(crate) fn goals(rows: &[Vec<String>]) -> String {
    let count = |word: &str| rows.iter().filter(|row| row[0] == word).count();
    let (passed, missed, missing) = (count("PASS"), count("MISS"), count("none"));
    format!("\n## Goals: {passed} PASS, {missed} MISS, {missing} not measured\n\n{}", table(rows))
}

/// Keeps a report and its figures in `bench/results/`, under today's date and this name.
pub(crate) fn save(name: &str, text: &str, csv: &str) -> anyhow::Result<()> {
    let base = workspace::root().join("bench/results").join(format!("{}-{name}", machine::today()));
    for (ending, content) in [("md", text), ("csv", csv)] {
        let path = base.with_extension(ending);
        fs::write(&path, content).with_context(|| format!("cannot write {}", path.display()))?;
        eprintln!("written: {}", path.display());
    }
    Ok(())
}

/// Every sample, one a line.
pub(crate) fn csv(tally: &Tally) -> String {
    let mut text = String::from("op,world,bytes,contender,setting,block,median_us,p99_us,steady\n");
    for (key, sample) in tally.samples() {
        let Case { op, world, bytes } = key.case;
        // A setting may hold a comma.
        let (series, setting) = (&key.series, key.setting.replace(',', ";"));
        let (median, p99) = (sample.median_us, sample.p99_us);
        let _ = writeln!(
            text,
            "{op},{world},{bytes},{series},{setting},{},{median:.3},{p99:.3},{}",
            sample.block, sample.steady
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::contender::Op;
    use super::super::tally::{Key, Sample};
    use super::*;

    fn tally() -> Tally {
        let mut tally = Tally::default();
        let case = Case { op: Op::AllReduce, world: 2, bytes: 16 };
        for (series, median_us, steady) in
            [("ours-private", 0.25, true), ("ours-again", 0.26, true), ("openmpi", 0.3, false)]
        {
            let key = Key { case, series: series.into(), setting: "a, b".into() };
            tally.add(key, Sample { block: 0, median_us, p99_us: 1.0, steady });
        }
        tally
    }

    #[test]
    fn the_report_has_figures_control_and_verdicts() {
        let text = markdown(&tally(), &["a machine".into()]);
        for part in [
            "- a machine",
            "## all-reduce, 2 ranks",
            "| 16 B | 0.25         | 0.26       | 0.30 ?  |",
            "A/A control (1 is ideal): 16 B 1.04.",
            "1 PASS, 1 MISS",
            "no figure of gloo",
            "| MISS ? | all-reduce x2 | 16 B | ours-private | >= 1.40x openmpi",
            "| PASS   | all-reduce x2 | 16 B | ours-private | <= 0.3 us",
        ] {
            assert!(text.contains(part), "no `{part}` in\n{text}");
        }
    }

    #[test]
    fn csv_keeps_its_columns() {
        let text = csv(&tally());
        assert!(text.lines().all(|line| line.split(',').count() == 9), "{text}");
        assert!(text.contains("all-reduce,2,16,openmpi,a; b,0,0.300,1.000,false\n"), "{text}");
    }
}
