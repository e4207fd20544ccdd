//! How a step is made, decided purely: each rank says what it could do with its batches, and all go the same way, as calls from GPU to GPU are part of
//! the graphs.
//!
//! ```text
//!   rank 0   three steps of this shape were made   by graphs ─┐
//!   rank 1   a batch of another shape              as it is  ─┴─ meeting ─▶ all: as it is
//! ```
//! A recording is made by all ranks in the same step or by none, so that "by graphs" means the same to all of them: to record, or to launch what each
//! has recorded of its own shapes. Not here: recording and launching (`graphs`).

use tch::{Kind, Tensor};

use super::batch::Batch;
use super::meeting::Agreed;

/// Steps of one shape in a row that are made as they are before one is recorded: libraries choose their kernels in them, and optimizers make what they keep.
const WARM_UPS: u32 = 3;

/// Steps without two of one shape in a row after which the waiting ends.
const PATIENCE: u32 = 64;

/// How a step is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// Operation by operation.
    AsItIs,
    /// By graphs, which may have to be recorded first.
    Graphs,
}

impl Way {
    /// The same on all ranks.
    pub(super) fn of(agreed: &Agreed) -> Self {
        if agreed.graphs && !agreed.is_uneven { Self::Graphs } else { Self::AsItIs }
    }
}

/// What a rank could do with the batches of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wish {
    AsItIs,
    Graphs,
    /// As it is, from now on.
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

/// What a rank has seen of its batches.
#[derive(Debug, Default)]
pub(super) struct Seen {
    /// The shapes of the last step.
    shapes: Shapes,
    /// How many in a row had them.
    times: u32,
    /// Steps since shapes were first looked at.
    looked: u32,
}

impl Seen {
    /// What the rank could do with batches of these shapes, which are `None` where batches do not tell, given those of which a step is `recorded`.
    pub(super) fn wish(&mut self, shapes: Option<Shapes>, recorded: Option<&Shapes>) -> Wish {
        let Some(shapes) = shapes else {
            return Wish::Never("its batches do not list their tensors; try implementing `Batch::tensors`");
        };
        if shapes.is_empty() {
            return Wish::AsItIs; // There is no batch.
        }
        if let Some(recorded) = recorded {
            return if *recorded == shapes { Wish::Graphs } else { Wish::AsItIs };
        }
        self.looked += 1;
        if self.shapes == shapes {
            self.times += 1;
        } else {
            (self.shapes, self.times) = (shapes, 1);
        }
        match self.times > WARM_UPS {
            true => Wish::Graphs,
            false if self.looked > PATIENCE => {
                Wish::Never("the shapes of its batches change from step to step")
            }
            false => Wish::AsItIs,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::meeting::{Brought, agreed_by};
    use super::*;

    fn of(rows: i64) -> Shapes {
        vec![(vec![rows, 3], Kind::Float), (vec![rows], Kind::Int64)]
    }

    /// What is wished for in steps of batches with so many rows.
    fn wishes(rows: &[i64], recorded: Option<&Shapes>) -> Vec<Wish> {
        let mut seen = Seen::default();
        rows.iter().map(|rows| seen.wish(Some(of(*rows)), recorded)).collect()
    }

    #[test]
    fn a_step_is_recorded_after_three_of_its_shape_in_a_row() {
        use Wish::{AsItIs, Graphs};
        assert_eq!(wishes(&[8; 5], None), [AsItIs, AsItIs, AsItIs, Graphs, Graphs]);
        assert_eq!(wishes(&[8, 8, 8, 5, 8, 8, 8, 8], None)[3..], [AsItIs, AsItIs, AsItIs, AsItIs, Graphs]);
        let mut kinds = Seen::default();
        (0..3).for_each(|_| assert_eq!(kinds.wish(Some(of(8)), None), AsItIs));
        let half = of(8).into_iter().map(|(size, _)| (size, Kind::Half)).collect();
        assert_eq!(kinds.wish(Some(half), None), AsItIs, "the same sizes of another kind");
    }

    #[test]
    fn only_what_is_recorded_is_launched_and_the_rest_is_made_as_it_is() {
        use Wish::{AsItIs, Graphs};
        assert_eq!(wishes(&[8, 5, 8, 5, 5, 5, 5, 5], Some(&of(8)))[..3], [Graphs, AsItIs, Graphs]);
        assert_eq!(wishes(&[5; 100], Some(&of(8))), [AsItIs; 100], "nothing is given up");
    }

    #[test]
    fn waiting_ends_where_shapes_never_stay() {
        let rows: Vec<i64> = (0..65).collect();
        let all = wishes(&rows, None);
        assert!(all[..64].iter().all(|wish| *wish == Wish::AsItIs));
        assert!(matches!(all[64], Wish::Never(why) if why.contains("change from step to step")));
        let told = Seen::default().wish(None, None);
        assert!(matches!(told, Wish::Never(why) if why.contains("Batch::tensors")));
    }

    #[test]
    fn a_rank_without_a_batch_has_seen_nothing() {
        let mut seen = Seen::default();
        (0..3).for_each(|_| assert_eq!(seen.wish(Some(of(8)), None), Wish::AsItIs));
        assert_eq!(seen.wish(Some(Vec::new()), None), Wish::AsItIs);
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
                assert_eq!(Way::of(&agreed_by(&all)), Way::AsItIs, "rank {rank} of {ranks} cannot");
                all[rank] = able;
            }
        }
        let fewer = Brought { batches: 1, ..able };
        assert_eq!(Way::of(&agreed_by(&[able, fewer])), Way::AsItIs);
        let asks = Brought { checkpoint: true, stop: true, ..able };
        let agreed = agreed_by(&[able, asks]);
        assert!(agreed.graphs && agreed.checkpoint && agreed.stop && !agreed.validation && !agreed.failed);
    }
}
