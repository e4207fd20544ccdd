//! What was measured, the check that all trained the same, and the goals.

use super::contest::{Contender, Figures};
use crate::bench::report;
use crate::bench::spread::Spread;
use std::fmt::Write;

/// How much losses of the same step may differ, of the larger one; later steps add up what rounding did before.
const SAME_LOSS: f64 = 2e-3;
/// How many steps are compared.
const COMPARED: usize = 10;

/// One turn.
#[derive(Debug)]
pub(crate) struct Sample {
    pub(crate) contender: Contender,
    pub(crate) batch: usize,
    pub(crate) block: usize,
    pub(crate) figures: Figures,
    pub(crate) steady: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Tally {
    samples: Vec<Sample>,
    failures: Vec<String>,
}

/// Ours against another: how much faster, or for `AtMost` how much slower.
struct Goal {
    ours: Contender,
    other: Contender,
    batch: Option<usize>,
    need: Need,
}

#[derive(Clone, Copy)]
enum Need {
    /// The other's step takes at least this many times ours.
    Faster(f64),
    /// Ours takes at most this many times the other's.
    AtMost(f64),
    /// Shown, no goal.
    Shown,
}

const GOALS: [Goal; 8] = [
    Goal { ours: Contender::Ours, other: Contender::Torch, batch: Some(32), need: Need::Faster(1.25) },
    Goal { ours: Contender::Ours, other: Contender::TorchTuned, batch: Some(32), need: Need::Shown },
    Goal { ours: Contender::Ours, other: Contender::Torch, batch: Some(16), need: Need::Faster(1.4) },
    Goal { ours: Contender::Ours, other: Contender::TorchTuned, batch: Some(16), need: Need::Shown },
    Goal { ours: Contender::Ours, other: Contender::OursIndependent, batch: None, need: Need::AtMost(1.05) },
    Goal { ours: Contender::OursAlone, other: Contender::TorchAlone, batch: None, need: Need::Faster(1.05) },
    Goal { ours: Contender::OursAlone, other: Contender::TorchAloneTuned, batch: None, need: Need::Shown },
    Goal { ours: Contender::Torch, other: Contender::TorchTuned, batch: None, need: Need::Shown },
];

impl Tally {
    /// Keeps a turn, unless it trained something else than those before it.
    pub(crate) fn add(&mut self, sample: Sample) {
        match self.reference(&sample).and_then(|reference| difference(&sample.figures, &reference.figures)) {
            Some(difference) => {
                self.fail(format!("{}, batch {}: {difference}", sample.contender, sample.batch));
            }
            None => self.samples.push(sample),
        }
    }

    /// A turn with the same data. Processes that do not communicate train models of their own.
    fn reference(&self, sample: &Sample) -> Option<&Sample> {
        let comparable = |contender: Contender| contender != Contender::OursIndependent;
        let same = |other: &&Sample| {
            (other.batch, other.contender.ranks()) == (sample.batch, sample.contender.ranks())
                && comparable(other.contender)
        };
        self.samples.iter().find(same).filter(|_| comparable(sample.contender))
    }

    pub(crate) fn fail(&mut self, failure: String) {
        eprintln!("failed: {failure}");
        self.failures.push(failure);
    }

    /// Each in one line: what failed, and the first thing that it said.
    pub(crate) fn failures(&self) -> impl Iterator<Item = String> {
        self.failures.iter().map(|failure| failure.lines().take(2).collect::<Vec<_>>().join(": "))
    }

    pub(crate) fn len(&self) -> usize {
        self.samples.len()
    }

    pub(crate) fn unsteady(&self) -> usize {
        self.samples.iter().filter(|sample| !sample.steady).count()
    }

    fn of(&self, contender: Contender, batch: usize) -> impl Iterator<Item = &Sample> {
        self.samples.iter().filter(move |sample| (sample.contender, sample.batch) == (contender, batch))
    }

    pub(crate) fn rows(&self) -> Vec<Vec<String>> {
        let mut rows = vec![
            ["contender", "batch a rank", "step ms", "images/s", "peak MB a rank"]
                .map(str::to_owned)
                .to_vec(),
        ];
        let mut batches: Vec<usize> = self.samples.iter().map(|sample| sample.batch).collect();
        batches.sort_unstable_by(|a, b| b.cmp(a));
        batches.dedup();
        for (batch, contender) in batches.iter().flat_map(|batch| Contender::ALL.map(|c| (*batch, c))) {
            let column = |value: fn(&Figures) -> f64| {
                self.of(contender, batch).map(|sample| value(&sample.figures)).collect()
            };
            let Some(step) = Spread::of(column(|f| f.step_ms)) else { continue };
            let rate = Spread::of(column(|f| f.images_per_s)).map_or(0.0, |spread| spread.median);
            let peak = Spread::of(column(|f| f.peak_bytes / 1e6)).map_or(0.0, |spread| spread.median);
            rows.push(vec![
                contender.to_string(),
                batch.to_string(),
                format!("{:.1} ({:.1} to {:.1})", step.median, step.least, step.most),
                format!("{rate:.0}"),
                format!("{peak:.0}"),
            ]);
        }
        rows
    }

