//! The goals: steps against PyTorch's and the ideal, sleeping stages against the ideal, and the simulator against both.

use super::contest::{COMPARED_RANKS, Case, Figures, How, ONE_RANK, OURS, Pipelines, TORCH, TORCH_TUNED};
use crate::bench::contender::Contender;
use crate::bench::contest::{TallyOf, Unit};
use crate::bench::need::Need;
use crate::bench::report::{self, row};
use crate::bench::spread::Spread;
use crate::bench::step_goal::StepGoal;

/// Tokens of a small micro-batch, at most: larger ones are shown and not judged against PyTorch.
const SMALL: usize = 64;

/// The section on goals.
pub(crate) fn section(tally: &TallyOf<Pipelines>, cases: &[Case]) -> String {
    let mut rows = vec![row!["", "what", "case", "goal", "median of blocks"]];
    for &case in cases {
        match case {
            Case::Train { batch, places, .. } => rows.extend(of_training(tally, case, batch * places)),
            Case::Sleep { ranks, .. } => rows.extend(of_sleep(tally, case, ranks)),
        }
    }
    report::goals(&rows)
}

fn of_training(tally: &TallyOf<Pipelines>, case: Case, tokens: usize) -> Vec<Vec<String>> {
    let against = |other, need| {
        StepGoal { ours: OURS, other, need }.judge::<Pipelines>(tally, case, |figures| figures.step_ms)
    };
    let need = if tokens <= SMALL { Need::AtLeast(1.3) } else { Need::Shown };
    let unit = Unit { case, contender: OURS };
    let of_ideal = tally.spread(unit, |figures| Some(figures.ideal_ms? / figures.step_ms));
    vec![
        against(TORCH, need),
        against(TORCH_TUNED, need),
        against(ONE_RANK, Need::Shown),
        Goal { what: "as fast as the simulated ideal", need: Need::AtLeast(0.95) }.judge(unit, of_ideal),
        simulator(tally, unit, Need::AtMost(0.05)),
    ]
}

fn of_sleep(tally: &TallyOf<Pipelines>, case: Case, ranks: usize) -> Vec<Vec<String>> {
    let unit = |contender: Contender<How>| Unit { case, contender };
    let mut rows = Vec::new();
    if ranks == COMPARED_RANKS {
        let of_ideal = |contender| {
            let ratio = |one: &Figures, ours: &Figures| Some(one.step_ms / ours.ideal_ms?);
            tally.ratio(unit(contender), unit(OURS), ratio)
        };
        for (contender, need) in [(OURS, Need::AtMost(1.03)), (TORCH, Need::Shown)] {
            let goal = Goal { what: "time, of the simulated ideal", need };
            rows.push(goal.judge(unit(contender), of_ideal(contender)));
        }
    }
    rows.push(simulator(tally, unit(OURS), Need::AtMost(0.03)));
    rows
}

/// How far the simulator is from what was measured, as a share of it.
fn simulator(tally: &TallyOf<Pipelines>, unit: Unit<Case, How>, need: Need) -> Vec<String> {
    let distance = tally.spread(unit, |figures| Some((figures.simulated_ms? / figures.step_ms - 1.0).abs()));
    Goal { what: "distance of the simulator", need }.judge(unit, distance)
}

/// A goal about a ratio of one contender.
struct Goal {
    what: &'static str,
    need: Need,
}

impl Goal {
    fn judge(&self, unit: Unit<Case, How>, ratio: Option<Spread>) -> Vec<String> {
        let measured = ratio.map_or("not measured".to_owned(), |ratio| ratio.shown(3));
        let word = self.need.word(ratio.map(|ratio| ratio.median));
        row![word, format!("{}: {}", self.what, unit.contender), unit.case, self.need.shown(""), measured]
    }
}

#[cfg(test)]
mod tests {
    use super::super::contest::cases;
    use super::*;
    use crate::bench::tally::{Tally, Turn};

    #[test]
    fn steps_are_judged_against_pytorch_the_ideal_and_the_simulator() {
        let (cases, mut tally) = (cases(), Tally::default());
        let mut add = |case, contender, step_ms, simulator: Option<[f64; 2]>| {
            let [ideal_ms, simulated_ms] = [0, 1].map(|place: usize| simulator.map(|both| both[place]));
            let figures = Figures { step_ms, ideal_ms, simulated_ms, ..Figures::default() };
            tally.add(Turn { unit: Unit { case, contender }, block: 0, figures, steady: true });
            section(&tally, &[case])
        };
        let text = add(cases[0], OURS, 100.0, Some([96.0, 96.0]));
        assert!(text.contains("2 PASS, 0 MISS, 3 not measured"), "{text}");
        add(cases[0], TORCH, 140.0, None);
        let text = add(cases[0], TORCH_TUNED, 125.0, None);
        assert!(text.contains("3 PASS, 1 MISS, 1 not measured"), "{text}");
        // A larger micro-batch is only shown.
        add(cases[2], TORCH, 100.0, None);
        let text = add(cases[2], OURS, 100.0, Some([90.0, 94.0]));
        assert!(text.contains("0 PASS, 2 MISS, 2 not measured"), "{text}");
    }

    #[test]
    fn sleeping_stages_are_judged_with_eight_ranks_and_the_simulator_with_all() {
        let sleeping = |ranks| {
            let is_it = |case: &Case| matches!(case, Case::Sleep { ranks: n, .. } if *n == ranks);
            cases().into_iter().find(is_it).unwrap()
        };
        let mut tally = Tally::default();
        let mut add = |case, contender, step_ms| {
            let figures =
                Figures { step_ms, ideal_ms: Some(500.0), simulated_ms: Some(505.0), ..Figures::default() };
            tally.add(Turn { unit: Unit { case, contender }, block: 0, figures, steady: true });
            section(&tally, &[case])
        };
        let text = add(sleeping(32), OURS, 510.0);
        assert!(text.contains("1 PASS, 0 MISS, 0 not measured"), "{text}");
        add(sleeping(8), TORCH, 600.0);
        let text = add(sleeping(8), OURS, 520.0);
        assert!(text.contains("1 PASS, 1 MISS, 0 not measured") && text.contains("1.200"), "{text}");
    }
}
