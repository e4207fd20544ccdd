//! Which rank of a pipeline holds which stage.
//!
//! ```text
//!   loop, 2 ranks, 4 stages:  rank 0: stages 0, 2     V:  rank 0: stages 0, 3     wave: rank 0: stages 0, 3, 4
//!                             rank 1: stages 1, 3         rank 1: stages 1, 2           rank 1: stages 1, 2, 5
//! ```
//! A file of PyTorch does not say which it is: [`StageMap::from_ranks`] finds out.

/// Which rank holds which stage.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
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
    /// Anything else; the rank of each stage.
    Listed(Vec<usize>),
}

impl StageMap {
    /// The map with these ranks of stages 0, 1, …; `None` if there is no stage, or if a rank has none.
    pub fn from_ranks(rank_of: Vec<usize>) -> Option<Self> {
        let ranks = rank_of.iter().max()?.checked_add(1).filter(|ranks| *ranks <= rank_of.len())?;
        let mut has_a_stage = vec![false; ranks];
        rank_of.iter().for_each(|rank| has_a_stage[*rank] = true);
        if has_a_stage.contains(&false) {
            return None;
        }
        let regular = [Self::Loop { ranks, chunks: rank_of.len() / ranks }, Self::V { ranks }];
        let is_same = |map: &Self| {
            map.num_stages() == rank_of.len()
                && (0..rank_of.len()).all(|stage| map.rank_of(stage) == rank_of[stage])
        };
        Some(regular.into_iter().find(is_same).unwrap_or(Self::Listed(rank_of)))
    }

    /// Ranks along the axis `pp`.
    pub fn num_ranks(&self) -> usize {
        match self {
            Self::Loop { ranks, .. } | Self::V { ranks } => *ranks,
            Self::Listed(rank_of) => rank_of.iter().max().map_or(0, |last| last + 1),
        }
    }

    /// Stages of all ranks.
    pub fn num_stages(&self) -> usize {
        match self {
            Self::Loop { ranks, chunks } => ranks * chunks,
            Self::V { ranks } => 2 * ranks,
            Self::Listed(rank_of) => rank_of.len(),
        }
    }

    /// The most stages that a rank has.
    pub fn chunks(&self) -> usize {
        match self {
            Self::Loop { chunks, .. } => *chunks,
            Self::V { .. } => 2,
            Self::Listed(_) => self.stages_each().into_iter().max().unwrap_or(0),
        }
    }

    /// How many stages each rank has.
    pub(super) fn stages_each(&self) -> Vec<usize> {
        let mut each = vec![0; self.num_ranks()];
        (0..self.num_stages()).for_each(|stage| each[self.rank_of(stage)] += 1);
        each
    }

    /// The rank that holds a stage.
    pub fn rank_of(&self, stage: usize) -> usize {
        match self {
            Self::Loop { ranks, .. } => stage % ranks,
            Self::V { ranks } if stage < *ranks => stage,
            Self::V { ranks } => 2 * ranks - 1 - stage,
            Self::Listed(rank_of) => rank_of[stage],
        }
    }

    /// The stages of a rank, in the order of the model.
    pub fn stages_of(&self, rank: usize) -> Vec<usize> {
        match self {
            Self::Loop { ranks, .. } if rank < *ranks => (rank..self.num_stages()).step_by(*ranks).collect(),
            Self::V { ranks } if rank < *ranks => vec![rank, 2 * ranks - 1 - rank],
            Self::Loop { .. } | Self::V { .. } => Vec::new(),
            Self::Listed(rank_of) => (0..rank_of.len()).filter(|&stage| rank_of[stage] == rank).collect(),
        }
    }

    /// Which of its rank's stages this is: 0 for the first.
    pub fn chunk_of(&self, stage: usize) -> usize {
        match self {
            Self::Loop { ranks, .. } | Self::V { ranks } => stage / ranks,
            Self::Listed(rank_of) => (0..stage).filter(|&before| rank_of[before] == rank_of[stage]).count(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn maps() -> impl Iterator<Item = StageMap> {
        let regular = (1..5).flat_map(|ranks| {
            let loops = (1..4).map(move |chunks| StageMap::Loop { ranks, chunks });
            loops.chain([StageMap::V { ranks }])
        });
        regular.chain([StageMap::Listed(vec![0, 1, 1, 0, 0, 1]), StageMap::Listed(vec![1, 0, 1])])
    }

    #[test]
    fn each_stage_is_on_one_rank() {
        for map in maps() {
            let mut all: Vec<usize> = (0..map.num_ranks()).flat_map(|rank| map.stages_of(rank)).collect();
            all.sort_unstable();
            assert!(all.into_iter().eq(0..map.num_stages()), "{map:?}");
            assert!(map.stages_of(map.num_ranks()).is_empty(), "{map:?}");
            for rank in 0..map.num_ranks() {
                let chunks = map.stages_of(rank).into_iter().map(|stage| map.chunk_of(stage));
                assert!(chunks.eq(0..map.stages_of(rank).len()), "{map:?}");
                assert_eq!(map.stages_each()[rank], map.stages_of(rank).len(), "{map:?}");
            }
        }
    }

    #[test]
    fn a_v_ends_where_it_begins() {
        let map = StageMap::V { ranks: 2 };
        assert_eq!([map.stages_of(0), map.stages_of(1)], [[0, 3], [1, 2]]);
    }

    #[test]
    fn a_map_is_found_from_its_ranks() {
        for map in maps() {
            let ranks = (0..map.num_stages()).map(|stage| map.rank_of(stage)).collect();
            let found = StageMap::from_ranks(ranks).unwrap();
            // One rank: a V of two stages is a loop.
            assert!(found == map || map == StageMap::V { ranks: 1 }, "{map:?}: {found:?}");
        }
        assert_eq!([vec![], vec![0, 2], vec![1]].map(StageMap::from_ranks), [None, None, None]);
    }
}
