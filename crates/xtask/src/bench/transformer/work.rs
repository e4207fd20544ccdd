//! Who trains or translates, what each must print, and the check that all compute the same.

use crate::bench::contender::Contender;
use crate::bench::contest::{Contest, TallyOf, Unit, UnitOf};
use crate::bench::json_line::JsonLine;
use crate::bench::sides::{Side, Sides};
use crate::bench::{build, child};
use anyhow::{Context, ensure};
use std::fmt;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(600);
/// How much results may differ, of the larger one.
const SAME: f64 = 1e-3;

pub(crate) const OURS: Contender<Side> = Contender::new("Drumline", Side::Ours);
pub(crate) const TORCH: Contender<Side> = Contender::new("PyTorch", Side::Torch);
const TORCH_TUNED: Contender<Side> = Contender::new("PyTorch tuned", Side::TorchTuned);

/// What is done, and with which model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Case {
    /// Training: 2 layers of 128, 300 words.
    Small,
    /// Training: 3 layers of 256, 8000 words.
    Middle,
    /// Training: 6 layers of 512, 8000 words.
    Base,
    /// Beam search with the small model.
    DecodeSmall,
    /// Beam search with the base model.
    DecodeBase,
}

impl Case {
    pub(crate) fn is_training(self) -> bool {
        matches!(self, Self::Small | Self::Middle | Self::Base)
    }

    pub(crate) fn contenders(self) -> &'static [Contender<Side>] {
        if self.is_training() { &[OURS, TORCH, TORCH_TUNED] } else { &[OURS, TORCH] }
    }

    fn size(self) -> &'static str {
        match self {
            Self::Small | Self::DecodeSmall => "small",
            Self::Middle => "middle",
            Self::Base | Self::DecodeBase => "base",
        }
    }

    fn steps(self, purpose: Purpose) -> Steps {
        let (timed, warm_up) = match (purpose, self) {
            (Purpose::Check, _) if self.is_training() => (3, 0),
            (Purpose::Check, _) => (1, 0),
            (Purpose::Time, Self::Small) => (20, 5),
            (Purpose::Time, Self::Middle) => (8, 3),
            (Purpose::Time, Self::Base) => (4, 2),
            (Purpose::Time, Self::DecodeSmall) => (5, 0),
            (Purpose::Time, Self::DecodeBase) => (1, 0),
        };
        Steps { timed, warm_up }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let work = if self.is_training() { "train" } else { "decode" };
        write!(f, "{work} {}", self.size())
    }
}

struct Steps {
    timed: usize,
    /// Before those.
    warm_up: usize,
}

/// Why a contender runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Purpose {
    /// Few steps without dropout, whose results are compared.
    Check,
    Time,
}

/// What a turn gave.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Figures {
    pub(crate) step_ms: f64,
    pub(crate) tokens_per_s: f64,
    /// Of a step, all ranks and threads together.
    pub(crate) cpu_ms: Option<f64>,
    pub(crate) peak_bytes: Option<f64>,
    /// Losses of training, scores of translations.
    pub(crate) results: Vec<f64>,
}

impl Figures {
    /// The first and the last.
    fn shown_results(&self) -> String {
        let ends = [self.results.first(), self.results.last()];
        ends.into_iter().flatten().map(|result| format!("{result:.5}")).collect::<Vec<_>>().join(" … ")
    }

    fn is_same(&self, reference: &Self) -> bool {
        let same = |a: f64, b: f64| (a - b).abs() <= SAME * a.abs().max(b.abs());
        let mut pairs = self.results.iter().zip(&reference.results);
        !self.results.is_empty()
            && self.results.len() == reference.results.len()
            && pairs.all(|(a, b)| same(*a, *b))
    }
}

/// The contest.
#[derive(Debug, Default)]
pub(crate) struct Work {
    sides: Sides,
}

impl Work {
    /// Builds the programs, and lets ours write the batches of each case.
    pub(crate) fn build(cases: &[Case]) -> anyhow::Result<Self> {
        let sides = Sides::build("transformer.py")?;
        for case in cases {
            let mut command = Command::new(&sides.ours);
            command.args(["transformer", "--work", "batches", "--size", case.size(), "--batches"]);
            command.arg(batches(*case)?);
            child::run(command, LIMIT)?;
        }
        Ok(Self { sides })
    }

