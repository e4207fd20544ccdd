//! What can go wrong in making a batch.

use std::error::Error;

use drumline_torch::TorchError;

use crate::sampler::SamplerError;

/// A sample that cannot be made.
#[derive(Debug, thiserror::Error)]
#[error("cannot load sample {index} ({name}): {cause}")]
pub struct SampleError {
    /// Its place in the data set.
    pub index: usize,
    /// What people know it by.
    pub name: String,
    /// Why.
    #[source]
    pub cause: Box<dyn Error + Send + Sync>,
}

impl SampleError {
    /// The sample `index`, known as `name`, cannot be made because of `cause`, an error or a text.
    pub fn new(
        index: usize,
        name: impl Into<String>,
        cause: impl Into<Box<dyn Error + Send + Sync>>,
    ) -> Self {
        Self { index, name: name.into(), cause: cause.into() }
    }
}

/// A loader cannot be made, or cannot make a batch.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoaderError {
    /// A sample cannot be made.
    #[error(transparent)]
    Sample(#[from] SampleError),
    /// The data set panicked at a sample.
    #[error("panicked while loading sample {index} ({name}): {message}")]
    Panicked {
        /// The sample's place in the data set.
        index: usize,
        /// What people know it by.
        name: String,
        /// The panic's words.
        message: String,
    },
    /// The data set panicked, but at none of the batch's samples alone.
    #[error(
        "panicked while making a batch of {count} samples, from {first} on, none of which fails alone: {message}"
    )]
    BatchPanicked {
        /// How many samples the batch has.
        count: usize,
        /// The first sample's place in the data set.
        first: usize,
        /// The panic's words.
        message: String,
    },
    /// Batches of nothing.
    #[error("the batch size is 0, expected at least 1; try LoaderOptions {{ batch_size: 32, .. }}")]
    EmptyBatches,
    /// Workers that may not work.
    #[error(
        "{workers} workers may make no batch ahead (prefetch is 0), expected at least 1; try prefetch: 2, or workers: 0"
    )]
    NoPrefetch {
        /// How many workers.
        workers: usize,
    },
    /// Sampler and data set do not belong together.
    #[error(
        "the sampler is for {sampler} samples, but the data set has {dataset}; try num_samples: dataset.len()"
    )]
    OtherLength {
        /// What the sampler was made for.
        sampler: usize,
        /// What there is.
        dataset: usize,
    },
    /// The sampler refused.
    #[error(transparent)]
    Sampler(#[from] SamplerError),
    /// A batch cannot be pinned.
    #[error("cannot pin a batch's memory: {0}; try pin_memory: false")]
    Pin(#[source] TorchError),
    /// No thread for a worker.
    #[error("cannot start loader worker {worker}: {cause}; try fewer workers")]
    Thread {
        /// Which one.
        worker: usize,
        /// Why.
        #[source]
        cause: std::io::Error,
    },
}
