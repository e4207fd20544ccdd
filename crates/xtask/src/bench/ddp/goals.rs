//! The goals: ours against another, by the medians of the ratios within a block.

use super::training::{
    Batch, How, OURS, OURS_ALONE, OURS_INDEPENDENT, TORCH, TORCH_ALONE, TORCH_ALONE_TUNED, TORCH_TUNED,
    Training,
};
use crate::bench::contender::Contender;
use crate::bench::contest::{TallyOf, Unit};
use crate::bench::need::Need;
use crate::bench::report::{self, row};

/// `AtLeast`: the other's step takes this many times ours. `AtMost`: ours takes this many times the other's.
struct Goal {
    ours: Contender<How>,
    other: Contender<How>,
    /// The only batch that it is for.
    batch: Option<usize>,
    need: Need,
}

const GOALS: [Goal; 8] = [
    Goal { ours: OURS, other: TORCH, batch: Some(32), need: Need::AtLeast(1.25) },
    Goal { ours: OURS, other: TORCH_TUNED, batch: Some(32), need: Need::Shown },
    Goal { ours: OURS, other: TORCH, batch: Some(16), need: Need::AtLeast(1.4) },
    Goal { ours: OURS, other: TORCH_TUNED, batch: Some(16), need: Need::Shown },
    Goal { ours: OURS, other: OURS_INDEPENDENT, batch: None, need: Need::AtMost(1.05) },
    Goal { ours: OURS_ALONE, other: TORCH_ALONE, batch: None, need: Need::AtLeast(1.05) },
    Goal { ours: OURS_ALONE, other: TORCH_ALONE_TUNED, batch: None, need: Need::Shown },
    Goal { ours: TORCH, other: TORCH_TUNED, batch: None, need: Need::Shown },
];

/// The section on goals.
pub(crate) fn section(tally: &TallyOf<Training>, batches: &[usize]) -> String {
    let mut rows = vec![row!["", "what", "batch", "goal", "median of blocks"]];
    for goal in &GOALS {
        for &batch in batches.iter().filter(|batch| goal.batch.is_none_or(|only| only == **batch)) {
            rows.push(goal.judge(tally, batch));
        }
    }
    report::goals(&rows)
}

impl Goal {
    fn judge(&self, tally: &TallyOf<Training>, batch: usize) -> Vec<String> {
        let [ours, other] = [self.ours, self.other].map(|contender| Unit { case: Batch(batch), contender });
        let is_limit = matches!(self.need, Need::AtMost(_));
        let ratio = tally.ratio(ours, other, |ours, other| {
            let ratio = other.step_ms / ours.step_ms;
            Some(if is_limit { 1.0 / ratio } else { ratio })
        });
        let goal = self.need.shown(if is_limit { "x the time" } else { "x as fast" });
        let word = self.need.word(ratio.map(|ratio| ratio.median));
        let measured = ratio.map_or("not measured".to_owned(), |ratio| ratio.shown(3));
        row![word, format!("{} against {}", self.ours, self.other), batch, goal, measured]
    }
}

#[cfg(test)]
mod tests {
    use super::super::training::Figures;
    use super::*;
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
