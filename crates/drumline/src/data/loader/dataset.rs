//! The trait of data sets.

use std::sync::atomic::AtomicBool;

use drumline_torch::TorchError;

use super::{Sample, SampleError};

/// Samples by index, which are made into batches. [`MapDataset`](super::MapDataset) makes one from two functions.
///
/// Workers make whole batches, so that a data set can write samples directly into the memory of the batch.
pub trait Dataset: Send + Sync {
    /// The type of a batch, such as [`ImageBatch`](super::ImageBatch).
    type Batch: Send;

    /// How many samples there are.
    fn len(&self) -> usize;

    /// Makes a batch of these samples, in this order. Randomness must come from each sample's seed only.
    ///
    /// After a panic the samples are tried one by one, to find the one that panics.
    fn batch(&self, samples: &[Sample]) -> Result<Self::Batch, SampleError>;

    /// As [`batch`](Self::batch), but returns `None` soon after `stop` is set, because the epoch is no longer needed.
    /// Implement it if a batch takes long, so that leaving an epoch early is fast.
    fn batch_unless_stopped(
        &self,
        samples: &[Sample],
        stop: &AtomicBool,
    ) -> Result<Option<Self::Batch>, SampleError> {
        let _ = stop;
        self.batch(samples).map(Some)
    }

    /// A name of the sample for people, such as the path of its file.
    fn name(&self, index: usize) -> String {
        format!("#{index}")
    }

    /// Distinguishes this data set from others of the same length. It must be the same for the same samples in the same
    /// order, on every host. Resuming a run on other data is an error; without a fingerprint only the length is
    /// compared. It is called once, and should take seconds at most.
    fn fingerprint(&self) -> Option<u32> {
        None
    }

    /// Copies a batch to pinned memory, as [`ImageBatch::pin_memory`](super::ImageBatch::pin_memory) does. It is only
    /// called with [`pin_memory`](super::LoaderOptions::pin_memory) and a GPU. The default does not copy.
    fn pin_memory(&self, batch: Self::Batch) -> Result<Self::Batch, TorchError> {
        Ok(batch)
    }

    /// Whether batches are made on a GPU. Then the caller makes them on its current stream, without workers and without
    /// pinning. The trainer asks for the next batch while a step runs, on a second stream, so a batch must use no
    /// random numbers but those of its samples.
    fn is_on_device(&self) -> bool {
        false
    }

    /// Whether there are no samples.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
