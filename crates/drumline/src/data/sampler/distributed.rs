//! The sampler for training: PyTorch's `DistributedSampler`, index by index.
//!
//! All ranks get the same number of samples. With `drop_last` the epoch's order is cut at its end; otherwise it is
//! repeated from its beginning, more than once if the data set is shorter than the number of ranks.

use drumline_comm::ProcessGroup;

use super::error::check_rank;
use super::permutation::permutation;
use super::{Sampler, SamplerError, SamplerPosition};

/// Options of a [`DistributedSampler`]. The defaults are PyTorch's, for one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SamplerOptions {
    /// The length of the data set.
    pub num_samples: usize,
    /// The number of ranks that share it: the size of the process group.
    pub num_replicas: usize,
    /// This rank.
    pub rank: usize,
    /// Use a new order in each epoch. Otherwise samples come in the data set's order.
    pub shuffle: bool,
    /// The seed of the order, together with the epoch. It must be the same on all ranks.
    pub seed: u64,
    /// Leave out samples that cannot be shared equally, instead of repeating some.
    pub drop_last: bool,
}

impl Default for SamplerOptions {
    fn default() -> Self {
        Self { num_samples: 0, num_replicas: 1, rank: 0, shuffle: true, seed: 0, drop_last: false }
    }
}

impl SamplerOptions {
    /// Options for this rank of `group`, otherwise the defaults.
    pub fn in_group(num_samples: usize, group: &ProcessGroup) -> Self {
        Self { num_samples, num_replicas: group.size(), rank: group.rank(), ..Self::default() }
    }
}

/// An equal share of a data set for each rank, with the indices of PyTorch's sampler of the same name.
///
/// After a resume on another number of ranks, the remaining samples are divided again, and each comes once. If they do
/// not divide equally, fewer than `num_replicas` samples from the beginning of the epoch are repeated, or with
/// `drop_last` that many are left out, as at the end of every epoch. On the same number of ranks it continues with the
/// same indices.
///
/// ```
/// use drumline::data::{DistributedSampler, SamplerOptions};
///
/// let options = SamplerOptions { num_samples: 7, num_replicas: 2, rank: 1, ..Default::default() };
/// let mut sampler = DistributedSampler::new(options)?;
/// assert_eq!(sampler.indices(0), [0, 3, 6, 4]); // as torch.utils.data.DistributedSampler(range(7), 2, 1)
/// sampler.set_epoch(1);
/// assert!(sampler.iter().eq(sampler.indices(1)));
/// # Ok::<(), drumline::data::SamplerError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DistributedSampler {
    options: SamplerOptions,
    epoch: u64,
}

impl DistributedSampler {
    /// A sampler at epoch 0. Returns an error if the rank does not exist.
    pub fn new(options: SamplerOptions) -> Result<Self, SamplerError> {
        check_rank(options.rank, options.num_replicas)?;
        Ok(Self { options, epoch: 0 })
    }

    /// The options.
    pub fn options(&self) -> &SamplerOptions {
        &self.options
    }

    /// Sets the epoch of [`iter`](Self::iter). A [`Loader`](crate::data::Loader) does not need this: it passes its
    /// epoch.
    pub fn set_epoch(&mut self, epoch: u64) {
        self.epoch = epoch;
    }

    /// This rank's indices of the epoch that was set.
    pub fn iter(&self) -> std::vec::IntoIter<usize> {
        self.indices(self.epoch).into_iter()
    }

    /// This rank's indices of an epoch.
    pub fn indices(&self, epoch: u64) -> Vec<usize> {
        self.share(&self.start(epoch))
    }

    /// How many samples each rank takes in an epoch.
    pub fn len(&self) -> usize {
        self.count_from(&self.start(0))
    }

    /// Whether there are no samples.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn share(&self, from: &SamplerPosition) -> Vec<usize> {
        let SamplerOptions { num_samples, num_replicas, rank, shuffle, seed, .. } = self.options;
        let first = from.samples_seen + rank;
        // After the end the order begins again. This is the padding.
        let places = (0..self.count_from(from)).map(|turn| (first + turn * num_replicas) % num_samples);
        if !shuffle {
            return places.collect();
        }
        let order = permutation(num_samples, seed.wrapping_add(from.epoch));
        places.map(|place| order[place]).collect()
    }
}

