//! What an epoch's batches are made of.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use super::{Dataset, LoaderError, LoaderOptions, Sample, attempt};
use crate::sampler::SamplerPosition;

pub(super) struct Plan<D> {
    pub(super) dataset: Arc<D>,
    pub(super) indices: Vec<usize>,
    pub(super) start: SamplerPosition,
    pub(super) num_replicas: usize,
    pub(super) options: LoaderOptions,
}

impl<D: Dataset> Plan<D> {
    pub(super) fn num_batches(&self) -> usize {
        self.options.num_batches(self.indices.len())
    }

    /// Makes one batch; `None` if it was stopped.
    pub(super) fn load(&self, number: usize, stop: &AtomicBool) -> Result<Option<D::Batch>, LoaderError> {
        let first = number * self.options.batch_size;
        let indices = &self.indices[first..self.indices.len().min(first + self.options.batch_size)];
        let SamplerPosition { seed, epoch, .. } = self.start;
        let samples: Vec<_> = indices.iter().map(|index| Sample::new(seed, epoch, *index)).collect();
        match attempt::batch(&*self.dataset, &samples, stop)? {
            Some(batch) if self.options.pin_memory => attempt::pin(&*self.dataset, batch, &samples).map(Some),
            made => Ok(made),
        }
    }

    /// The position once so many batches have been used, on all ranks.
    pub(super) fn position_after(&self, batches: usize) -> SamplerPosition {
        let taken = self.indices.len().min(batches * self.options.batch_size);
        self.start.after(taken, self.num_replicas)
    }
}
