//! Samplers: which samples a rank takes, and in which order.
//!
//! ```text
//!   epoch's order (the same on all ranks):  o0 o1 o2 o3 o4 o5 o6 …
//!   rank r of w takes                       o[r], o[r+w], o[r+2w], …
//!   samples_seen = 4, then w becomes 3:     seen seen seen seen │ o4→0 o5→1 o6→2 …
//! ```
//!
//! - `DistributedSampler`: for training; PyTorch's indices, bit for bit (`permutation`), padded or cut to equal shares
//! - `EvalSampler`: for evaluation; each sample once, never padded
//! - `PlannedBatches`: whole batches that a plan has put together, such as sentences of like length
//! - `SamplerPosition`: the progress of an epoch, over all ranks, so that any number of ranks can resume it
//! - `DataId`: the data set of a position
//!
//! A *position* is what one rank takes at a time: a sample, or with planned batches a whole batch. Samplers do not use
//! the random number generators of the process.

mod data_id;
mod distributed;
mod error;
mod eval;
#[cfg(test)]
mod golden;
mod permutation;
mod planned;
mod position;

pub use data_id::DataId;
pub use distributed::{DistributedSampler, SamplerOptions};
pub use error::SamplerError;
pub use eval::EvalSampler;
pub use planned::{PlannedBatches, PlannedOptions};
pub use position::SamplerPosition;

/// The order of samples for a [`Loader`](crate::data::Loader). Implement it for an order of your own.
pub trait Sampler: Send + Sync {
    /// The length of the data set.
    fn num_samples(&self) -> usize;

    /// The number of ranks that share the data set. They take positions of the epoch's order in turn.
    fn num_replicas(&self) -> usize;

    /// How many positions this rank takes from `position` to the end of the epoch.
    fn count_from(&self, position: &SamplerPosition) -> usize;

    /// The samples that this rank takes from `position` to the end of the epoch, in order.
    fn indices_from(&self, position: &SamplerPosition) -> Result<Vec<usize>, SamplerError>;

    /// The same samples in batches: of `batch_size`, unless the sampler decides on batches.
    fn batches_from(
        &self,
        position: &SamplerPosition,
        batch_size: usize,
    ) -> Result<Vec<Vec<usize>>, SamplerError> {
        Ok(self.indices_from(position)?.chunks(batch_size).map(<[_]>::to_vec).collect())
    }

    /// How many positions a full batch takes: `batch_size` if a position is a sample, 1 if it is a batch.
    fn positions_of_batch(&self, batch_size: usize) -> usize {
        batch_size
    }

    /// How many positions an epoch has, over all ranks.
    fn num_positions(&self, epoch: u64) -> usize {
        let _ = epoch;
        self.num_samples()
    }

    /// The seed of the order and of the samples' randomness, the same on all ranks.
    fn seed(&self) -> u64 {
        0
    }

    /// The beginning of an epoch.
    fn start(&self, epoch: u64) -> SamplerPosition {
        SamplerPosition { epoch, samples_seen: 0, seed: self.seed(), data: None }
    }
}
