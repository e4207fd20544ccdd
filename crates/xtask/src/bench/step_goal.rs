//! A goal about the time of a step: one contender against another, by the median of the ratios within a block.

use super::contender::Contender;
use super::contest::{Contest, TallyOf, Unit};
use super::need::Need;
use super::report::row;

/// `AtLeast`: the other's step takes this many times ours. `AtMost`: ours takes this many times the other's.
#[derive(Debug)]
pub(crate) struct StepGoal<K> {
    pub(crate) ours: Contender<K>,
    pub(crate) other: Contender<K>,
    pub(crate) need: Need,
}

impl<K: Copy + PartialEq> StepGoal<K> {
    /// The row of a case: the word, what is compared, the case, the goal, and what was measured.
    pub(crate) fn judge<C: Contest<Kind = K>>(
        &self,
        tally: &TallyOf<C>,
        case: C::Case,
        step_ms: impl Fn(&C::Figures) -> f64,
    ) -> Vec<String> {
        let [ours, other] = [self.ours, self.other].map(|contender| Unit { case, contender });
        let is_limit = matches!(self.need, Need::AtMost(_));
        let ratio = tally.ratio(ours, other, |ours, other| {
            let ratio = step_ms(other) / step_ms(ours);
            Some(if is_limit { 1.0 / ratio } else { ratio })
        });
        let goal = self.need.shown(if is_limit { "x the time" } else { "x as fast" });
        let word = self.need.word(ratio.map(|ratio| ratio.median));
        let measured = ratio.map_or("not measured".to_owned(), |ratio| ratio.shown(3));
        row![word, format!("{} against {}", self.ours, self.other), case, goal, measured]
    }
}