    /// Returns an error if the contenders of a case do not compute the same: then they cannot be compared.
    pub(crate) fn compare(&self, case: Case) -> anyhow::Result<()> {
        let mut reference: Option<Figures> = None;
        for &contender in case.contenders() {
            let figures = self.run(&Unit { case, contender }, Purpose::Check)?;
            eprintln!("{case}: {contender} computes {}", figures.shown_results());
            let reference = reference.get_or_insert_with(|| figures.clone());
            ensure!(
                figures.is_same(reference),
                "{contender}, {case}: {:?}, others have {:?}",
                figures.results,
                reference.results
            );
        }
        Ok(())
    }

    fn run(&self, unit: &UnitOf<Self>, purpose: Purpose) -> anyhow::Result<Figures> {
        let (case, side) = (unit.case, unit.contender.kind);
        let (mut command, work) = if case.is_training() {
            (self.sides.start(side, 2, "transformer"), "train")
        } else {
            (self.sides.start_alone(side, "transformer"), "decode")
        };
        let Steps { timed, warm_up } = case.steps(purpose);
        let dropout = if purpose == Purpose::Check { "0" } else { "0.1" };
        command.args(["--work", work, "--size", case.size(), "--dropout", dropout, "--batches"]);
        command.arg(batches(case)?).args(["--steps", &timed.to_string(), "--warm-up", &warm_up.to_string()]);
        let printed = child::run(command, LIMIT)?;
        parse(&printed.stdout).with_context(|| format!("it printed `{}`", printed.stdout.trim_end()))
    }
}

impl Contest for Work {
    type Case = Case;
    type Kind = Side;
    type Figures = Figures;

    fn contenders(&self, case: Case) -> Vec<Contender<Side>> {
        case.contenders().to_vec()
    }

    fn measure(&self, unit: &UnitOf<Self>) -> anyhow::Result<Figures> {
        self.run(unit, Purpose::Time)
    }

    /// A turn in which nothing was learnt does not count.
    fn check(&self, unit: &UnitOf<Self>, figures: &Figures, _: &TallyOf<Self>) -> anyhow::Result<()> {
        let falls = figures.results.last() < figures.results.first();
        ensure!(falls || !unit.case.is_training(), "the loss went {}", figures.shown_results());
        Ok(())
    }
}

fn batches(case: Case) -> anyhow::Result<PathBuf> {
    Ok(build::output_folder()?.join(format!("transformer-{}.json", case.size())))
}

fn parse(stdout: &str) -> anyhow::Result<Figures> {
    let line = JsonLine::find(stdout)?;
    Ok(Figures {
        step_ms: line.number("step_ms")?,
        tokens_per_s: line.number("tokens_per_s")?,
        cpu_ms: line.optional("cpu_ms"),
        peak_bytes: line.optional("peak_bytes"),
        results: line.numbers("losses").or_else(|_| line.numbers("scores"))?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_must_have_figures_and_results() {
        let line = r#"{"step_ms": 2.5, "tokens_per_s": 10, "losses": [1.0, 0.5], "cpu_ms": 7}"#;
        let figures = parse(line).unwrap();
        assert_eq!((figures.step_ms, figures.results.len(), figures.cpu_ms), (2.5, 2, Some(7.0)));
        assert_eq!(figures.shown_results(), "1.00000 … 0.50000");
        assert_eq!(parse(&line.replace("losses", "scores")).unwrap().results, figures.results);
        assert!(parse(&line.replace("losses", "other")).is_err());
    }

    fn with(results: &[f64]) -> Figures {
        Figures { step_ms: 1.0, tokens_per_s: 1.0, cpu_ms: None, peak_bytes: None, results: results.to_vec() }
    }

    #[test]
    fn other_results_are_found_out() {
        let is_same = |results: &[f64]| with(results).is_same(&with(&[2.0, 1.0]));
        assert!(is_same(&[2.0, 1.0005]));
        assert!(!is_same(&[2.0, 1.1]) && !is_same(&[2.0, f64::NAN]) && !is_same(&[2.0]));
        assert!(!with(&[]).is_same(&with(&[])));
    }

    #[test]
    fn a_training_that_learns_nothing_does_not_count() {
        let (contest, tally) = (Work::default(), TallyOf::<Work>::default());
        let check = |case, results: &[f64]| {
            contest.check(&Unit { case, contender: OURS }, &with(results), &tally).is_ok()
        };
        assert!(check(Case::Small, &[2.0, 1.0]) && check(Case::DecodeSmall, &[2.0, 2.5]));
        assert!(!check(Case::Small, &[2.0, 2.5]));
    }
}
