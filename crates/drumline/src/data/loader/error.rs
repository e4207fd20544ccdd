//! Errors in making a batch.

use std::error::Error;

use drumline_torch::TorchError;

use crate::data::sampler::SamplerError;

/// A sample that cannot be made.
#[derive(Debug, thiserror::Error)]
#[error("cannot load sample {index} ({name}): {cause}")]
pub struct SampleError {
    /// Its index in the data set.
    pub index: usize,
    /// Its name for people.
    pub name: String,
    /// The cause.
    #[source]
    pub cause: Box<dyn Error + Send + Sync>,
}

impl SampleError {
    /// An error of the sample `index` with this name. The cause is an error or a text.
    pub fn new(
        index: usize,
        name: impl Into<String>,
        cause: impl Into<Box<dyn Error + Send + Sync>>,
    ) -> Self {
        Self { index, name: name.into(), cause: cause.into() }
    }
}

/// An error of a loader.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoaderError {
    /// A sample cannot be made.
    #[error(transparent)]
    Sample(#[from] SampleError),
    /// The data set panicked in making a sample.
    #[error("panicked while loading sample {index} ({name}): {message}")]
    Panicked {
        /// The sample's index in the data set.
        index: usize,
        /// Its name for people.
        name: String,
        /// The panic's message.
        message: String,
    },
    /// The data set panicked in making a batch, but not for any of its samples alone.
    #[error(
        "panicked while making a batch of {count} samples, from {first} on, none of which fails alone: {message}"
    )]
    BatchPanicked {
        /// How many samples the batch has.
        count: usize,
        /// The first sample's index in the data set.
        first: usize,
        /// The panic's message.
        message: String,
    },
    /// The batch size is 0.
    #[error("the batch size is 0, expected at least 1; try LoaderOptions {{ batch_size: 32, .. }}")]
    EmptyBatches,
    /// There are workers, but they may not prepare any batch.
    #[error(
        "{workers} workers may make no batch ahead (prefetch is 0), expected at least 1; try prefetch: 2, or workers: 0"
    )]
    NoPrefetch {
        /// How many workers.
        workers: usize,
    },
    /// The sampler is for a data set of another length.
    #[error(
        "the sampler is for {sampler} samples, but the data set has {dataset}; try num_samples: dataset.len()"
    )]
    OtherLength {
        /// The sampler's length.
        sampler: usize,
        /// The data set's length.
        dataset: usize,
    },
    /// An error of the sampler.
    #[error(transparent)]
    Sampler(#[from] SamplerError),
    /// A batch cannot be pinned.
    #[error("cannot pin a batch's memory: {0}; try pin_memory: false")]
    Pin(#[source] TorchError),
    /// A worker thread cannot be started.
    #[error("cannot start loader worker {worker}: {cause}; try fewer workers")]
    Thread {
        /// The number of the worker.
        worker: usize,
        /// The cause.
        #[source]
        cause: std::io::Error,
    },
}
