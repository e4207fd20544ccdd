//! Eager or graph: decides how a step runs. Each rank reports what it could do with its batches, and all do the same,
//! because calls from GPU to GPU are part of the graphs.
//!
//! ```text
//!   rank 0   three steps had this key      graph ─┐
//!   rank 1   a batch of another shape      eager ─┴─ agreement ─▶ all: eager
//! ```
//! All ranks record in the same step, or none does: where one has to record, the others drop their recording and record
//! with it. Not here: recording and launching (`graphs`).

use tch::{Kind, Tensor};

use drumline_parallel::Agreed;

use super::batch::Batch;

/// Eager steps of one shape in a row before one is recorded: libraries choose their kernels in them, and optimizers
/// allocate their state.
const WARM_UPS: u32 = 3;

/// After this many steps without two equal ones in a row, graphs are given up.
const PATIENCE: u32 = 64;

/// How a step runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StepMode {
    /// Each operation is launched by itself.
    Eager,
    /// As CUDA graphs, which may have to be recorded first.
    Graph,
}

impl StepMode {
    /// The same on all ranks.
    pub(super) fn of(agreed: &Agreed) -> Self {
        if agreed.graph && !agreed.is_uneven() { Self::Graph } else { Self::Eager }
    }
}

/// What a rank could do with the batches of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wish {
    Eager,
    Graph,
    /// Eager, and the recording is invalid: parameters were frozen, unfrozen or replaced.
    Forget,
    /// Eager, from now on.
    Never(NeverGraph),
}

/// Why a rank never runs its steps as graphs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum NeverGraph {
    #[error("its batches do not list their tensors; try implementing `Batch::tensors`")]
    UnlistedTensors,
    #[error("the shapes of its batches change from step to step, or what is trained does")]
    ChangingSteps,
}

/// The shapes and kinds of the tensors of a step's batches.
pub(super) type Shapes = Vec<(Vec<i64>, Kind)>;

/// The shapes of batches, if they list their tensors.
pub(super) fn shapes<B: Batch>(batches: &[B]) -> Option<Shapes> {
    Some(tensors(batches)?.iter().map(|tensor| (tensor.size(), tensor.kind())).collect())
}

/// All tensors of batches, if they list them.
pub(super) fn tensors<B: Batch>(batches: &[B]) -> Option<Vec<&Tensor>> {
    Some(batches.iter().map(Batch::tensors).collect::<Option<Vec<_>>>()?.concat())
}

/// What a graph has recorded of the model.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Parameters {
    /// For each parameter: whether backward reaches it.
    are_trained: Vec<bool>,
    /// Where the tensors that this rank holds lie. Parameters that are gathered when they are used have no place of their
    /// own, but the rows that this rank owns have.
    addresses: Vec<usize>,
}

impl Parameters {
    pub(super) fn of(variables: &[Tensor], held: &[Tensor]) -> Self {
        Self {
            are_trained: variables.iter().map(Tensor::requires_grad).collect(),
            addresses: held.iter().map(|tensor| tensor.data_ptr() as usize).collect(),
        }
    }
}

/// All that a recorded step depends on, except the values in tensors, which each launch reads again. The rest is fixed
/// before the first step: precision, scaling, clipping, loss and the number of micro-batches.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Key {
    pub(super) shapes: Shapes,
    pub(super) parameters: Parameters,
}

impl Key {
    /// How to run a step of this key if one of another key is recorded.
    fn against(&self, recorded: &Self) -> Wish {
        if self.parameters != recorded.parameters {
            Wish::Forget
        } else if self.shapes != recorded.shapes {
            Wish::Eager
        } else {
            Wish::Graph
        }
    }
}

/// The recent steps of a rank.
#[derive(Debug, Default)]
pub(super) struct Seen {
    /// The key of the last step.
    key: Key,
    /// How many steps in a row had it.
    times: u32,
    /// Steps since the first one.
    looked: u32,
}

