//! Errors of samplers.

use super::DataId;

/// A sampler has wrong arguments, or cannot resume from a position.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SamplerError {
    /// The number of ranks is 0.
    #[error("a sampler needs at least one replica, got 0; try the size of the process group")]
    NoReplicas,
    /// The rank does not exist.
    #[error("rank {rank} of {num_replicas} replicas: expected a rank from 0 to {}; try the rank of the process group", num_replicas - 1)]
    RankOutside {
        /// The rank.
        rank: usize,
        /// The number of ranks.
        num_replicas: usize,
    },
    /// A plan has an empty batch.
    #[error("the plan of epoch {epoch} has no sample in batch {batch}; try a plan without empty batches")]
    EmptyBatch {
        /// The epoch that was planned.
        epoch: u64,
        /// The index of the batch in the plan.
        batch: usize,
    },
    /// A plan has a sample that does not exist.
    #[error(
        "the plan of epoch {epoch} has sample {index} in batch {batch}, but the data set has {num_samples} samples; \
         try a plan of the same data"
    )]
    PlannedOutside {
        /// The epoch that was planned.
        epoch: u64,
        /// The index of the batch in the plan.
        batch: usize,
        /// The sample.
        index: usize,
        /// The length of the data set.
        num_samples: usize,
    },
    /// The position belongs to another data set.
    #[error(
        "the position is of a data set of {saved}, but this one has {now}: samples would be seen twice or never; try the data \
         that the run was saved with, a new folder for a new run, or accept the new data (accept_new_data(true), in a \
         configuration TRAIN.ACCEPT_NEW_DATA True, for translations run_configs.accept_new_data True)"
    )]
    OtherData {
        /// The data set of the position.
        saved: DataId,
        /// The current data set.
        now: DataId,
    },
    /// The position belongs to another order of samples.
    #[error(
        "the position is of an order with seed {position}, but the sampler has seed {sampler}: \
         samples would be seen twice or never; try the seed of the saved run"
    )]
    OtherSeed {
        /// The seed saved with the position.
        position: u64,
        /// The sampler's.
        sampler: u64,
    },
}

/// Checks the rank and the number of ranks.
pub(super) fn check_rank(rank: usize, num_replicas: usize) -> Result<(), SamplerError> {
    match num_replicas {
        0 => Err(SamplerError::NoReplicas),
        _ if rank >= num_replicas => Err(SamplerError::RankOutside { rank, num_replicas }),
        _ => Ok(()),
    }
}
