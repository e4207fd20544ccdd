//! What was measured, the check that all compute the same, and the goals.

use super::contest::{Case, Contender, Figures};
use crate::bench::report;
use crate::bench::spread::Spread;
use crate::bench::turns::{Turn, Turns};
use std::fmt::Write;

/// How much results may differ, of the larger one.
const SAME: f64 = 1e-3;
/// How many times as fast as PyTorch.
const TRAINING_GOAL: f64 = 1.2;
const DECODING_GOAL: f64 = 2.0;

/// Who did what.
pub(crate) type Unit = (Contender, Case);

#[derive(Debug, Default)]
pub(crate) struct Tally {
    /// What the first contender of each case computed.
    references: Vec<(Case, Vec<f64>)>,
    pub(crate) turns: Turns<Unit, Figures>,
}

impl Tally {
    /// A contender that computes something else cannot be compared.
    pub(crate) fn check(&mut self, case: Case, contender: Contender, figures: Figures) -> anyhow::Result<()> {
        let Some((_, reference)) = self.references.iter().find(|(other, _)| *other == case) else {
            self.references.push((case, figures.results));
            return Ok(());
        };
        let same = |(a, b): (&f64, &f64)| (a - b).abs() <= SAME * a.abs().max(b.abs());
        let is_same = reference.len() == figures.results.len()
            && !reference.is_empty()
            && figures.results.iter().zip(reference).all(same);
        anyhow::ensure!(is_same, "{contender}, {case}: {:?}, others have {reference:?}", figures.results);
        Ok(())
    }

    /// Keeps a turn, unless nothing was learnt in it.
    pub(crate) fn add(&mut self, turn: Turn<Unit, Figures>) {
        let ((contender, case), figures) = (turn.unit, &turn.figures);
        let falls = figures.results.last() < figures.results.first();
        if case.is_training() && !falls {
            let went = figures.shown_results();
            return self.turns.fail(format!("{contender}, {case}: the loss went {went}"));
        }
        self.turns.add(turn);
    }

    fn cases(&self) -> impl Iterator<Item = Case> {
        self.references.iter().map(|(case, _)| *case)
    }

    pub(crate) fn rows(&self) -> Vec<Vec<String>> {
        let heads =
            ["", "contender", "step or batch, ms", "tokens/s", "processor ms a step", "peak MB a rank"];
        let mut rows = vec![heads.map(str::to_owned).to_vec()];
        for case in self.cases() {
            for &contender in case.contenders() {
                let column = |value: fn(&Figures) -> Option<f64>| self.turns.spread((contender, case), value);
                let Some(step) = column(|f| Some(f.step_ms)) else { continue };
                let middle = |value| column(value).map_or("-".to_owned(), |s| format!("{:.0}", s.median));
                rows.push(vec![
                    case.to_string(),
                    contender.to_string(),
                    step.shown(1),
                    middle(|f| Some(f.tokens_per_s)),
                    middle(|f| f.cpu_ms),
                    middle(|f| f.peak_bytes.map(|bytes| bytes / 1e6)),
                ]);
            }
        }
        rows
    }

    /// The section on goals: medians of the ratios within a block.
    pub(crate) fn verdicts(&self) -> String {
        let heads = ["", "", "Drumline against", "goal", "tokens/s", "processor time"];
        let mut rows = vec![heads.map(str::to_owned).to_vec()];
        for case in self.cases() {
            for &other in &case.contenders()[1..] {
                rows.push(self.judge(case, other));
            }
        }
        report::goals(&rows)
    }

    fn judge(&self, case: Case, other: Contender) -> Vec<String> {
        let goal = if case.is_training() { TRAINING_GOAL } else { DECODING_GOAL };
        let is_goal = other == Contender::Torch;
        let units = ((Contender::Ours, case), (other, case));
        let ratio = |of: fn(&Figures, &Figures) -> Option<f64>| self.turns.ratio(units.0, units.1, of);
        let rate = ratio(|ours, other| Some(ours.tokens_per_s / other.tokens_per_s));
        let processor = ratio(|ours, other| Some(other.cpu_ms? / ours.cpu_ms?));
        let word = match rate {
            None => "none",
            Some(_) if !is_goal => "",
            Some(rate) if rate.median >= goal => "PASS",
            Some(_) => "MISS",
        };
        let shown = |ratio: Option<Spread>| {
            ratio.map_or("-".to_owned(), |r| format!("{:.2}x ({:.2} to {:.2})", r.median, r.least, r.most))
        };
        let goal = if is_goal { format!(">= {goal}x") } else { "shown".to_owned() };
        vec![word.to_owned(), case.to_string(), other.to_string(), goal, shown(rate), shown(processor)]
    }

    pub(crate) fn csv(&self) -> String {
        let mut text = String::from("case,contender,block,steady,step_ms,tokens_per_s,cpu_ms,peak_bytes\n");
        for Turn { unit: (contender, case), block, steady, figures } in self.turns.all() {
            let Figures { step_ms, tokens_per_s, .. } = figures;
            let optional = |value: Option<f64>| value.map_or(String::new(), |value| value.to_string());
            let (cpu, peak) = (optional(figures.cpu_ms), optional(figures.peak_bytes));
            let _ =
                writeln!(text, "{case},{contender},{block},{steady},{step_ms},{tokens_per_s},{cpu},{peak}");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(tokens_per_s: f64, results: &[f64]) -> Figures {
        Figures { step_ms: 1.0, tokens_per_s, cpu_ms: Some(2.0), peak_bytes: None, results: results.to_vec() }
    }

    #[test]
    fn other_results_are_an_error_and_no_learning_does_not_count() {
        let mut tally = Tally::default();
        tally.check(Case::Small, Contender::Ours, figures(1.0, &[2.0, 1.0])).unwrap();
        tally.check(Case::Small, Contender::Torch, figures(1.0, &[2.0, 1.0005])).unwrap();
        let differs = tally.check(Case::Small, Contender::Torch, figures(1.0, &[2.0, 1.1])).unwrap_err();
        assert!(differs.to_string().starts_with("PyTorch, train small"), "{differs}");
        tally.check(Case::Small, Contender::Torch, figures(1.0, &[2.0, f64::NAN])).unwrap_err();
        let turn = |contender, rate, results: &[f64]| Turn {
            unit: (contender, Case::Small),
            block: 0,
            figures: figures(rate, results),
            steady: true,
        };
        tally.add(turn(Contender::Ours, 130.0, &[2.0, 1.0]));
        tally.add(turn(Contender::Torch, 100.0, &[2.0, 2.5]));
        assert_eq!((tally.turns.all().count(), tally.turns.failures().lines().count()), (1, 1));
        assert!(tally.verdicts().contains("0 PASS, 0 MISS"));
        tally.add(turn(Contender::Torch, 100.0, &[2.0, 1.5]));
        assert!(tally.verdicts().contains("1 PASS, 0 MISS") && tally.verdicts().contains("1.30x"));
    }
}
