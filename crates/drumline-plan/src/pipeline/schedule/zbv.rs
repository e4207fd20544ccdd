//! ZB-V: two stages a rank along a V, so that a micro-batch ends on the rank on which it began.
//!
//! ```text
//!   rank 0:  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 …      the last stage is on rank 0: its backward begins there at once
//!   rank 1:  1F0 2F0 1F1 2F1 2I0 2W0 …
//! ```
//! Rank `r` of `p` goes through phases whose lengths follow from `r` and `p`. They fill the pipeline with `2p - 1`
//! micro-batches; if there are fewer, the computations of the missing ones are left out.

use super::super::action::{Action, Compute};
use super::PipelineSize;

use Compute::{Forward, Input, Weight};

/// A stage, and how many micro-batches it has done.
struct Progress {
    stage: usize,
    forwards: usize,
    inputs: usize,
    weights: usize,
}

impl Progress {
    fn new(stage: usize) -> Self {
        Self { stage, forwards: 0, inputs: 0, weights: 0 }
    }

    /// This for the next micro-batch.
    fn next(&mut self, compute: Compute) -> Action {
        let done = match compute {
            Forward => &mut self.forwards,
            Weight => &mut self.weights,
            _ => &mut self.inputs,
        };
        *done += 1;
        Action::compute(compute, self.stage, *done - 1)
    }
}

/// The computations of a rank.
pub(super) fn row(size: PipelineSize, rank: usize) -> Vec<Action> {
    let full = size.micro_batches.max(2 * size.ranks - 1);
    // The two arms of the V.
    let [mut down, mut up] = [rank, 2 * size.ranks - 1 - rank].map(Progress::new);
    let after = size.ranks - rank;
    let mut row: Vec<_> = (0..2 * after - 1).map(|_| down.next(Forward)).collect();
    (0..rank).for_each(|_| row.extend([up.next(Forward), down.next(Forward)]));
    (0..after).for_each(|_| row.extend([Forward, Input, Weight].map(|compute| up.next(compute))));
    while up.forwards < down.forwards || down.forwards < full {
        row.extend((down.forwards < full).then(|| down.next(Forward)));
        row.extend([Input, Weight].map(|compute| down.next(compute)));
        row.extend([Forward, Input, Weight].map(|compute| up.next(compute)));
    }
    (0..rank).for_each(|_| row.extend([down.next(Input), up.next(Input)]));
    (0..after).for_each(|_| row.extend([Input, Weight].map(|compute| down.next(compute))));
    row.extend((up.weights..up.inputs).map(|_| up.next(Weight)).collect::<Vec<_>>());
    row.extend((down.weights..down.inputs).map(|_| down.next(Weight)).collect::<Vec<_>>());
    row.retain(|action| action.works().all(|work| work.micro_batch < size.micro_batches));
    row
}

#[cfg(test)]
mod tests {
    use super::super::tests_support::written;
    use super::*;

    #[test]
    fn it_is_as_in_pytorch() {
        let size = PipelineSize { ranks: 2, chunks: 2, micro_batches: 4 };
        let rows = [
            "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3",
            "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3",
        ];
        for (rank, expected) in rows.into_iter().enumerate() {
            assert_eq!(written(&row(size, rank)), expected, "rank {rank}");
        }
    }

    #[test]
    fn missing_micro_batches_are_left_out() {
        let size = PipelineSize { ranks: 2, chunks: 2, micro_batches: 1 };
        assert_eq!(written(&row(size, 0)), "0F0 3F0 3I0 3W0 0I0 0W0");
        assert_eq!(written(&row(size, 1)), "1F0 2F0 2I0 2W0 1I0 1W0");
    }
}