impl IntoIterator for &DistributedSampler {
    type Item = usize;
    type IntoIter = std::vec::IntoIter<usize>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl Sampler for DistributedSampler {
    fn num_samples(&self) -> usize {
        self.options.num_samples
    }

    fn num_replicas(&self) -> usize {
        self.options.num_replicas
    }

    fn count_from(&self, position: &SamplerPosition) -> usize {
        let left = self.options.num_samples.saturating_sub(position.samples_seen);
        let SamplerOptions { num_replicas, drop_last, .. } = self.options;
        if drop_last { left / num_replicas } else { left.div_ceil(num_replicas) }
    }

    fn indices_from(&self, position: &SamplerPosition) -> Result<Vec<usize>, SamplerError> {
        position.check_seed(self.options.seed)?;
        Ok(self.share(position))
    }

    fn seed(&self) -> u64 {
        self.options.seed
    }
}

#[cfg(test)]
mod tests {
    use super::super::golden;
    use super::*;
    use proptest::prelude::*;

    fn sampler(options: SamplerOptions) -> DistributedSampler {
        DistributedSampler::new(options).unwrap()
    }

    /// The samples of all ranks, in the order of steps.
    fn interleaved(options: SamplerOptions, from: &SamplerPosition) -> Vec<usize> {
        let ranks = 0..options.num_replicas;
        let shares: Vec<_> = ranks
            .map(|rank| sampler(SamplerOptions { rank, ..options }).indices_from(from).unwrap())
            .collect();
        let steps = shares[0].len();
        assert!(shares.iter().all(|share| share.len() == steps), "equal shares");
        (0..steps).flat_map(|step| shares.iter().map(move |share| share[step])).collect()
    }

    #[test]
    fn indices_are_pytorchs() {
        let golden = golden::read();
        assert_eq!(golden.torch.split('+').next(), Some("2.11.0"));
        assert!(golden.cases.len() > 900);
        for case in golden.cases {
            for rank in 0..case.world {
                let made = sampler(case.options(rank));
                case.check(rank, &made.indices(case.epoch));
                assert_eq!(made.len(), made.indices(case.epoch).len());
            }
        }
    }

    #[test]
    fn wrong_arguments_are_errors() {
        let made = |num_replicas, rank| {
            let options = SamplerOptions { num_samples: 3, num_replicas, rank, ..Default::default() };
            DistributedSampler::new(options).map_err(|error| error.to_string())
        };
        assert!(made(0, 0).unwrap_err().contains("at least one replica, got 0; try"));
        assert!(made(2, 2).unwrap_err().contains("rank 2 of 2 replicas: expected a rank from 0 to 1; try"));
        let other = SamplerPosition { seed: 9, ..Default::default() };
        let message = made(1, 0).unwrap().indices_from(&other).unwrap_err().to_string();
        assert!(message.contains("seed 9, but the sampler has seed 0"), "{message}");
    }

    proptest! {
        #[test]
        fn the_same_world_resumes_with_the_same_indices(
            num_samples in 0usize..200, num_replicas in 1usize..9, steps in 0usize..60,
            seed: u64, epoch in 0u64..5, shuffle: bool, drop_last: bool,
        ) {
            for rank in 0..num_replicas {
                let made = sampler(SamplerOptions { num_samples, num_replicas, rank, shuffle, seed, drop_last });
                let whole = made.indices(epoch);
                let taken = steps.min(whole.len());
                let position = made.start(epoch).after(taken, num_replicas);
                prop_assert_eq!(&whole[taken..], &made.indices_from(&position).unwrap()[..]);
            }
        }

        #[test]
        fn other_worlds_see_each_remaining_sample_once(
            num_samples in 0usize..200, worlds in proptest::collection::vec((1usize..9, 0usize..20), 1..4),
            last_world in 1usize..9, seed: u64, shuffle: bool, drop_last: bool,
        ) {
            let options = |num_replicas| {
                SamplerOptions { num_samples, num_replicas, rank: 0, shuffle, seed, drop_last }
            };
            let mut position = sampler(options(1)).start(2);
            let mut seen = Vec::new();
            for (world, steps) in worlds {
                let mut taken = interleaved(options(world), &position);
                taken.truncate(steps * world);
                position = position.after(taken.len() / world, world);
                seen.extend(taken);
            }
            seen.extend(interleaved(options(last_world), &position));
            // The last ones are padding: repeated from the beginning, or cut.
            let order = sampler(options(1)).indices(2);
            prop_assert!(seen.iter().zip(order.iter().cycle()).all(|(a, b)| a == b));
            if drop_last {
                prop_assert!(seen.len() <= num_samples && num_samples - seen.len() < last_world);
            } else {
                prop_assert!(seen.len() >= num_samples && seen.len() < num_samples + 9);
            }
        }
    }
}
