//! How a step is made, decided purely: each rank says what it could do with its batches, and all go the same way, as calls from GPU to GPU are part of
//! the graphs.
//!
//! ```text
//!   rank 0   three steps of this key were made     by graphs ─┐
//!   rank 1   a batch of another shape              eager     ─┴─ meeting ─▶ all: eager
//! ```
//! A recording is made by all ranks in the same step or by none: where one has to record, the others forget what they have, and record with it. Not here: recording and launching (`graphs`).

use tch::{Kind, Tensor};

use super::batch::Batch;
use super::callbacks::GradientClip;
use super::meeting::Agreed;

/// Steps of one shape in a row that are made as they are before one is recorded: libraries choose their kernels in them, and optimizers make what they keep.
const WARM_UPS: u32 = 3;

/// Steps without two of one shape in a row after which the waiting ends.
const PATIENCE: u32 = 64;

/// How a step is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// Operation by operation.
    Eager,
    /// By graphs, which may have to be recorded first.
    Graphs,
}

impl Way {
    /// The same on all ranks.
    pub(super) fn of(agreed: &Agreed) -> Self {
        if agreed.graphs && !agreed.is_uneven { Self::Graphs } else { Self::Eager }
    }
}

/// What a rank could do with the batches of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wish {
    Eager,
    Graphs,
    /// Eager, and what was recorded is of no use any more: parameters were frozen, thawed or replaced.
    Forget,
    /// Eager, since gradients are clipped by other bounds than in the recorded step.
    OtherClips,
    /// Eager, from now on.
    Never(&'static str),
}

/// The shapes and kinds of the tensors of a step's batches.
pub(super) type Shapes = Vec<(Vec<i64>, Kind)>;

/// Those of batches that list their tensors.
pub(super) fn shapes<B: Batch>(batches: &[B]) -> Option<Shapes> {
    Some(tensors(batches)?.iter().map(|tensor| (tensor.size(), tensor.kind())).collect())
}

/// All tensors of batches that list them.
pub(super) fn tensors<B: Batch>(batches: &[B]) -> Option<Vec<&Tensor>> {
    Some(batches.iter().map(Batch::tensors).collect::<Option<Vec<_>>>()?.concat())
}

/// What a graph has of a parameter for good: where it lies, and whether backward reaches it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Parameter {
    address: usize,
    requires_grad: bool,
}

impl Parameter {
    pub(super) fn of(tensor: &Tensor) -> Self {
        Self { address: tensor.data_ptr() as usize, requires_grad: tensor.requires_grad() }
    }
}

/// All that a recorded step depends on, but for the values in tensors, which each launch reads again. The rest of a training is settled before its first step: precision,
/// scaling, loss and the number of micro-batches.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Key {
    pub(super) shapes: Shapes,
    pub(super) parameters: Vec<Parameter>,
    pub(super) clips: Vec<GradientClip>,
}

impl Key {
    /// What to do with a step of this key where one of another was recorded.
    fn against(&self, recorded: &Self) -> Wish {
        match () {
            () if self.parameters != recorded.parameters => Wish::Forget,
            () if self.shapes != recorded.shapes => Wish::Eager,
            () if self.clips != recorded.clips => Wish::OtherClips,
            () => Wish::Graphs,
        }
    }
}

/// What a rank has seen of its steps.
#[derive(Debug, Default)]
pub(super) struct Seen {
    /// The key of the last step.
    key: Key,
    /// How many in a row had it.
    times: u32,
    /// Steps since keys were first looked at.
    looked: u32,
}