impl Seen {
    /// What the rank could do with a step of this key, given the key of the recorded step. The key is `None` if batches
    /// do not list their tensors.
    pub(super) fn wish(&mut self, key: Option<Key>, recorded: Option<&Key>) -> Wish {
        let Some(key) = key else {
            return Wish::Never(NeverGraph::UnlistedTensors);
        };
        if key.shapes.is_empty() {
            return Wish::Eager; // this rank has no batch
        }
        if let Some(recorded) = recorded {
            let wish = key.against(recorded);
            if wish == Wish::Forget {
                *self = Self { key, times: 1, looked: 1 };
            }
            return wish;
        }
        self.looked += 1;
        if self.key == key {
            self.times += 1;
        } else {
            (self.key, self.times) = (key, 1);
        }
        if self.times > WARM_UPS {
            Wish::Graph
        } else if self.looked > PATIENCE {
            Wish::Never(NeverGraph::ChangingSteps)
        } else {
            Wish::Eager
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use drumline_comm::LocalGroup;
    use drumline_comm::{Axis, Mesh};
    use drumline_parallel::Brought;

    fn of(rows: i64) -> Key {
        let shapes = vec![(vec![rows, 3], Kind::Float), (vec![rows], Kind::Int64)];
        let parameters = Parameters { are_trained: vec![true; 3], addresses: vec![0, 64, 128] };
        Key { shapes, parameters }
    }

    /// The key with one parameter frozen.
    fn frozen(rows: i64) -> Key {
        let mut key = of(rows);
        key.parameters.are_trained[1] = false;
        key
    }

    /// The wishes for steps of batches with these numbers of rows.
    fn wishes(rows: &[i64], recorded: Option<&Key>) -> Vec<Wish> {
        let mut seen = Seen::default();
        rows.iter().map(|rows| seen.wish(Some(of(*rows)), recorded)).collect()
    }

    #[test]
    fn a_step_is_recorded_after_three_of_its_shape_in_a_row() {
        use Wish::{Eager, Graph};
        assert_eq!(wishes(&[8; 5], None), [Eager, Eager, Eager, Graph, Graph]);
        assert_eq!(wishes(&[8, 8, 8, 5, 8, 8, 8, 8], None)[3..], [Eager, Eager, Eager, Eager, Graph]);
        let mut kinds = Seen::default();
        (0..3).for_each(|_| assert_eq!(kinds.wish(Some(of(8)), None), Eager));
        let half = of(8).shapes.into_iter().map(|(size, _)| (size, Kind::Half)).collect();
        assert_eq!(
            kinds.wish(Some(Key { shapes: half, ..of(8) }), None),
            Eager,
            "the same sizes of another kind"
        );
    }

    #[test]
    fn only_what_is_recorded_is_launched_and_the_rest_is_eager() {
        use Wish::{Eager, Graph};
        assert_eq!(wishes(&[8, 5, 8, 5, 5, 5, 5, 5], Some(&of(8)))[..3], [Graph, Eager, Graph]);
        assert_eq!(wishes(&[5; 100], Some(&of(8))), [Eager; 100], "the recording stays");
    }

    #[test]
    fn freezing_and_unfreezing_records_again() {
        let mut seen = Seen::default();
        let recorded = of(8);
        assert_eq!(seen.wish(Some(of(8)), Some(&recorded)), Wish::Graph);
        for (change, at_once) in [(frozen(8), Wish::Forget), (frozen(5), Wish::Forget)] {
            assert_eq!(seen.wish(Some(change), Some(&recorded)), at_once);
        }
        // Nothing is recorded any more. The step that dropped the recording counts as the first.
        seen.wish(Some(frozen(8)), Some(&recorded));
        let then: Vec<_> = (0..3).map(|_| seen.wish(Some(frozen(8)), None)).collect();
        assert_eq!(then, [Wish::Eager, Wish::Eager, Wish::Graph]);
        assert_eq!(seen.wish(Some(of(8)), Some(&frozen(8))), Wish::Forget, "unfrozen");
        assert_eq!(seen.wish(Some(frozen(8)), None), Wish::Eager, "and frozen again before it was recorded");
    }

    #[test]
    fn each_part_of_a_key_counts() {
        let recorded = of(8);
        let mut moved = of(8);
        moved.parameters.addresses[2] += 64;
        let mut fewer = of(8);
        fewer.parameters.addresses.pop();
        let wish = |key: &Key| key.against(&recorded);
        assert_eq!(wish(&of(8)), Wish::Graph);
        assert_eq!([&moved, &fewer, &frozen(8)].map(wish), [Wish::Forget; 3]);
        assert_eq!(wish(&of(5)), Wish::Eager, "a short last batch takes nothing away");
    }

    #[test]
    fn graphs_are_given_up_if_shapes_always_change() {
        let rows: Vec<i64> = (0..65).collect();
        let all = wishes(&rows, None);
        assert!(all[..64].iter().all(|wish| *wish == Wish::Eager));
        assert_eq!(all[64], Wish::Never(NeverGraph::ChangingSteps));
        assert_eq!(Seen::default().wish(None, None), Wish::Never(NeverGraph::UnlistedTensors));
    }

    #[test]
    fn a_step_without_a_batch_does_not_count() {
        let mut seen = Seen::default();
        (0..3).for_each(|_| assert_eq!(seen.wish(Some(of(8)), None), Wish::Eager));
        assert_eq!(seen.wish(Some(Key::default()), None), Wish::Eager);
        assert_eq!(seen.wish(Some(of(8)), None), Wish::Graph);
    }

    /// The agreement of ranks that contribute these.
    fn agreed(brought: &[Brought]) -> Agreed {
        let agreed = LocalGroup::run(brought.len(), |group| {
            let mesh = Mesh::along(&group, Axis::Dp)?;
            Agreed::reach(&mesh, &brought[group.rank()])
        });
        agreed.unwrap().remove(0)
    }

    #[test]
    fn all_ranks_run_graphs_or_none_does() {
        let able = Brought { batches: 2, samples: 8, count: 8.0, graph: true, ..Brought::default() };
        let unable = Brought { graph: false, ..able };
        for ranks in 1..5 {
            let mut all = vec![able; ranks];
            assert_eq!(StepMode::of(&agreed(&all)), StepMode::Graph);
            for rank in 0..ranks {
                all[rank] = unable;
                assert_eq!(StepMode::of(&agreed(&all)), StepMode::Eager, "rank {rank} of {ranks} cannot");
                all[rank] = able;
            }
        }
        let fewer = Brought { batches: 1, ..able };
        assert_eq!(StepMode::of(&agreed(&[able, fewer])), StepMode::Eager);
    }
}
