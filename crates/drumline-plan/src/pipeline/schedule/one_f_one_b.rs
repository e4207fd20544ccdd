//! 1F1B, interleaved 1F1B and ZB-H1: some forwards, then one forward and one backward in turn, then the rest of the backwards.
//!
//! ```text
//!   rank 1 of 4, 1f1b:   F0 F1 │ F2 B0 F3 B1 F4 B2 F5 B3 │ B4 B5
//!   rank 1 of 4, zb1p:   F0 F1 │ F2 I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 │ I4 W3 I5 W4 │ W5
//! ```
//! With several stages a rank, forwards come in rounds: a group of micro-batches through the first stage, the same through the
//! second one, and so on. Backwards come in the same rounds, through the last stage first.

use super::super::action::{Action, Compute};
use super::{PipelineSize, Schedule};

/// The computations of a rank, by their number.
struct Turns {
    size: PipelineSize,
    rank: usize,
    /// Micro-batches of a round.
    group: usize,
}

impl Turns {
    fn new(schedule: Schedule, size: PipelineSize, rank: usize) -> Self {
        let rounds = if schedule == Schedule::OneFOneB || size.chunks == 1 { 1 } else { size.rounds() };
        Self { size, rank, group: size.micro_batches / rounds }
    }

    /// Forwards of the rank.
    fn len(&self) -> usize {
        self.size.chunks * self.size.micro_batches
    }

    /// Forwards before the first backward.
    fn warm_up(&self, schedule: Schedule) -> usize {
        let hops = self.size.ranks - 1 - self.rank;
        let rounds_before = (self.size.chunks - 1) * self.group;
        let forwards = match schedule {
            // The next rank answers a forward by another one of its own before its backward.
            Schedule::Interleaved => rounds_before + 2 * hops,
            _ => rounds_before + hops,
        };
        forwards.min(self.len())
    }

    /// Which of the rank's stages, and which micro-batch.
    fn turn(&self, number: usize) -> (usize, usize) {
        let (round, within) =
            (number / (self.group * self.size.chunks), number % (self.group * self.size.chunks));
        (within / self.group, round * self.group + within % self.group)
    }

    fn forward(&self, number: usize) -> Action {
        let (chunk, micro_batch) = self.turn(number);
        Action::compute(Compute::Forward, chunk * self.size.ranks + self.rank, micro_batch)
    }

    fn backward(&self, compute: Compute, number: usize) -> Action {
        let (chunk, micro_batch) = self.turn(number);
        let stage = (self.size.chunks - 1 - chunk) * self.size.ranks + self.rank;
        Action::compute(compute, stage, micro_batch)
    }
}

/// The computations of a rank.
pub(super) fn row(schedule: Schedule, size: PipelineSize, rank: usize) -> Vec<Action> {
    let turns = Turns::new(schedule, size, rank);
    let warm_up = turns.warm_up(schedule);
    let mut row: Vec<_> = (0..warm_up).map(|number| turns.forward(number)).collect();
    let is_split = schedule == Schedule::ZeroBubble1P;
    let backward = if is_split { Compute::Input } else { Compute::Backward };
    // Weight gradients stay behind by as many as the rank has ranks before it, which wait for nothing but inputs' gradients.
    let behind = if is_split { rank } else { 0 };
    for number in 0..turns.len() {
        row.extend((warm_up + number < turns.len()).then(|| turns.forward(warm_up + number)));
        row.push(turns.backward(backward, number));
        let weight = number.checked_sub(behind).filter(|_| is_split);
        row.extend(weight.map(|weight| turns.backward(Compute::Weight, weight)));
    }
    let rest = turns.len().saturating_sub(behind)..turns.len();
    row.extend(rest.filter(|_| is_split).map(|weight| turns.backward(Compute::Weight, weight)));
    row
}

#[cfg(test)]
mod tests {
    use super::super::tests_support::written;
    use super::*;

    #[test]
    fn one_forward_one_backward() {
        let size = PipelineSize { ranks: 4, chunks: 1, micro_batches: 6 };
        let row = |rank| written(&super::row(Schedule::OneFOneB, size, rank));
        assert_eq!(row(0), "0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0B3 0B4 0B5");
        assert_eq!(row(3), "3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5");
    }

    #[test]
    fn fewer_micro_batches_than_ranks() {
        let size = PipelineSize { ranks: 4, chunks: 1, micro_batches: 2 };
        assert_eq!(written(&row(Schedule::OneFOneB, size, 0)), "0F0 0F1 0B0 0B1");
        assert_eq!(written(&row(Schedule::ZeroBubble1P, size, 3)), "3F0 3I0 3F1 3I1 3W0 3W1");
    }

    #[test]
    fn interleaved_is_as_in_pytorch() {
        let size = PipelineSize { ranks: 2, chunks: 2, micro_batches: 4 };
        let row = |rank| written(&super::row(Schedule::Interleaved, size, rank));
        assert_eq!(row(0), "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3");
        assert_eq!(row(1), "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3");
    }

    #[test]
    fn zero_bubble_is_as_in_pytorch() {
        let size = PipelineSize { ranks: 4, chunks: 1, micro_batches: 6 };
        let row = |rank| written(&super::row(Schedule::ZeroBubble1P, size, rank));
        let first = "0F0 0F1 0F2 0F3 0I0 0W0 0F4 0I1 0W1 0F5 0I2 0W2 0I3 0W3 0I4 0W4 0I5 0W5";
        let second = "1F0 1F1 1F2 1I0 1F3 1I1 1W0 1F4 1I2 1W1 1F5 1I3 1W2 1I4 1W3 1I5 1W4 1W5";
        assert_eq!([row(0), row(1)], [first, second]);
        assert!(row(2).starts_with("2F0 2F1 2I0 2F2 2I1 2F3 2I2 2W0 2F4 "));
        assert!(row(3).starts_with("3F0 3I0 3F1 3I1 3F2 3I2 3F3 3I3 3W0 3F4 3I4 3W1 3F5 3I5 3W2 "));
    }
}
