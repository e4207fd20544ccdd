//! The sampler of whole batches: a plan decides which samples form a batch, and ranks take its batches in turn.
//!
//! ```text
//!   the plan of an epoch (the same on all ranks):  b0 b1 b2 b3 b4 b5 b6 …      each any number of samples
//!   rank r of w takes                              b[r], b[r+w], b[r+2w], …
//! ```
//! So w ranks with u batches per step take the same batches in the same step as one rank with w × u. A position is a
//! batch. It can be resumed on another number of ranks.

use std::sync::{Arc, Mutex, PoisonError};

use drumline_comm::ProcessGroup;

use super::error::check_rank;
use super::{Sampler, SamplerError, SamplerPosition};

/// Options of [`PlannedBatches`]. The defaults are for one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlannedOptions {
    /// The length of the data set.
    pub num_samples: usize,
    /// The number of ranks that share the batches: the size of the process group.
    pub num_replicas: usize,
    /// This rank.
    pub rank: usize,
    /// The seed of the plan and of the samples' randomness. It must be the same on all ranks.
    pub seed: u64,
}

impl Default for PlannedOptions {
    fn default() -> Self {
        Self { num_samples: 0, num_replicas: 1, rank: 0, seed: 0 }
    }
}

impl PlannedOptions {
    /// Options for this rank of `group`, otherwise the defaults.
    pub fn in_group(num_samples: usize, group: &ProcessGroup) -> Self {
        Self { num_samples, num_replicas: group.size(), rank: group.rank(), ..Self::default() }
    }
}

/// The batches of an epoch.
type Batches = Arc<Vec<Vec<usize>>>;

/// A rank's share of batches from a plan. Batches may have any sizes, and epochs any numbers of batches. Some ranks may
/// get one batch more than others, or none at all. The loader's `batch_size` and `drop_last` are ignored.
///
/// ```
/// use std::sync::Arc;
/// use drumline::data::{PlannedBatches, PlannedOptions, Sampler};
///
/// // Short sentences in large batches, long ones in small batches; the other way round in odd epochs.
/// let plan = |epoch: u64| {
///     let mut batches = vec![vec![0, 2, 5], vec![1, 4], vec![3]];
///     if epoch % 2 == 1 {
///         batches.reverse();
///     }
///     Arc::new(batches)
/// };
/// let options = PlannedOptions { num_samples: 6, num_replicas: 2, rank: 0, ..Default::default() };
/// let sampler = PlannedBatches::new(plan, options)?;
/// assert_eq!(sampler.batches_from(&sampler.start(1), 32)?, [vec![3], vec![0, 2, 5]]);
/// # Ok::<(), drumline::data::SamplerError>(())
/// ```
pub struct PlannedBatches {
    plan: Box<dyn Fn(u64) -> Batches + Send + Sync>,
    options: PlannedOptions,
    /// The plan of the last epoch: making a plan may take long.
    last: Mutex<Option<(u64, Batches)>>,
}

impl PlannedBatches {
    /// Batches of the plan that a function returns for an epoch. It must always return the same plan for an epoch, on
    /// all ranks. Returns an error if the rank does not exist.
    pub fn new(
        plan: impl Fn(u64) -> Arc<Vec<Vec<usize>>> + Send + Sync + 'static,
        options: PlannedOptions,
    ) -> Result<Self, SamplerError> {
        check_rank(options.rank, options.num_replicas)?;
        Ok(Self { plan: Box::new(plan), options, last: Mutex::new(None) })
    }

    /// The options.
    pub fn options(&self) -> &PlannedOptions {
        &self.options
    }

    fn plan(&self, epoch: u64) -> Batches {
        // If a plan has panicked, the plan that is kept is still valid.
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        match &*last {
            Some((planned, batches)) if *planned == epoch => batches.clone(),
            _ => {
                let batches = (self.plan)(epoch);
                *last = Some((epoch, batches.clone()));
                batches
            }
        }
    }

    fn check(&self, epoch: u64, batch: usize, samples: &[usize]) -> Result<(), SamplerError> {
        let num_samples = self.options.num_samples;
        match samples.iter().find(|index| **index >= num_samples) {
            Some(&index) => Err(SamplerError::PlannedOutside { epoch, batch, index, num_samples }),
            None if samples.is_empty() => Err(SamplerError::EmptyBatch { epoch, batch }),
            None => Ok(()),
        }
    }
}

impl Sampler for PlannedBatches {
    fn num_samples(&self) -> usize {
        self.options.num_samples
    }

    fn num_replicas(&self) -> usize {
        self.options.num_replicas
    }

    fn count_from(&self, position: &SamplerPosition) -> usize {
        let left = self.num_positions(position.epoch).saturating_sub(position.samples_seen);
        left.saturating_sub(self.options.rank).div_ceil(self.options.num_replicas)
    }

