//! The goals: ours against another, by the medians of the ratios within a block.

use super::training::{
    Batch, How, OURS, OURS_ALONE, OURS_INDEPENDENT, TORCH, TORCH_ALONE, TORCH_ALONE_TUNED, TORCH_TUNED,
    Training,
};
use crate::bench::contender::Contender;
use crate::bench::contest::TallyOf;
use crate::bench::need::Need;
use crate::bench::report::{self, row};
use crate::bench::step_goal::StepGoal;

struct Goal {
    steps: StepGoal<How>,
    /// The only batch that it is for.
    batch: Option<usize>,
}

const fn goal(ours: Contender<How>, other: Contender<How>, batch: Option<usize>, need: Need) -> Goal {
    Goal { steps: StepGoal { ours, other, need }, batch }
}

const GOALS: [Goal; 8] = [
    goal(OURS, TORCH, Some(32), Need::AtLeast(1.25)),
    goal(OURS, TORCH_TUNED, Some(32), Need::Shown),
    goal(OURS, TORCH, Some(16), Need::AtLeast(1.4)),
    goal(OURS, TORCH_TUNED, Some(16), Need::Shown),
    goal(OURS, OURS_INDEPENDENT, None, Need::AtMost(1.05)),
    goal(OURS_ALONE, TORCH_ALONE, None, Need::AtLeast(1.05)),
    goal(OURS_ALONE, TORCH_ALONE_TUNED, None, Need::Shown),
    goal(TORCH, TORCH_TUNED, None, Need::Shown),
];

/// The section on goals.
pub(crate) fn section(tally: &TallyOf<Training>, batches: &[usize]) -> String {
    let mut rows = vec![row!["", "what", "batch", "goal", "median of blocks"]];
    for goal in &GOALS {
        for &batch in batches.iter().filter(|batch| goal.batch.is_none_or(|only| only == **batch)) {
            rows.push(goal.steps.judge::<Training>(tally, Batch(batch), |figures| figures.step_ms));
        }
    }
    report::goals(&rows)
}

#[cfg(test)]
mod tests {
    use super::super::training::Figures;
    use super::*;
    use crate::bench::contest::Unit;
    use crate::bench::tally::{Tally, Turn};

    #[test]
    fn a_goal_is_reached_once_both_sides_are_measured() {
        let mut tally = Tally::default();
        let mut add = |contender, step_ms| {
            let figures = Figures { step_ms, images_per_s: 1.0, losses: Vec::new(), peak_bytes: 1e6 };
            let unit = Unit { case: Batch(32), contender };
            tally.add(Turn { unit, block: 0, figures, steady: true });
            section(&tally, &[32])
        };
        add(TORCH, 100.0);
        assert!(add(OURS_INDEPENDENT, 49.0).contains("0 PASS, 0 MISS"));
        let text = add(OURS, 50.0);
        assert!(text.contains("2 PASS, 0 MISS") && text.contains("2.000 (2.000 to 2.000)"), "{text}");
    }
}
