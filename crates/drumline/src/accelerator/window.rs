//! Windows and their turns: the counts of each rank, and the resulting weight of each batch.
//!
//! ```text
//!   window of 2:          turn 0          turn 1 (last: reduces)
//!   rank 0               4 samples       4 samples          weighs 4/11 of the window's mean, 4/11
//!   rank 1               3 samples       a filler           weighs 3/11, nothing
//! ```
//! Weights are numbers of samples, or whatever a loader counts, such as tokens. Ranks average gradients, so a mean loss
//! is multiplied by its weight × ranks ÷ weight of the whole window, and the reduction yields the mean over everything.

use std::cell::Cell;
use std::collections::VecDeque;
use std::rc::Rc;

use drumline_parallel::{Agreed, Brought, Count};

use super::error::Result;
use super::shared::{Entry, Shared};
use crate::comm::shared_failure::{LocalFailure, SharedFailure, agree};

/// A batch of this rank with its count.
pub(super) struct CountedBatch<B> {
    pub(super) batch: B,
    pub(super) count: Count,
}

/// What the turns of a window share.
#[derive(Debug, Default)]
pub(super) struct Window {
    /// Backwards so far.
    pub(super) backwards: Cell<usize>,
    /// The agreement of all ranks, in a prepared loop.
    pub(super) agreed: Option<Agreed>,
    /// The step whose masks its forwards draw, from the first of them on.
    pub(super) masks_of: Cell<Option<u64>>,
}

/// One turn, as this rank sees it.
#[derive(Debug)]
pub(super) struct Turn {
    pub(super) window: Rc<Window>,
    /// The factor of a mean loss; `None` if nothing of this rank counts.
    pub(super) factor: Option<f64>,
    /// Whether this turn ends the window.
    pub(super) is_last: bool,
    /// The samples of each rank; empty outside prepared loops.
    pub(super) samples: Vec<usize>,
    /// This rank's samples in the turns of the window before this one; 0 outside prepared loops.
    pub(super) seen: usize,
    /// Forwards in this turn that have drawn masks.
    pub(super) forwards: Cell<usize>,
    /// Backwards in this turn.
    pub(super) backwards: Cell<usize>,
}

impl Turn {
    /// A backward outside all loops: a window of its own, in which ranks have equal weight.
    pub(super) fn alone() -> Self {
        Self {
            window: Rc::default(),
            factor: Some(1.0),
            is_last: true,
            samples: Vec::new(),
            seen: 0,
            forwards: Cell::new(0),
            backwards: Cell::new(0),
        }
    }

    /// Whether the window has incomplete gradients: more turns follow, or this turn's backward.
    pub(super) fn is_open(&self) -> bool {
        self.window.backwards.get() > 0 && !(self.is_last && self.backwards.get() > 0)
    }

    pub(super) fn note_backward(&self) {
        self.backwards.set(self.backwards.get() + 1);
        self.window.backwards.set(self.window.backwards.get() + 1);
    }
}

/// The turns of a window, as seen by `rank`.
fn turns_of(agreed: Agreed, rank: usize) -> Vec<Turn> {
    let each: Vec<Vec<Count>> = agreed.micro_batches.clone();
    let window = Rc::new(Window { agreed: Some(agreed), ..Window::default() });
    let (num, mut seen) = (each.len(), 0);
    let turn = |(place, counts): (usize, Vec<Count>)| {
        let before = seen;
        seen += counts[rank].samples;
        let agreed = window.agreed.as_ref().filter(|_| counts[rank].samples > 0);
        Turn {
            factor: agreed.map(|agreed| agreed.factor_of_mean(counts[rank].weight)),
            window: window.clone(),
            is_last: place + 1 == num,
            samples: counts.iter().map(|count| count.samples).collect(),
            seen: before,
            forwards: Cell::new(0),
            backwards: Cell::new(0),
        }
    };
    each.into_iter().enumerate().map(turn).collect()
}

/// The totals of a rank's batches.
fn brought(counts: &[Count], failed: bool) -> Brought {
    Brought {
        batches: counts.len(),
        samples: counts.iter().map(|count| count.samples).sum(),
        count: counts.iter().map(|count| count.weight).sum(),
        failed,
        ..Brought::default()
    }
}

/// The turns of a loop over this rank's batches; all ranks take the same number of them.
pub(super) struct Turns<B, I> {
    source: I,
    shared: Rc<Shared>,
    /// The entry of this loop, which holds its current turn.
    entry: Entry,
    upcoming: VecDeque<(Option<B>, Turn)>,
    has_begun: bool,
    is_done: bool,
}

