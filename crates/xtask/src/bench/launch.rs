//! `cargo xtask bench launch`: how long the launcher takes, beside torchrun.
//!
//! ```text
//!   block n: the bare program; native, python, restart × (ours, torchrun), order swapped
//!   in the first three blocks also: 500 ranks that do nothing; memory beside 100 ranks that sleep
//! ```
//! The programs say when they begin by the clock that we read before starting the launcher, and every run is checked:
//! all ranks must have said so, once for each attempt.

mod figures;
mod goals;
mod line;
mod memory;
mod start;

use super::contest::{self, TallyOf, Unit};
use super::pace::Pace;
use super::report::{self, row};
use super::spread::Spread;
use super::tally::Turn;
use super::{contender::Contender, machine};
use figures::Kind;
use start::{BARE, Launcher, OURS, Starts, Subject, TORCHRUN};
use std::fmt::Write;

/// Compare the launcher with torchrun, in turns
#[derive(clap::Args, Debug)]
pub(crate) struct LaunchArgs {
    #[command(flatten)]
    pace: Pace<20>,
    /// Keep the results in bench/results/
    #[arg(long)]
    save: bool,
}

/// Builds, measures, judges, prints.
pub(crate) fn run(args: &LaunchArgs) -> anyhow::Result<()> {
    let tally = contest::hold(&mut Starts::build()?, &Subject::ALL, &args.pace);
    let text = markdown(&tally, args);
    if args.save {
        report::save(&report::name("launch", args.pace.quick), &text, &csv(&tally))?;
    }
    print!("{text}");
    Ok(())
}

fn markdown(tally: &TallyOf<Starts>, args: &LaunchArgs) -> String {
    let about = [
        machine::describe(),
        format!("peer: torchrun of torch {}", crate::libtorch::VERSION),
        format!(
            "2 ranks, {} turns, the order swapped each turn; a native program and a Python script that do nothing",
            args.pace.blocks()
        ),
        format!("{} were taken while the machine was not quiet", tally.unsteady()),
    ];
    let title = "Launcher: ours and torchrun in one run";
    let mut text = report::head(title, args.pace.warning().into_iter().chain(about));
    text += &tally.failures();
    text += "\nMedian (least to most). *First line*: from the launcher's start until the last rank has begun. \
             *Total*: until the launcher has ended.\n\n";
    text += &report::table(&rows(tally));
    text + &goals::section(tally)
}

/// The spread of a kind of figure; `None` if there is no turn.
fn spread(
    tally: &TallyOf<Starts>,
    case: Subject,
    contender: Contender<Launcher>,
    kind: Kind,
) -> Option<Spread> {
    tally.spread(Unit { case, contender }, |figures| kind.of(figures))
}

/// A row for each subject and kind of figure.
fn rows(tally: &TallyOf<Starts>) -> Vec<Vec<String>> {
    let mut rows = vec![row!["what", "figure", "ours", "torchrun", "ratio"]];
    for (subject, kind) in Subject::ALL.iter().flat_map(|subject| Kind::ALL.map(|kind| (*subject, kind))) {
        let [ours, theirs, bare] =
            [OURS, TORCHRUN, BARE].map(|contender| spread(tally, subject, contender, kind));
        let Some(ours) = ours.or(bare) else { continue };
        let ratio = theirs.map_or("-".to_owned(), |theirs| format!("{:.1}x", theirs.median / ours.median));
        let theirs = theirs.map_or("-".to_owned(), |theirs| cell(theirs, kind));
        rows.push(row![subject, kind.name(), cell(ours, kind), theirs, ratio]);
    }
    rows
}

fn cell(spread: Spread, kind: Kind) -> String {
    format!("{:.1} {} ({:.1} to {:.1})", spread.median, kind.unit(), spread.least, spread.most)
}

/// Every turn, one a line.
fn csv(tally: &TallyOf<Starts>) -> String {
    let mut text = String::from("what,launcher,turn,first_line_ms,total_ms,restart_ms,pss_mib,steady\n");
    for Turn { unit: Unit { case, contender }, block, figures, steady } in tally.all() {
        let figures = Kind::ALL.map(|kind| kind.of(figures).map_or(String::new(), |v| format!("{v:.3}")));
        let _ = writeln!(text, "{case},{contender},{block},{},{steady}", figures.join(","));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::tally::Tally;
    use super::figures::Figures;
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_row_has_both_launchers_and_their_ratio() {
        let mut tally = Tally::default();
        for (contender, total) in [(OURS, 10), (TORCHRUN, 25)] {
            let figures = Figures { total: Some(Duration::from_millis(total)), ..Figures::default() };
            let unit = Unit { case: Subject::Native, contender };
            tally.add(Turn { unit, block: 0, figures, steady: true });
        }
        let row = &rows(&tally)[1];
        assert_eq!(row[0..2], ["native program", "total"]);
        assert_eq!(row[4], "2.5x");
        assert!(csv(&tally).ends_with("native program,torchrun,0,,25.000,,,true\n"), "{}", csv(&tally));
    }
}
