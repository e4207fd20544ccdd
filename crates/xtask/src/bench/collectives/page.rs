//! What was measured, for people (Markdown, also shown in the terminal) and for programs (CSV).

use super::contenders::{Case, OURS_AGAIN, OURS_HEAP, OURS_PRIVATE, OURS_TCP, Op};
use super::contest::Calls;
use super::figures::{cases, figure};
use super::goals::{GOALS, Goal, Need, Verdict};
use super::sizes::ByteSize;
use crate::bench::contest::TallyOf;
use crate::bench::report::{self, row};
use std::fmt::Write;

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
pub(crate) fn markdown(tally: &TallyOf<Calls>, about: Vec<String>) -> String {
    let mut text = report::head("Collectives: ours and the peers in one run", about);
    text += &tally.failures();
    text += "\nMicroseconds, median over blocks of each block's median; `?` marks a figure with no steady block, and a verdict on one.\n";
    for (op, world) in groups(tally) {
        let cases: Vec<_> = cases(tally).into_iter().filter(|c| (c.op, c.world) == (op, world)).collect();
        let _ = write!(text, "\n## {op}, {world} ranks\n\n{}", figures(tally, &cases));
        text += &settings(tally, &cases);
        text += &control(tally, &cases);
    }
    text + &verdicts(tally)
}

fn groups(tally: &TallyOf<Calls>) -> Vec<(Op, usize)> {
    let mut groups: Vec<_> = cases(tally).iter().map(|case| (case.op, case.world)).collect();
    groups.dedup();
    groups
}

fn figures(tally: &TallyOf<Calls>, cases: &[Case]) -> String {
    let filled = |series: &&&str| cases.iter().any(|case| figure(tally, *case, series).is_some());
    let series: Vec<_> = SERIES.iter().filter(filled).collect();
    let mut rows =
        vec![std::iter::once("size").chain(series.iter().map(|s| **s)).map(str::to_owned).collect()];
    for case in cases {
        let cell = |series: &&&str| match figure(tally, *case, series) {
            Some(figure) => {
                format!("{}{}", micros(figure.median_us), if figure.doubtful { " ?" } else { "" })
            }
            None => "-".to_owned(),
        };
        rows.push(std::iter::once(ByteSize(case.bytes).to_string()).chain(series.iter().map(cell)).collect());
    }
    report::table(&rows)
}

/// Which setting won, where there was a choice.
fn settings(tally: &TallyOf<Calls>, cases: &[Case]) -> String {
    let mut text = String::new();
    for series in ["openmpi", "mpich", "gloo"] {
        let won: Vec<_> =
            cases.iter().filter_map(|c| Some((c.bytes, figure(tally, *c, series)?.setting))).collect();
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
fn control(tally: &TallyOf<Calls>, cases: &[Case]) -> String {
    let ratio = |case: &Case| {
        let (a, b) = (figure(tally, *case, OURS_PRIVATE)?, figure(tally, *case, OURS_AGAIN)?);
        Some(format!("{} {:.2}", ByteSize(case.bytes), b.median_us / a.median_us))
    };
    let ratios: Vec<_> = cases.iter().filter_map(ratio).collect();
    if ratios.is_empty() {
        String::new()
    } else {
        format!("\nA/A control (1 is ideal): {}.\n", ratios.join(", "))
    }
}

fn verdicts(tally: &TallyOf<Calls>) -> String {
    let mut rows = vec![row!["", "operation", "size", "contender", "goal", "measured"]];
    for case in cases(tally) {
        for goal in GOALS.iter().filter(|goal| goal.covers(case)) {
            let mut row = verdict_row(case, goal, &goal.judge(case, tally));
            if goal.is_doubtful(case, tally) {
                row[0] += " ?";
            }
            rows.push(row);
        }
    }
    report::goals(&rows)
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
    row![word, operation, ByteSize(case.bytes), goal.ours, wanted, measured]
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

/// Every sample, one a line: case by case, and there by series and setting.
pub(crate) fn csv(tally: &TallyOf<Calls>) -> String {
    let mut text = String::from("op,world,bytes,contender,setting,block,median_us,p99_us,steady\n");
    for case in cases(tally) {
        let turns = tally.all().filter(|turn| turn.unit.case == case);
        let mut samples: Vec<_> =
            turns.flat_map(|turn| turn.figures.iter().map(move |sample| (turn, sample))).collect();
        samples.sort_by_key(|(turn, sample)| (&sample.series, turn.unit.contender.setting));
        let Case { op, world, bytes } = case;
        for (turn, sample) in samples {
            // A setting may hold a comma.
            let (series, setting) = (&sample.series, turn.unit.contender.setting.replace(',', ";"));
            let (median, p99) = (sample.median_us, sample.p99_us);
            let (block, steady) = (turn.block, turn.steady);
            let _ = writeln!(
                text,
                "{op},{world},{bytes},{series},{setting},{block},{median:.3},{p99:.3},{steady}"
            );
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::contenders::{ALL_REDUCE, Kind};
    use super::super::contest::Sample;
    use super::*;
    use crate::bench::contender::Contender;
    use crate::bench::contest::Unit;
    use crate::bench::tally::{Tally, Turn};

    fn tally() -> TallyOf<Calls> {
        let mut tally = Tally::default();
        let case = Case { op: ALL_REDUCE, world: 2, bytes: 16 };
        for (series, median_us, steady) in
            [("ours-private", 0.25, true), ("ours-again", 0.26, true), ("openmpi", 0.3, false)]
        {
            let contender = Contender { name: series, setting: "a, b", kind: Kind::Floor };
            let figures = vec![Sample { series: series.to_owned(), median_us, p99_us: 1.0 }];
            tally.add(Turn { unit: Unit { case, contender }, block: 0, figures, steady });
        }
        tally
    }

    #[test]
    fn the_report_has_figures_control_and_verdicts() {
        let text = markdown(&tally(), vec!["a machine".into()]);
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
