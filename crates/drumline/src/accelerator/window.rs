//! Windows and their turns: what each rank brings, and what each batch then weighs.
//!
//! ```text
//!   window of 2:          turn 0          turn 1 (last: reduces)
//!   rank 0               4 samples       4 samples          weighs 4/11 of the window's mean, 4/11
//!   rank 1               3 samples       a filler           weighs 3/11, nothing
//! ```
//! Weights are numbers of samples, or whatever a loader is told to count, such as tokens. Ranks average what they have, so a mean loss is
//! multiplied by its weight × ranks ÷ weight of the whole window, and the reduction makes the mean over everything of it.

use std::cell::Cell;
use std::collections::VecDeque;
use std::rc::Rc;

use drumline_comm::{CommError, ProcessGroup};

use super::error::Result;
use super::shared::{Entry, Shared};
use crate::shared_failure::{SharedFailure, Trouble, agree};

/// A batch of this rank, and what it counts for.
pub(super) struct Piece<B> {
    pub(super) batch: B,
    pub(super) count: Count,
}

/// What a batch counts for; nothing where it is a filler.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) struct Count {
    pub(super) samples: usize,
    pub(super) weight: f64,
}

/// What the turns of a window have in common.
#[derive(Debug, Default)]
pub(super) struct Window {
    /// Backwards so far.
    pub(super) backwards: Cell<usize>,
    /// The rank whose buffers all begin with, where that is known.
    pub(super) buffers_of: Option<usize>,
    /// Whether some rank has no batch in some turn.
    pub(super) is_uneven: bool,
}

/// One turn, as this rank sees it.
#[derive(Debug)]
pub(super) struct Turn {
    pub(super) window: Rc<Window>,
    /// What a mean loss is multiplied with; `None` where there is nothing that counts.
    pub(super) factor: Option<f64>,
    /// Whether it ends the window.
    pub(super) is_last: bool,
    /// Of each rank; none where nobody has said.
    pub(super) samples: Vec<usize>,
    /// Backwards in this turn.
    pub(super) backwards: Cell<usize>,
}

impl Turn {
    /// A backward outside all loops: a window of its own, in which ranks weigh the same.
    pub(super) fn alone() -> Self {
        Self {
            window: Rc::default(),
            factor: Some(1.0),
            is_last: true,
            samples: Vec::new(),
            backwards: Cell::new(0),
        }
    }

    /// Whether the window has gradients that are not complete: more turns follow, or this one's backward.
    pub(super) fn is_open(&self) -> bool {
        self.window.backwards.get() > 0 && !(self.is_last && self.backwards.get() > 0)
    }

    pub(super) fn note_backward(&self) {
        self.backwards.set(self.backwards.get() + 1);
        self.window.backwards.set(self.window.backwards.get() + 1);
    }
}

/// What a rank brings to a window: whether it has trouble, and each batch's count; zeros where it has none.
fn words(is_failed: bool, counts: &[Count], longest: usize) -> Vec<f64> {
    let mut words = vec![f64::from(u8::from(is_failed)), counts.len() as f64];
    words.extend(counts.iter().flat_map(|count| [count.samples as f64, count.weight]));
    words.resize(2 + 2 * longest, 0.0);
    words
}

/// What all know after they have met.
#[derive(Debug, PartialEq)]
struct Agreed {
    is_failed: bool,
    /// Turn by turn, rank by rank.
    turns: Vec<Vec<Count>>,
}

impl Agreed {
    fn of(all: &[f64], longest: usize) -> Self {
        let ranks: Vec<&[f64]> = all.chunks(2 + 2 * longest).collect();
        let num_turns = ranks.iter().map(|words| words[1] as usize).max().unwrap_or(0);
        let count = |words: &[f64], turn: usize| Count {
            samples: words[2 + 2 * turn] as usize,
            weight: words[3 + 2 * turn],
        };
        Self {
            is_failed: ranks.iter().any(|words| words[0] > 0.0),
            turns: (0..num_turns)
                .map(|turn| ranks.iter().map(|words| count(words, turn)).collect())
                .collect(),
        }
    }

    fn total(&self) -> f64 {
        self.turns.iter().flatten().map(|count| count.weight).sum()
    }

    /// The first rank with data in the last turn: ranks only ever run out, so it has had data in all turns.
    fn buffers_of(&self) -> Option<usize> {
        self.turns.last()?.iter().position(|count| count.samples > 0)
    }

    /// The turns as `rank` sees them.
    fn turns_of(&self, rank: usize) -> impl Iterator<Item = Turn> {
        let is_uneven = self.turns.iter().flatten().any(|count| count.samples == 0);
        let window = Rc::new(Window { buffers_of: self.buffers_of(), is_uneven, ..Window::default() });
        let (num, total) = (self.turns.len(), self.total());
        self.turns.iter().enumerate().map(move |(place, counts)| Turn {
            window: window.clone(),
            factor: (counts[rank].samples > 0).then(|| counts[rank].weight * counts.len() as f64 / total),
            is_last: place + 1 == num,
            samples: counts.iter().map(|count| count.samples).collect(),
            backwards: Cell::new(0),
        })
    }
}