    fn indices_from(&self, position: &SamplerPosition) -> Result<Vec<usize>, SamplerError> {
        Ok(self.batches_from(position, 1)?.concat())
    }

    fn batches_from(&self, position: &SamplerPosition, _: usize) -> Result<Vec<Vec<usize>>, SamplerError> {
        let PlannedOptions { num_replicas, rank, seed, .. } = self.options;
        position.check_seed(seed)?;
        let plan = self.plan(position.epoch);
        let first = position.samples_seen.saturating_add(rank);
        let own = plan.iter().enumerate().skip(first).step_by(num_replicas);
        own.map(|(batch, samples)| {
            self.check(position.epoch, batch, samples)?;
            Ok(samples.clone())
        })
        .collect()
    }

    fn positions_of_batch(&self, _: usize) -> usize {
        1
    }

    fn num_positions(&self, epoch: u64) -> usize {
        self.plan(epoch).len()
    }

    fn seed(&self) -> u64 {
        self.options.seed
    }
}

impl std::fmt::Debug for PlannedBatches {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PlannedBatches").field("options", &self.options).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use proptest::prelude::*;

    use super::*;

    /// Batches of 1, 2, 3, 1, 2, … samples.
    fn uneven(batches: usize) -> Batches {
        let begins = (0..batches).map(|batch| batch / 3 * 6 + [0, 1, 3][batch % 3]);
        Arc::new(begins.zip(0..).map(|(begin, batch)| (begin..begin + 1 + batch % 3).collect()).collect())
    }

    fn sampler(batches: usize, num_replicas: usize, rank: usize) -> PlannedBatches {
        let options = PlannedOptions { num_samples: 1000, num_replicas, rank, seed: 3 };
        PlannedBatches::new(move |epoch| uneven(batches + epoch as usize), options).unwrap()
    }

    proptest! {
        #[test]
        fn other_worlds_take_each_remaining_batch_once_and_in_order(
            batches in 0usize..40, epoch in 0u64..3,
            worlds in proptest::collection::vec((1usize..6, 0usize..5), 1..4),
        ) {
            let mut position = sampler(batches, 1, 0).start(epoch);
            let mut seen = Vec::new();
            for (world, turns) in worlds.into_iter().chain([(2, usize::MAX / 4)]) {
                let ranks: Vec<_> = (0..world).map(|rank| sampler(batches, world, rank)).collect();
                let shares: Vec<_> = ranks.iter().map(|of| of.batches_from(&position, 9).unwrap()).collect();
                for (rank, share) in ranks.iter().zip(&shares) {
                    prop_assert_eq!(share.len(), rank.count_from(&position));
                    prop_assert_eq!(share.concat(), rank.indices_from(&position).unwrap());
                }
                let turns = turns.min(shares[0].len());
                seen.extend((0..turns).flat_map(|turn| shares.iter().filter_map(move |share| share.get(turn))).cloned());
                position = position.after(turns, world);
            }
            prop_assert_eq!(seen, &uneven(batches + epoch as usize)[..]);
        }
    }

    #[test]
    fn a_plan_is_made_once_for_an_epoch() {
        let made = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&made);
        let plan = move |_| {
            counted.fetch_add(1, Ordering::SeqCst);
            uneven(5)
        };
        let sampler =
            PlannedBatches::new(plan, PlannedOptions { num_samples: 9, ..Default::default() }).unwrap();
        for epoch in [0, 0, 1] {
            assert_eq!(sampler.count_from(&sampler.start(epoch)), 5);
            assert_eq!(sampler.batches_from(&sampler.start(epoch), 1).unwrap(), uneven(5)[..]);
        }
        assert_eq!(made.load(Ordering::SeqCst), 2);
    }

    #[test]
    fn invalid_plans_are_errors() {
        let message = |plan: Vec<Vec<usize>>| {
            let plan = Arc::new(plan);
            let options = PlannedOptions { num_samples: 3, ..Default::default() };
            let sampler = PlannedBatches::new(move |_| plan.clone(), options).unwrap();
            sampler.batches_from(&sampler.start(4), 1).unwrap_err().to_string()
        };
        assert!(
            message(vec![vec![0], vec![]]).starts_with("the plan of epoch 4 has no sample in batch 1; try")
        );
        assert!(
            message(vec![vec![0, 3]])
                .contains("has sample 3 in batch 0, but the data set has 3 samples; try")
        );
        let other = SamplerPosition { seed: 9, ..Default::default() };
        assert!(matches!(sampler(3, 1, 0).batches_from(&other, 1), Err(SamplerError::OtherSeed { .. })));
        let outside = PlannedBatches::new(|_| uneven(1), PlannedOptions { rank: 1, ..Default::default() });
        assert!(matches!(outside, Err(SamplerError::RankOutside { rank: 1, num_replicas: 1 })));
    }
}
