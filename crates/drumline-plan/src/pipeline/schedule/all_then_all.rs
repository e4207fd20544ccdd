//! GPipe and its breadth-first form for several stages a rank: all forwards, then all backwards.

use super::super::action::{Action, Compute};
use super::{PipelineSize, Schedule};

/// The computations of a rank.
pub(super) fn row(schedule: Schedule, size: PipelineSize, rank: usize) -> Vec<Action> {
    let stage = |chunk| chunk * size.ranks + rank;
    let forwards = (0..size.chunks).flat_map(|chunk| {
        (0..size.micro_batches)
            .map(move |micro_batch| Action::compute(Compute::Forward, stage(chunk), micro_batch))
    });
    let backwards = (0..size.chunks).rev().flat_map(|chunk| {
        (0..size.micro_batches).map(move |turn| {
            // PyTorch's breadth-first schedule frees the latest activations first.
            let micro_batch = match schedule {
                Schedule::BreadthFirst => size.micro_batches - 1 - turn,
                _ => turn,
            };
            Action::compute(Compute::Backward, stage(chunk), micro_batch)
        })
    });
    forwards.chain(backwards).collect()
}

#[cfg(test)]
mod tests {
    use super::super::tests_support::written;
    use super::*;

    #[test]
    fn gpipe_keeps_the_order_and_breadth_first_reverses_it() {
        let size = PipelineSize { ranks: 2, chunks: 1, micro_batches: 3 };
        assert_eq!(written(&row(Schedule::GPipe, size, 1)), "1F0 1F1 1F2 1B0 1B1 1B2");
        let size = PipelineSize { chunks: 2, ..size };
        assert_eq!(
            written(&row(Schedule::BreadthFirst, size, 1)),
            "1F0 1F1 1F2 3F0 3F1 3F2 3B2 3B1 3B0 1B2 1B1 1B0"
        );
    }
}