impl Seen {
    /// What the rank could do with a step of this key, which is `None` where batches do not list their tensors, given that of which a step is `recorded`.
    pub(super) fn wish(&mut self, key: Option<Key>, recorded: Option<&Key>) -> Wish {
        let Some(key) = key else {
            return Wish::Never("its batches do not list their tensors; try implementing `Batch::tensors`");
        };
        if key.shapes.is_empty() {
            return Wish::Eager; // There is no batch.
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
        match self.times > WARM_UPS {
            true => Wish::Graphs,
            false if self.looked > PATIENCE => Wish::Never(
                "the shapes of its batches change from step to step, or what is trained or clipped does",
            ),
            false => Wish::Eager,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::meeting::{Brought, agreed_by};
    use super::*;

    fn of(rows: i64) -> Key {
        let shapes = vec![(vec![rows, 3], Kind::Float), (vec![rows], Kind::Int64)];
        let parameters = (0..3).map(|place| Parameter { address: 64 * place, requires_grad: true }).collect();
        Key { shapes, parameters, clips: vec![GradientClip::norm(1.0)] }
    }

    /// The same with one parameter frozen.
    fn frozen(rows: i64) -> Key {
        let mut key = of(rows);
        key.parameters[1].requires_grad = false;
        key
    }

    /// What is wished for in steps of batches with so many rows.
    fn wishes(rows: &[i64], recorded: Option<&Key>) -> Vec<Wish> {
        let mut seen = Seen::default();
        rows.iter().map(|rows| seen.wish(Some(of(*rows)), recorded)).collect()
    }

    #[test]
    fn a_step_is_recorded_after_three_of_its_shape_in_a_row() {
        use Wish::{Eager, Graphs};
        assert_eq!(wishes(&[8; 5], None), [Eager, Eager, Eager, Graphs, Graphs]);
        assert_eq!(wishes(&[8, 8, 8, 5, 8, 8, 8, 8], None)[3..], [Eager, Eager, Eager, Eager, Graphs]);
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
    fn only_what_is_recorded_is_launched_and_the_rest_is_made_as_it_is() {
        use Wish::{Eager, Graphs};
        assert_eq!(wishes(&[8, 5, 8, 5, 5, 5, 5, 5], Some(&of(8)))[..3], [Graphs, Eager, Graphs]);
        assert_eq!(wishes(&[5; 100], Some(&of(8))), [Eager; 100], "nothing is given up");
    }

    #[test]
    fn freezing_and_thawing_records_again() {
        let mut seen = Seen::default();
        let recorded = of(8);
        assert_eq!(seen.wish(Some(of(8)), Some(&recorded)), Wish::Graphs);
        for (change, at_once) in [(frozen(8), Wish::Forget), (frozen(5), Wish::Forget)] {
            assert_eq!(seen.wish(Some(change), Some(&recorded)), at_once);
        }
        // Nothing is recorded any more; the step that was forgotten counts as the first.
        seen.wish(Some(frozen(8)), Some(&recorded));
        let then: Vec<_> = (0..3).map(|_| seen.wish(Some(frozen(8)), None)).collect();
        assert_eq!(then, [Wish::Eager, Wish::Eager, Wish::Graphs]);
        assert_eq!(seen.wish(Some(of(8)), Some(&frozen(8))), Wish::Forget, "thawed");
        assert_eq!(seen.wish(Some(frozen(8)), None), Wish::Eager, "and frozen again before it was recorded");
    }

    #[test]
    fn each_part_of_a_key_counts() {
        let recorded = of(8);
        let mut moved = of(8);
        moved.parameters[2].address += 64;
        let fewer = Key { parameters: recorded.parameters[..2].to_vec(), ..of(8) };
        let clipped = Key { clips: vec![GradientClip::norm(0.5)], ..of(8) };
        let unclipped = Key { clips: Vec::new(), ..of(8) };
        let wish = |key: &Key| key.against(&recorded);
        assert_eq!(wish(&of(8)), Wish::Graphs);
        assert_eq!([&moved, &fewer, &frozen(8)].map(wish), [Wish::Forget; 3]);
        assert_eq!([&clipped, &unclipped].map(wish), [Wish::OtherClips; 2]);
        assert_eq!(wish(&of(5)), Wish::Eager, "a short last batch takes nothing away");
    }

    #[test]
    fn waiting_ends_where_shapes_never_stay() {
        let rows: Vec<i64> = (0..65).collect();
        let all = wishes(&rows, None);
        assert!(all[..64].iter().all(|wish| *wish == Wish::Eager));
        assert!(matches!(all[64], Wish::Never(why) if why.contains("change from step to step")));
        let told = Seen::default().wish(None, None);
        assert!(matches!(told, Wish::Never(why) if why.contains("Batch::tensors")));
    }

    #[test]
    fn a_rank_without_a_batch_has_seen_nothing() {
        let mut seen = Seen::default();
        (0..3).for_each(|_| assert_eq!(seen.wish(Some(of(8)), None), Wish::Eager));
        assert_eq!(seen.wish(Some(Key::default()), None), Wish::Eager);
        assert_eq!(seen.wish(Some(of(8)), None), Wish::Graphs);
    }

    #[test]
    fn all_ranks_go_by_graphs_or_none_does() {
        let able = Brought { batches: 2, samples: 8, count: 8.0, graphs: true, ..Brought::default() };
        let unable = Brought { graphs: false, ..able };
        for ranks in 1..5 {
            let mut all = vec![able; ranks];
            assert_eq!(Way::of(&agreed_by(&all)), Way::Graphs);
            for rank in 0..ranks {
                all[rank] = unable;
                assert_eq!(Way::of(&agreed_by(&all)), Way::Eager, "rank {rank} of {ranks} cannot");
                all[rank] = able;
            }
        }
        let fewer = Brought { batches: 1, ..able };
        assert_eq!(Way::of(&agreed_by(&[able, fewer])), Way::Eager);
        let asks = Brought { checkpoint: true, stop: true, ..able };
        let agreed = agreed_by(&[able, asks]);
        assert!(agreed.graphs && agreed.checkpoint && agreed.stop && !agreed.validation && !agreed.failed);
    }
}
