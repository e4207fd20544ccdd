//! `cargo xtask bench loader`: samples a second, ours beside torch's DataLoader with as many worker processes.
//!
//! ```text
//!   data, made once ─▶ block n: cifar, jpeg × (ours, torch), order rotated ─▶ medians ─▶ ratio ─▶ goals
//! ```
//! Both sides read the same files and print one JSON line, `{"samples_per_s", "shape", "mean"}`: the rate at which batches
//! reach the caller, a batch's shape and the mean of its values. Every run is held against what the shape must be, and the
//! means of both sides against each other, so that nobody is fast by leaving out a step.

mod loading;

use super::contest::{self, TallyOf, Unit};
use super::machine;
use super::need::Need;
use super::pace::Pace;
use super::report::{self, row};
use super::tally::Turn;
use loading::{ALL, Loading, OURS, Subject, TORCH};
use std::fmt::Write;

/// How many times as fast as torch's DataLoader ours must be.
const GOALS: [(Subject, f64); 2] = [(Subject::Cifar, 20.0), (Subject::Jpeg, 2.0)];

/// Compare the loader with torch's DataLoader, in turns
#[derive(clap::Args, Debug)]
pub(crate) struct LoaderArgs {
    #[command(flatten)]
    pace: Pace<7>,
    /// Seconds measured in each run, after its warm-up
    #[arg(long, default_value_t = 5.0)]
    seconds: f64,
    /// Threads of ours, worker processes of torch
    #[arg(long, default_value_t = 2)]
    workers: usize,
    /// Keep the results in bench/results/
    #[arg(long)]
    save: bool,
}

impl LoaderArgs {
    fn seconds(&self) -> f64 {
        self.pace.at_most(self.seconds, 1.0)
    }
}

/// Builds, measures, judges, prints.
pub(crate) fn run(args: &LoaderArgs) -> anyhow::Result<()> {
    let mut contest = Loading::build(args.workers, args.seconds())?;
    let tally = contest::hold(&mut contest, &Subject::ALL, &args.pace);
    let text = markdown(args, &tally);
    if args.save {
        report::save(&report::name("loader", args.pace.quick), &text, &csv(&tally))?;
    }
    print!("{text}");
    Ok(())
}

fn markdown(args: &LoaderArgs, tally: &TallyOf<Loading>) -> String {
    let about = [
        machine::describe(),
        format!("peer: DataLoader of torch {}", crate::libtorch::VERSION),
        format!(
            "{} workers, {} turns of {} s each, the order rotated each turn",
            args.workers,
            args.pace.blocks(),
            args.seconds()
        ),
        format!("{} were taken while the machine was not quiet", tally.unsteady()),
    ];
    let title = "Loader: ours and torch's DataLoader in one run";
    let mut text = report::head(title, args.pace.warning().into_iter().chain(about));
    text += &tally.failures();
    text += "\nSamples a second, median (least to most). *Ratio*: ours to that one.\n\n";
    text += &report::table(&rows(tally));
    text + &goals(tally)
}

fn rows(tally: &TallyOf<Loading>) -> Vec<Vec<String>> {
    let mut rows = vec![row!["what", "loader", "samples/s", "ratio"]];
    for (case, contender) in Subject::ALL.iter().flat_map(|subject| ALL.map(|loader| (*subject, loader))) {
        let unit = Unit { case, contender };
        let Some(rate) = tally.spread(unit, |line| Some(line.samples_per_s)) else { continue };
        let ratio = ratio(tally, unit).map_or("-".to_owned(), |ratio| format!("{ratio:.1}x"));
        rows.push(row![case, contender, rate.shown(0), ratio]);
    }
    rows
}

/// How many times as fast ours is, by the medians.
fn ratio(tally: &TallyOf<Loading>, peer: contest::UnitOf<Loading>) -> Option<f64> {
    let rate = |unit| Some(tally.spread(unit, |line| Some(line.samples_per_s))?.median);
    Some(rate(Unit { contender: OURS, ..peer })? / rate(peer)?)
}

/// The section on goals.
fn goals(tally: &TallyOf<Loading>) -> String {
    let mut rows = vec![row!["", "what", "goal", "measured"]];
    for (case, least) in GOALS {
        let (ratio, need) = (ratio(tally, Unit { case, contender: TORCH }), Need::AtLeast(least));
        let measured = ratio.map_or("not measured".to_owned(), |ratio| format!("{ratio:.1}x"));
        rows.push(row![need.word(ratio), format!("{case}, against torch"), need.shown("x"), measured]);
    }
    report::goals(&rows)
}

/// Every run, one a line.
fn csv(tally: &TallyOf<Loading>) -> String {
    let mut text = String::from("what,loader,turn,samples_per_s,mean,steady\n");
    for Turn { unit: Unit { case, contender }, block, figures, steady } in tally.all() {
        let (name, rate, mean) = (case.name(), figures.samples_per_s, figures.mean);
        let _ = writeln!(text, "{name},{contender},{block},{rate:.1},{mean:.4},{steady}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::tally::Tally;
    use super::loading::Line;
    use super::*;

    fn tally() -> TallyOf<Loading> {
        let mut tally = Tally::default();
        let mut add = |case, contender, block, samples_per_s| {
            let figures = Line { samples_per_s, shape: Vec::new(), mean: -0.2 };
            tally.add(Turn { unit: Unit { case, contender }, block, figures, steady: true });
        };
        add(Subject::Jpeg, TORCH, 0, 100.0);
        add(Subject::Cifar, OURS, 0, 300.0);
        add(Subject::Cifar, TORCH, 0, 10.0);
        add(Subject::Cifar, TORCH, 1, 20.0);
        tally
    }

    #[test]
    fn rows_have_medians_and_ratios() {
        let rows = rows(&tally());
        assert_eq!(rows[1][2..], ["300 (300 to 300)", "1.0x"]);
        assert_eq!(rows[2][1..], ["torch", "15 (10 to 20)", "20.0x"]);
        assert_eq!(rows.len(), 4);
        assert!(csv(&tally()).ends_with("cifar,torch,1,20.0,-0.2000,true\n"), "{}", csv(&tally()));
    }

    #[test]
    fn a_goal_is_met_or_not_measured() {
        let text = goals(&tally());
        assert!(text.contains("1 PASS, 0 MISS, 1 not measured") && text.contains("20.0x"), "{text}");
    }
}
