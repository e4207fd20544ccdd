//! What a data set must be able to do.

use std::sync::atomic::AtomicBool;

use drumline_torch::TorchError;

use super::{Sample, SampleError};

/// Samples by index, made into batches. [`MapDataset`](super::MapDataset) makes one from two functions.
///
/// Workers make whole batches, so that a data set can write its samples straight into the batch's memory.
pub trait Dataset: Send + Sync {
    /// What a batch is, such as an [`ImageBatch`](super::ImageBatch).
    type Batch: Send;

    /// How many samples there are.
    fn len(&self) -> usize;

    /// Makes a batch of these samples, in this order. What is random must come from each sample's seed alone.
    ///
    /// After a panic the samples are tried one by one, to find the one that is to blame.
    fn batch(&self, samples: &[Sample]) -> Result<Self::Batch, SampleError>;

    /// As [`batch`](Self::batch), but gives up, with `None`, soon after `stop` is set: the epoch is no longer wanted. Worth
    /// an implementation where a batch takes long, so that who leaves an epoch early need not wait for it.
    fn batch_unless_stopped(
        &self,
        samples: &[Sample],
        stop: &AtomicBool,
    ) -> Result<Option<Self::Batch>, SampleError> {
        let _ = stop;
        self.batch(samples).map(Some)
    }

    /// What people know a sample by, such as the path of its file.
    fn name(&self, index: usize) -> String {
        format!("#{index}")
    }

    /// Tells this data set from others of the same length: the same for the same samples in the same order, on every host. A run that is
    /// resumed on other data is refused. Without one only the length is compared. Asked for once; it should take seconds at most.
    fn fingerprint(&self) -> Option<u32> {
        None
    }

    /// Copies a batch to pinned memory, as [`ImageBatch::pin_memory`](super::ImageBatch::pin_memory) does. Only asked with
    /// [`pin_memory`](super::LoaderOptions::pin_memory) and a GPU; without an implementation batches stay as they are.
    fn pin_memory(&self, batch: Self::Batch) -> Result<Self::Batch, TorchError> {
        Ok(batch)
    }

    /// Whether batches are made on a GPU already. Then whoever asks for a batch makes it, on the stream that is current: no workers, and nothing to pin. The
    /// trainer asks for the next one while a step runs, on a stream beside it, so a batch must draw nothing but its samples' own numbers.
    fn is_on_device(&self) -> bool {
        false
    }

    /// Whether there are no samples.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