    /// The section on goals: medians of the ratios within a block.
    pub(crate) fn verdicts(&self, batches: &[usize]) -> String {
        let mut rows = vec![["", "what", "batch", "goal", "median of blocks"].map(str::to_owned).to_vec()];
        for goal in &GOALS {
            for &batch in batches.iter().filter(|batch| goal.batch.is_none_or(|only| only == **batch)) {
                rows.push(self.judge(goal, batch));
            }
        }
        let count = |word: &str| rows.iter().filter(|row| row[0] == word).count();
        format!("## Goals: {} PASS, {} MISS\n\n{}", count("PASS"), count("MISS"), report::table(&rows))
    }

    fn judge(&self, goal: &Goal, batch: usize) -> Vec<String> {
        let ratio = Spread::of(self.ratios(goal, batch));
        let (text, reached): (String, fn(f64, f64) -> bool) = match goal.need {
            Need::Faster(least) => (format!(">= {least}x as fast"), |ratio, need| ratio >= need),
            Need::AtMost(most) => (format!("<= {most}x the time"), |ratio, need| ratio <= need),
            Need::Shown => ("shown".to_owned(), |_, _| true),
        };
        let need = match goal.need {
            Need::Faster(need) | Need::AtMost(need) => need,
            Need::Shown => 0.0,
        };
        let (word, measured) = match ratio {
            None => ("none", "not measured".to_owned()),
            Some(spread) => {
                let word = match (goal.need, reached(spread.median, need)) {
                    (Need::Shown, _) => "",
                    (_, true) => "PASS",
                    (_, false) => "MISS",
                };
                (word, format!("{:.3} ({:.3} to {:.3})", spread.median, spread.least, spread.most))
            }
        };
        vec![
            word.to_owned(),
            format!("{} against {}", goal.ours, goal.other),
            batch.to_string(),
            text,
            measured,
        ]
    }

    fn ratios(&self, goal: &Goal, batch: usize) -> Vec<f64> {
        let pair = |ours: &Sample| {
            let other = self.of(goal.other, batch).find(|other| other.block == ours.block)?;
            let ratio = other.figures.step_ms / ours.figures.step_ms;
            Some(if matches!(goal.need, Need::AtMost(_)) { 1.0 / ratio } else { ratio })
        };
        self.of(goal.ours, batch).filter_map(pair).collect()
    }

    pub(crate) fn csv(&self) -> String {
        let mut text = String::from("contender,batch,block,steady,step_ms,images_per_s,peak_bytes\n");
        for Sample { contender, batch, block, steady, figures } in &self.samples {
            let Figures { step_ms, images_per_s, peak_bytes, .. } = figures;
            let _ = writeln!(
                text,
                "\"{contender}\",{batch},{block},{steady},{step_ms},{images_per_s},{peak_bytes}"
            );
        }
        text
    }
}

/// What differs in the first losses, if anything does.
fn difference(ours: &Figures, reference: &Figures) -> Option<String> {
    let pairs = ours.losses.iter().zip(&reference.losses).take(COMPARED);
    if ours.losses.len() != reference.losses.len() {
        return Some(format!("{} losses, others have {}", ours.losses.len(), reference.losses.len()));
    }
    let differs =
        |(a, b): (&f64, &f64)| a.is_nan() || b.is_nan() || (a - b).abs() > SAME_LOSS * a.abs().max(b.abs());
    let step = pairs.clone().position(differs)?;
    Some(format!("loss of step {step} is {}, of others {}", ours.losses[step], reference.losses[step]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(contender: Contender, step_ms: f64, losses: &[f64]) -> Sample {
        let figures = Figures { step_ms, images_per_s: 1.0, losses: losses.to_vec(), peak_bytes: 1e6 };
        Sample { contender, batch: 32, block: 0, figures, steady: true }
    }

    #[test]
    fn a_contender_that_trains_something_else_does_not_count() {
        let mut tally = Tally::default();
        tally.add(sample(Contender::Torch, 100.0, &[2.0, 1.0]));
        tally.add(sample(Contender::Ours, 50.0, &[2.0, 1.5]));
        tally.add(sample(Contender::Ours, 50.0, &[2.0, f64::NAN]));
        tally.add(sample(Contender::OursIndependent, 49.0, &[9.0, 9.0]));
        tally.add(sample(Contender::OursAlone, 49.0, &[3.0, 3.0]));
        assert_eq!((tally.len(), tally.failures().count()), (3, 2));
        assert!(tally.verdicts(&[32]).contains("0 PASS, 0 MISS"));
        tally.add(sample(Contender::Ours, 50.0, &[2.0001, 1.0]));
        let text = tally.verdicts(&[32]);
        assert!(text.contains("2 PASS, 0 MISS") && text.contains("2.000 (2.000 to 2.000)"), "{text}");
    }
}
