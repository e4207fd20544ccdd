//! A rank's share of the samples, or planned batches, that a sampler gives a program of one process.
//!
//! ```text
//!   the sampler's order   o0 o1 o2 o3 o4 │ o5 o6 …        batches of 2, 2 ranks: a step has 4 samples
//!   rank 0                o0    o2       │ o4    o6
//!   rank 1                   o1    o3    │    o5
//! ```
//! So the samples of a step are those of one process whose batch is as large as those of all ranks together. A rank
//! that has no sample left in the last turn, while others have, gets a *filler*: a batch that does not count. If the
//! sampler plans whole batches, o0, o1, … are batches, and a step has one for each rank.

use std::sync::Arc;

use crate::data::sampler::{Sampler, SamplerError, SamplerPosition};

pub(super) struct Share {
    pub(super) whole: Box<dyn Sampler>,
    pub(super) rank: usize,
    pub(super) num_replicas: usize,
    pub(super) batch_size: usize,
    pub(super) drop_last: bool,
}

/// How many positions of the sampler's order a rank takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RankPositions {
    /// Positions that count.
    pub(super) real: usize,
    /// Positions of the filler.
    pub(super) filler: usize,
}

impl Share {
    /// Positions in a full batch.
    pub(super) fn of_batch(&self) -> usize {
        self.whole.positions_of_batch(self.batch_size)
    }

    /// Positions in a full turn of all ranks.
    pub(super) fn turn(&self) -> usize {
        self.of_batch() * self.num_replicas
    }

    /// Positions of all ranks in an epoch.
    pub(super) fn positions_of(&self, epoch: u64) -> usize {
        let all = self.whole.count_from(&self.whole.start(epoch));
        if self.drop_last { all / self.turn() * self.turn() } else { all }
    }

    /// What this rank takes of the positions that are left.
    pub(super) fn taken(&self, position: &SamplerPosition) -> RankPositions {
        let left = self.whole.count_from(position);
        if self.drop_last {
            return RankPositions { real: left / self.turn() * self.of_batch(), filler: 0 };
        }
        let real = left.saturating_sub(self.rank).div_ceil(self.num_replicas);
        let turns = left.div_ceil(self.turn());
        let lacks = real.div_ceil(self.of_batch()) < turns;
        RankPositions { real, filler: if lacks { self.of_batch().min(left) } else { 0 } }
    }

    /// Whether some rank needs a filler in an epoch.
    pub(super) fn has_filler(&self, epoch: u64) -> bool {
        let rest = self.whole.count_from(&self.whole.start(epoch)) % self.turn();
        !self.drop_last && (1..self.num_replicas).contains(&rest)
    }

    /// This rank's items of all that are left, samples or batches: its own, and then the filler.
    fn own<T: Clone>(&self, whole: &[T], position: &SamplerPosition) -> Vec<T> {
        let RankPositions { real, filler } = self.taken(position);
        let own = whole.iter().skip(self.rank).step_by(self.num_replicas).take(real);
        own.chain(&whole[..filler.min(whole.len())]).cloned().collect()
    }
}

impl Sampler for Arc<Share> {
    fn num_samples(&self) -> usize {
        self.whole.num_samples()
    }

    fn num_replicas(&self) -> usize {
        self.num_replicas
    }

    fn count_from(&self, position: &SamplerPosition) -> usize {
        let RankPositions { real, filler } = self.taken(position);
        real + filler
    }

    fn indices_from(&self, position: &SamplerPosition) -> Result<Vec<usize>, SamplerError> {
        match self.of_batch() {
            1 => Ok(self.batches_from(position, self.batch_size)?.concat()),
            _ => Ok(self.own(&self.whole.indices_from(position)?, position)),
        }
    }

    fn batches_from(
        &self,
        position: &SamplerPosition,
        batch_size: usize,
    ) -> Result<Vec<Vec<usize>>, SamplerError> {
        match self.of_batch() {
            1 => Ok(self.own(&self.whole.batches_from(position, batch_size)?, position)),
            _ => Ok(self.indices_from(position)?.chunks(batch_size).map(<[_]>::to_vec).collect()),
        }
    }

    fn positions_of_batch(&self, _: usize) -> usize {
        self.of_batch()
    }

    fn num_positions(&self, epoch: u64) -> usize {
        self.positions_of(epoch)
    }

    fn seed(&self) -> u64 {
        self.whole.seed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::sampler::{DistributedSampler, SamplerOptions};

    fn share(num_samples: usize, rank: usize, num_replicas: usize, drop_last: bool) -> Arc<Share> {
        let options = SamplerOptions { num_samples, seed: 3, ..Default::default() };
        let whole = Box::new(DistributedSampler::new(options).unwrap());
        Arc::new(Share { whole, rank, num_replicas, batch_size: 3, drop_last })
    }

    #[test]
    fn a_turn_has_the_samples_of_one_big_batch_and_all_ranks_have_equally_many_turns() {
        for num_samples in 0..40 {
            for ranks in [1, 2, 4] {
                let whole = share(num_samples, 0, 1, false).whole.indices_from(&SamplerPosition {
                    seed: 3,
                    epoch: 1,
                    samples_seen: 0,
                    data: None,
                });
                let whole = whole.unwrap();
                let steps: Vec<&[usize]> = whole.chunks(3 * ranks).collect();
                let mut has_filler = false;
                let mut seen = vec![Vec::new(); steps.len()];
                for rank in 0..ranks {
                    let share = share(num_samples, rank, ranks, false);
                    let start = share.start(1);
                    let (indices, taken) = (share.indices_from(&start).unwrap(), share.taken(&start));
                    assert_eq!(indices.len(), share.count_from(&start));
                    assert_eq!(indices.len().div_ceil(3), steps.len(), "{num_samples} over {ranks}");
                    assert!(taken.filler == 0 || taken.real.is_multiple_of(3), "no batch is half a filler");
                    has_filler |= taken.filler > 0;
                    for (step, batch) in indices[..taken.real].chunks(3).enumerate() {
                        seen[step].extend_from_slice(batch);
                    }
                }
                assert_eq!(has_filler, share(num_samples, 0, ranks, false).has_filler(1));
                for (seen, step) in seen.iter_mut().zip(steps) {
                    let mut step = step.to_vec();
                    seen.sort_unstable();
                    step.sort_unstable();
                    assert_eq!(*seen, step, "{num_samples} over {ranks}");
                }
            }
        }
    }

    #[test]
    fn with_drop_last_all_turns_are_full() {
        for (num_samples, expected) in [(5, 0), (6, 3), (11, 3), (12, 6)] {
            let share = share(num_samples, 1, 2, true);
            assert_eq!(share.taken(&share.start(0)), RankPositions { real: expected, filler: 0 });
        }
    }
}
