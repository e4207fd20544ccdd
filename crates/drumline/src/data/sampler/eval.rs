//! The sampler for evaluation: every sample once over all ranks.

use super::error::check_rank;
use super::{Sampler, SamplerError, SamplerPosition};

/// Rank `r` of `w` takes samples `r`, `r + w`, `r + 2w`, …. No sample is repeated or left out, so that metrics and
/// predictions are exact. Some ranks may take one sample more than others, or none at all.
///
/// ```
/// let sampler = drumline::data::EvalSampler::new(7, 3, 1)?;
/// assert_eq!(sampler.indices(), [1, 4]);
/// # Ok::<(), drumline::data::SamplerError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EvalSampler {
    num_samples: usize,
    num_replicas: usize,
    rank: usize,
    seed: u64,
}

impl EvalSampler {
    /// The share of `rank` of `num_replicas` in a data set of `num_samples`.
    pub fn new(num_samples: usize, num_replicas: usize, rank: usize) -> Result<Self, SamplerError> {
        check_rank(rank, num_replicas)?;
        Ok(Self { num_samples, num_replicas, rank, seed: 0 })
    }

    /// Sets the seed of the samples' randomness. The order is never random.
    #[must_use]
    pub fn with_seed(self, seed: u64) -> Self {
        Self { seed, ..self }
    }

    /// This rank's indices.
    pub fn indices(&self) -> Vec<usize> {
        self.share(0)
    }

    /// How many samples this rank takes.
    pub fn len(&self) -> usize {
        self.count_from(&self.start(0))
    }

    /// Whether this rank takes none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn share(&self, samples_seen: usize) -> Vec<usize> {
        (samples_seen + self.rank..self.num_samples).step_by(self.num_replicas).collect()
    }
}

impl Sampler for EvalSampler {
    fn num_samples(&self) -> usize {
        self.num_samples
    }

    fn num_replicas(&self) -> usize {
        self.num_replicas
    }

    fn count_from(&self, position: &SamplerPosition) -> usize {
        self.num_samples.saturating_sub(position.samples_seen + self.rank).div_ceil(self.num_replicas)
    }

    fn indices_from(&self, position: &SamplerPosition) -> Result<Vec<usize>, SamplerError> {
        position.check_seed(self.seed)?;
        Ok(self.share(position.samples_seen))
    }

    fn seed(&self) -> u64 {
        self.seed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_sample_is_taken_once_by_any_world() {
        for num_samples in [0, 1, 2, 7, 50] {
            for world in 1..6 {
                for seen in [0, 1, 3, 60] {
                    let position = SamplerPosition { samples_seen: seen, ..Default::default() };
                    let mut all = Vec::new();
                    for rank in 0..world {
                        let sampler = EvalSampler::new(num_samples, world, rank).unwrap();
                        let share = sampler.indices_from(&position).unwrap();
                        assert_eq!(share.len(), sampler.count_from(&position));
                        all.extend(share);
                    }
                    all.sort_unstable();
                    assert!(all.into_iter().eq(seen..num_samples.max(seen)));
                }
            }
        }
    }

    #[test]
    fn wrong_arguments_are_errors() {
        assert_eq!(EvalSampler::new(3, 0, 0), Err(SamplerError::NoReplicas));
        assert_eq!(EvalSampler::new(3, 2, 5), Err(SamplerError::RankOutside { rank: 5, num_replicas: 2 }));
    }
}
