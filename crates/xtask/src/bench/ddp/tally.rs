//! What was measured, the check that all trained the same, and the goals.

use super::contest::{Contender, Figures};
use crate::bench::report;
use crate::bench::turns::{Turn, Turns};
use std::fmt::Write;

/// How much losses of the same step may differ, of the larger one; later steps add up what rounding did before.
const SAME_LOSS: f64 = 2e-3;
/// How many steps are compared.
const COMPARED: usize = 10;

/// Who trained, and with how many images a rank.
pub(crate) type Unit = (Contender, usize);

#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) turns: Turns<Unit, Figures>,
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
    pub(crate) fn add(&mut self, turn: Turn<Unit, Figures>) {
        match self.reference(turn.unit).and_then(|reference| difference(&turn.figures, reference)) {
            Some(difference) => {
                let (contender, batch) = turn.unit;
                self.turns.fail(format!("{contender}, batch {batch}: {difference}"));
            }
            None => self.turns.add(turn),
        }
    }

    /// What a turn with the same data gave. Processes that do not communicate train models of their own.
    fn reference(&self, (contender, batch): Unit) -> Option<&Figures> {
        let comparable = |contender: Contender| contender != Contender::OursIndependent;
        let same = |other: &&Turn<Unit, Figures>| {
            let (other, of_batch) = other.unit;
            (of_batch, other.ranks()) == (batch, contender.ranks()) && comparable(other)
        };
        let found = self.turns.all().find(same).filter(|_| comparable(contender));
        found.map(|turn| &turn.figures)
    }

    pub(crate) fn rows(&self) -> Vec<Vec<String>> {
        let mut rows = vec![
            ["contender", "batch a rank", "step ms", "images/s", "peak MB a rank"]
                .map(str::to_owned)
                .to_vec(),
        ];
        let mut batches: Vec<usize> = self.turns.all().map(|turn| turn.unit.1).collect();
        batches.sort_unstable_by(|a, b| b.cmp(a));
        batches.dedup();
        for (batch, contender) in batches.iter().flat_map(|batch| Contender::ALL.map(|c| (*batch, c))) {
            let column = |value: fn(&Figures) -> f64| {
                self.turns.spread((contender, batch), |figures| Some(value(figures)))
            };
            let Some(step) = column(|f| f.step_ms) else { continue };
            let middle = |value| column(value).map_or(0.0, |spread| spread.median);
            rows.push(vec![
                contender.to_string(),
                batch.to_string(),
                step.shown(1),
                format!("{:.0}", middle(|f| f.images_per_s)),
                format!("{:.0}", middle(|f| f.peak_bytes / 1e6)),
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
        report::goals(&rows)
    }

    fn judge(&self, goal: &Goal, batch: usize) -> Vec<String> {
        let is_limit = matches!(goal.need, Need::AtMost(_));
        let ratio = self.turns.ratio((goal.ours, batch), (goal.other, batch), |ours, other| {
            let ratio = other.step_ms / ours.step_ms;
            Some(if is_limit { 1.0 / ratio } else { ratio })
        });
        let text = match goal.need {
            Need::Faster(least) => format!(">= {least}x as fast"),
            Need::AtMost(most) => format!("<= {most}x the time"),
            Need::Shown => "shown".to_owned(),
        };
        let word = match (goal.need, ratio) {
            (_, None) => "none",
            (Need::Shown, _) => "",
            (Need::Faster(least), Some(ratio)) if ratio.median >= least => "PASS",
            (Need::AtMost(most), Some(ratio)) if ratio.median <= most => "PASS",
            _ => "MISS",
        };
        let measured = ratio.map_or("not measured".to_owned(), |ratio| ratio.shown(3));
        let what = format!("{} against {}", goal.ours, goal.other);
        vec![word.to_owned(), what, batch.to_string(), text, measured]
    }

    pub(crate) fn csv(&self) -> String {
        let mut text = String::from("contender,batch,block,steady,step_ms,images_per_s,peak_bytes\n");
        for Turn { unit: (contender, batch), block, steady, figures } in self.turns.all() {
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

    fn turn(contender: Contender, step_ms: f64, losses: &[f64]) -> Turn<Unit, Figures> {
        let figures = Figures { step_ms, images_per_s: 1.0, losses: losses.to_vec(), peak_bytes: 1e6 };
        Turn { unit: (contender, 32), block: 0, figures, steady: true }
    }

    #[test]
    fn a_contender_that_trains_something_else_does_not_count() {
        let mut tally = Tally::default();
        tally.add(turn(Contender::Torch, 100.0, &[2.0, 1.0]));
        tally.add(turn(Contender::Ours, 50.0, &[2.0, 1.5]));
        tally.add(turn(Contender::Ours, 50.0, &[2.0, f64::NAN]));
        tally.add(turn(Contender::OursIndependent, 49.0, &[9.0, 9.0]));
        tally.add(turn(Contender::OursAlone, 49.0, &[3.0, 3.0]));
        assert_eq!((tally.turns.all().count(), tally.turns.failures().lines().count()), (3, 2));
        assert!(tally.verdicts(&[32]).contains("0 PASS, 0 MISS"));
        tally.add(turn(Contender::Ours, 50.0, &[2.0001, 1.0]));
        let text = tally.verdicts(&[32]);
        assert!(text.contains("2 PASS, 0 MISS") && text.contains("2.000 (2.000 to 2.000)"), "{text}");
    }
}
