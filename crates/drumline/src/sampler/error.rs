//! What is wrong with a sampler's arguments.

use super::DataId;

/// A sampler cannot be made, or cannot go on from a position.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SamplerError {
    /// Nobody would take a sample.
    #[error("a sampler needs at least one replica, got 0; try the size of the process group")]
    NoReplicas,
    /// A rank outside of its world.
    #[error("rank {rank} of {num_replicas} replicas: expected a rank from 0 to {}; try the rank of the process group", num_replicas - 1)]
    RankOutside {
        /// The rank asked for.
        rank: usize,
        /// How many there are.
        num_replicas: usize,
    },
    /// A plan has a batch of nothing.
    #[error("the plan of epoch {epoch} has no sample in batch {batch}; try a plan without empty batches")]
    EmptyBatch {
        /// The epoch that was planned.
        epoch: u64,
        /// The batch's place in the plan.
        batch: usize,
    },
    /// A plan has a sample that the data set has not.
    #[error(
        "the plan of epoch {epoch} has sample {index} in batch {batch}, but the data set has {num_samples} samples; \
         try a plan of the same data"
    )]
    PlannedOutside {
        /// The epoch that was planned.
        epoch: u64,
        /// The batch's place in the plan.
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
         configuration TRAIN.ACCEPT_NEW_DATA True)"
    )]
    OtherData {
        /// What was saved with the position.
        saved: DataId,
        /// The data set that is there.
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

/// Checks who takes part.
pub(super) fn check_rank(rank: usize, num_replicas: usize) -> Result<(), SamplerError> {
    match num_replicas {
        0 => Err(SamplerError::NoReplicas),
        _ if rank >= num_replicas => Err(SamplerError::RankOutside { rank, num_replicas }),
        _ => Ok(()),
    }
}