fn meet(group: &ProcessGroup, own: &[f64], longest: usize) -> std::result::Result<Agreed, CommError> {
    let mut all = vec![0.0; own.len() * group.size()];
    group.all_gather(own, &mut all)?;
    Ok(Agreed::of(&all, longest))
}

/// The turns of a loop over this rank's batches; all ranks take the same number of them.
pub(super) struct Turns<B, I> {
    source: I,
    shared: Rc<Shared>,
    /// This loop among those that are going on; the turn that it is in.
    entry: Entry,
    coming: VecDeque<(Option<B>, Turn)>,
    has_begun: bool,
    is_done: bool,
}

impl<B, I: Iterator<Item = std::result::Result<Piece<B>, Trouble>>> Turns<B, I> {
    pub(super) fn new(source: I, shared: &Rc<Shared>) -> Self {
        Self {
            source,
            shared: shared.clone(),
            entry: Entry::new(shared),
            coming: VecDeque::new(),
            has_begun: false,
            is_done: false,
        }
    }

    /// The batch of the next turn, `None` in it where this rank has none.
    pub(super) fn next(&mut self) -> Option<Result<Option<B>>> {
        if self.coming.is_empty()
            && !self.is_done
            && let Err(error) = self.fetch()
        {
            self.end();
            return Some(Err(error));
        }
        let Some((batch, turn)) = self.coming.pop_front() else {
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

    /// Takes this rank's batches of a window, and meets the others.
    fn fetch(&mut self) -> Result {
        if !std::mem::replace(&mut self.has_begun, true) {
            self.shared.settle()?;
        }
        let longest = self.shared.window;
        let (mut batches, mut counts, mut trouble) = (Vec::new(), Vec::new(), None);
        while batches.len() < longest {
            match self.source.next() {
                None => break,
                Some(Ok(Piece { batch, count })) => {
                    batches.push(batch);
                    counts.push(count);
                }
                Some(Err(error)) => {
                    trouble = Some(error);
                    break;
                }
            }
        }
        let agreed = meet(&self.shared.group, &words(trouble.is_some(), &counts, longest), longest)?;
        if agreed.is_failed {
            return agree(&self.shared.group, trouble.map_or(Ok(()), Err));
        }
        let total = agreed.total();
        let has_weight = total > 0.0 && total.is_finite();
        if !(has_weight || agreed.turns.is_empty()) {
            return Err(SharedFailure::alike(format!(
                "the batches of a step weigh {total} together; try leaving out those that count nothing"
            ))
            .into());
        }
        let batches = batches.into_iter().map(Some).chain(std::iter::repeat_with(|| None));
        let turns = agreed.turns_of(self.shared.group.rank());
        self.coming = batches.zip(turns).collect();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn agreed(ranks: &[&[usize]], longest: usize) -> Agreed {
        let count = |samples: &usize| Count { samples: *samples, weight: *samples as f64 };
        let own = |samples: &&[usize]| words(false, &samples.iter().map(count).collect::<Vec<_>>(), longest);
        Agreed::of(&ranks.iter().flat_map(own).collect::<Vec<_>>(), longest)
    }

    #[test]
    fn each_sample_of_a_window_weighs_the_same() {
        let agreed = agreed(&[&[4, 4], &[3, 0], &[3]], 3);
        assert_eq!(agreed.turns.len(), 2);
        let mut all = 0.0;
        for (rank, samples) in [[4, 4], [3, 0], [3, 0]].into_iter().enumerate() {
            for (turn, samples) in agreed.turns_of(rank).zip(samples) {
                // Averaged over ranks, a sample's part is that of one in 14.
                let part = turn.factor.unwrap_or(0.0) / 3.0;
                assert!((part - f64::from(samples) / 14.0).abs() < 1e-12, "{part}");
                assert_eq!(turn.factor.is_none(), samples == 0);
                all += part;
            }
        }
        assert!((all - 1.0f64).abs() < 1e-12);
        let ends: Vec<_> = agreed.turns_of(1).map(|turn| (turn.is_last, turn.samples)).collect();
        assert_eq!(ends, [(false, vec![4, 3, 3]), (true, vec![4, 0, 0])]);
    }

    #[test]
    fn buffers_are_of_a_rank_that_has_data_to_the_end() {
        assert_eq!(agreed(&[&[2], &[2]], 1).buffers_of(), Some(0));
        assert_eq!(agreed(&[&[2, 0], &[2, 1]], 2).buffers_of(), Some(1));
        assert_eq!(agreed(&[&[], &[]], 2).buffers_of(), None);
    }

    #[test]
    fn a_window_is_open_until_its_last_backward() {
        let agreed = agreed(&[&[1, 1]], 2);
        let turns: Vec<_> = agreed.turns_of(0).collect();
        assert!(!turns[0].is_open(), "nothing has begun");
        turns[0].note_backward();
        assert!(turns[0].is_open() && turns[1].is_open());
        turns[1].note_backward();
        assert!(!turns[1].is_open());
    }
}
