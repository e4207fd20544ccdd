//! The progress of an epoch.

use serde::{Deserialize, Serialize};

use super::{DataId, SamplerError};

/// How far all ranks together have come in an epoch. It contains neither a rank nor a world size: any number of ranks
/// can share what is left of the epoch.
///
/// ```
/// use drumline::data::{DistributedSampler, Sampler, SamplerOptions, SamplerPosition};
///
/// let sampler = |num_replicas, rank| {
///     DistributedSampler::new(SamplerOptions { num_samples: 10, num_replicas, rank, ..Default::default() })
/// };
/// // Two ranks have taken two samples each; one rank resumes alone.
/// let position = SamplerPosition { epoch: 3, samples_seen: 4, ..Default::default() };
/// let mut all = [&sampler(2, 0)?.indices(3)[..2], &sampler(2, 1)?.indices(3)[..2]].concat();
/// all.extend(sampler(1, 0)?.indices_from(&position)?);
/// all.sort();
/// assert!(all.into_iter().eq(0..10));
/// # Ok::<(), drumline::data::SamplerError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct SamplerPosition {
    /// The epoch, counted from 0.
    pub epoch: u64,
    /// Positions of the epoch's order that were taken, over all ranks: samples, or planned batches.
    pub samples_seen: usize,
    /// The seed of the order.
    pub seed: u64,
    /// The data set of the order, if it is known. A [`Loader`](crate::data::Loader) knows it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<DataId>,
}

impl SamplerPosition {
    /// The position after each of `num_replicas` ranks has taken `taken` more positions.
    pub fn after(self, taken: usize, num_replicas: usize) -> Self {
        Self { samples_seen: self.samples_seen + taken * num_replicas, ..self }
    }

    /// Returns an error if the position is of another data set. A position without a data set is accepted.
    pub fn check_data(&self, now: DataId) -> Result<(), SamplerError> {
        match self.data {
            Some(saved) if !saved.is_same(now) => Err(SamplerError::OtherData { saved, now }),
            _ => Ok(()),
        }
    }

    /// Returns an error if the position has another seed.
    pub fn check_seed(&self, seed: u64) -> Result<(), SamplerError> {
        if self.seed != seed {
            return Err(SamplerError::OtherSeed { position: self.seed, sampler: seed });
        }
        Ok(())
    }
}
