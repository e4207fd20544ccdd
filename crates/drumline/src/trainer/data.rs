//! A data set of any type.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use drumline_torch::TorchError;

use crate::data::loader::{Dataset, Sample, SampleError};

/// Any data set of batches `B`.
pub(super) struct AnyDataset<B>(pub(super) Arc<dyn Dataset<Batch = B>>);

impl<B> Clone for AnyDataset<B> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<B: Send> Dataset for AnyDataset<B> {
    type Batch = B;

    fn len(&self) -> usize {
        self.0.len()
    }

    fn batch(&self, samples: &[Sample]) -> Result<B, SampleError> {
        self.0.batch(samples)
    }

    fn batch_unless_stopped(&self, samples: &[Sample], stop: &AtomicBool) -> Result<Option<B>, SampleError> {
        self.0.batch_unless_stopped(samples, stop)
    }

    fn name(&self, index: usize) -> String {
        self.0.name(index)
    }

    fn fingerprint(&self) -> Option<u32> {
        self.0.fingerprint()
    }

    fn is_on_device(&self) -> bool {
        self.0.is_on_device()
    }

    fn pin_memory(&self, batch: B) -> Result<B, TorchError> {
        self.0.pin_memory(batch)
    }
}
