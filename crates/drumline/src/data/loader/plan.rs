//! The samples of each batch of an epoch.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use super::{Dataset, LoaderError, LoaderOptions, Sample, attempt};
use crate::data::sampler::{Sampler, SamplerPosition};

pub(super) struct Plan<D> {
    dataset: Arc<D>,
    /// The samples of each batch.
    batches: Vec<Vec<usize>>,
    start: SamplerPosition,
    /// Positions that this rank takes in the epoch.
    positions: usize,
    /// Positions of a full batch.
    of_batch: usize,
    num_replicas: usize,
    pub(super) options: LoaderOptions,
}

impl<D: Dataset> Plan<D> {
    pub(super) fn new(
        dataset: Arc<D>,
        sampler: &dyn Sampler,
        start: SamplerPosition,
        options: LoaderOptions,
    ) -> Result<Self, LoaderError> {
        let mut batches = sampler.batches_from(&start, options.batch_size)?;
        let of_batch = sampler.positions_of_batch(options.batch_size);
        if options.drop_last {
            batches.pop_if(|last| last.len() < of_batch);
        }
        let (positions, num_replicas) = (sampler.count_from(&start), sampler.num_replicas());
        Ok(Self { dataset, batches, start, positions, of_batch, num_replicas, options })
    }

    pub(super) fn num_batches(&self) -> usize {
        self.batches.len()
    }

    /// Makes one batch; `None` if it was stopped.
    pub(super) fn load(&self, number: usize, stop: &AtomicBool) -> Result<Option<D::Batch>, LoaderError> {
        let SamplerPosition { seed, epoch, .. } = self.start;
        let samples: Vec<_> =
            self.batches[number].iter().map(|index| Sample::new(seed, epoch, *index)).collect();
        match attempt::batch(&*self.dataset, &samples, stop)? {
            Some(batch) if self.options.pin_memory => attempt::pin(&*self.dataset, batch, &samples).map(Some),
            made => Ok(made),
        }
    }

    /// The position after all ranks have used `batches` batches each.
    pub(super) fn position_after(&self, batches: usize) -> SamplerPosition {
        let taken = self.positions.min(batches * self.of_batch);
        self.start.after(taken, self.num_replicas)
    }
}
