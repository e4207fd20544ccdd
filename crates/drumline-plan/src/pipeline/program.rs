//! A program: what each rank of a pipeline does in a step, and which rank holds which stage.
//!
//! ```text
//!   loop, 2 ranks, 4 stages:  rank 0: stages 0, 2     V:  rank 0: stages 0, 3
//!                             rank 1: stages 1, 3         rank 1: stages 1, 2
//! ```

use super::action::Action;

/// Which rank holds which stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StageMap {
    /// Stage `s` is on rank `s % ranks`: a micro-batch visits the ranks in a circle.
    Loop {
        /// Ranks along the axis `pp`.
        ranks: usize,
        /// Stages of each rank.
        chunks: usize,
    },
    /// Two stages a rank: a micro-batch visits the ranks in order, then in reverse order, so that the first rank has the
    /// first and the last stage.
    V {
        /// Ranks along the axis `pp`.
        ranks: usize,
    },
}

impl StageMap {
    /// Ranks along the axis `pp`.
    pub fn num_ranks(&self) -> usize {
        match *self {
            Self::Loop { ranks, .. } | Self::V { ranks } => ranks,
        }
    }

    /// Stages of each rank.
    pub fn chunks(&self) -> usize {
        match *self {
            Self::Loop { chunks, .. } => chunks,
            Self::V { .. } => 2,
        }
    }

    /// Stages of all ranks.
    pub fn num_stages(&self) -> usize {
        self.num_ranks() * self.chunks()
    }

    /// The rank that holds a stage.
    pub fn rank_of(&self, stage: usize) -> usize {
        match *self {
            Self::Loop { ranks, .. } => stage % ranks,
            Self::V { ranks } if stage < ranks => stage,
            Self::V { ranks } => 2 * ranks - 1 - stage,
        }
    }

    /// The stages of a rank, in the order of the model.
    pub fn stages_of(&self, rank: usize) -> Vec<usize> {
        (0..self.num_stages()).filter(|&stage| self.rank_of(stage) == rank).collect()
    }
}

/// What each rank of a pipeline does in a step.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Program {
    /// Which rank holds which stage.
    pub stages: StageMap,
    /// Micro-batches of a step.
    pub num_micro_batches: usize,
    /// The actions of each rank, in order.
    pub rows: Vec<Vec<Action>>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_stage_is_on_one_rank() {
        let maps = (1..5).flat_map(|ranks| {
            let loops = (1..4).map(move |chunks| StageMap::Loop { ranks, chunks });
            loops.chain([StageMap::V { ranks }])
        });
        for map in maps {
            let mut all: Vec<usize> = (0..map.num_ranks()).flat_map(|rank| map.stages_of(rank)).collect();
            all.sort_unstable();
            assert!(all.into_iter().eq(0..map.num_stages()), "{map:?}");
        }
    }

    #[test]
    fn a_v_ends_where_it_begins() {
        let map = StageMap::V { ranks: 2 };
        assert_eq!([map.stages_of(0), map.stages_of(1)], [[0, 3], [1, 2]]);
    }
}