impl<B, I: Iterator<Item = std::result::Result<CountedBatch<B>, LocalFailure>>> Turns<B, I> {
    pub(super) fn new(source: I, shared: &Rc<Shared>) -> Self {
        Self {
            source,
            shared: shared.clone(),
            entry: Entry::new(shared),
            upcoming: VecDeque::new(),
            has_begun: false,
            is_done: false,
        }
    }

    /// The batch of the next turn; `Some(Ok(None))` if this rank has none.
    pub(super) fn next(&mut self) -> Option<Result<Option<B>>> {
        if self.upcoming.is_empty()
            && !self.is_done
            && let Err(error) = self.fetch()
        {
            self.end();
            return Some(Err(error));
        }
        let Some((batch, turn)) = self.upcoming.pop_front() else {
            let ended = !std::mem::replace(&mut self.is_done, true);
            self.end();
            return ended.then(|| self.shared.settle().err().map(Err)).flatten();
        };
        self.entry.begin(turn);
        Some(Ok(batch))
    }

    fn end(&mut self) {
        self.is_done = true;
        self.entry.end();
    }

    /// Takes this rank's batches of a window, and agrees with the other ranks.
    fn fetch(&mut self) -> Result {
        if !std::mem::replace(&mut self.has_begun, true) {
            self.shared.settle()?;
        }
        let longest = self.shared.window;
        let (mut batches, mut counts, mut failure) = (Vec::new(), Vec::new(), None);
        while batches.len() < longest {
            match self.source.next() {
                None => break,
                Some(Ok(CountedBatch { batch, count })) => {
                    batches.push(batch);
                    counts.push(count);
                }
                Some(Err(error)) => {
                    failure = Some(error);
                    break;
                }
            }
        }
        let brought = brought(&counts, failure.is_some());
        let agreed = Agreed::reach_for_each(&self.shared.mesh, &brought, &counts, longest)?;
        if agreed.failed {
            return agree(&self.shared.group, failure.map_or(Ok(()), Err));
        }
        let total = agreed.count;
        let has_weight = total > 0.0 && total.is_finite();
        if !(has_weight || agreed.micro_batches.is_empty()) {
            return Err(SharedFailure::on_all_ranks(format!(
                "the batches of a step have a total weight of {total}; try data without batches of weight 0"
            ))
            .into());
        }
        let batches = batches.into_iter().map(Some).chain(std::iter::repeat_with(|| None));
        let turns = turns_of(agreed, self.shared.group.rank());
        self.upcoming = batches.zip(turns).collect();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use drumline_comm::{Axis, LocalGroup, Mesh};

    /// The factor, whether the turn is the last, and the samples of each rank.
    type Seen = (Option<f64>, bool, Vec<usize>);

    /// The turns of each rank, for batches with these numbers of samples.
    fn turns(ranks: &[&[usize]], longest: usize) -> Vec<Vec<Seen>> {
        let turns = LocalGroup::run(ranks.len(), |group| {
            let count = |samples: &usize| Count { samples: *samples, weight: *samples as f64 };
            let counts: Vec<Count> = ranks[group.rank()].iter().map(count).collect();
            let mesh = Mesh::along(&group, Axis::Dp)?;
            let agreed = Agreed::reach_for_each(&mesh, &brought(&counts, false), &counts, longest)?;
            let turns = turns_of(agreed, group.rank()).into_iter();
            Ok(turns.map(|turn| (turn.factor, turn.is_last, turn.samples)).collect())
        });
        turns.unwrap()
    }

    #[test]
    fn each_sample_of_a_window_weighs_the_same() {
        let all = turns(&[&[4, 4], &[3, 0], &[3]], 3);
        for (turns, samples) in all.iter().zip([[4, 4], [3, 0], [3, 0]]) {
            for ((factor, ..), samples) in turns.iter().zip(samples) {
                // Averaged over ranks, the weight of a sample is 1/14.
                let part = factor.unwrap_or(0.0) / 3.0;
                assert!((part - f64::from(samples) / 14.0).abs() < 1e-12, "{part}");
                assert_eq!(factor.is_none(), samples == 0);
            }
        }
        let ends: Vec<_> = all[1].iter().map(|(_, is_last, samples)| (*is_last, samples.clone())).collect();
        assert_eq!(ends, [(false, vec![4, 3, 3]), (true, vec![4, 0, 0])]);
    }

    #[test]
    fn a_window_is_open_until_its_last_backward() {
        let window = Rc::<Window>::default();
        let turns = [false, true].map(|is_last| Turn { window: window.clone(), is_last, ..Turn::alone() });
        assert!(!turns[0].is_open(), "nothing has begun");
        turns[0].note_backward();
        assert!(turns[0].is_open() && turns[1].is_open());
        turns[1].note_backward();
        assert!(!turns[1].is_open());
    }
}
