//! Data: the samples of each rank, batches of them, and predictions written in the data set's order.
//!
//! - `sampler`: which samples a rank takes, and in which order ([`DistributedSampler`], [`EvalSampler`],
//!   [`PlannedBatches`])
//! - `loader`: batches of a [`Dataset`], made ahead of the training step by threads ([`Loader`])
//! - `predictions`: the predictions of all ranks in one file ([`PredictionWriter`])

pub(crate) mod loader;
mod predictions;
pub(crate) mod sampler;

pub use loader::{
    Cause, Dataset, Epoch, ImageBatch, Loader, LoaderError, LoaderOptions, MapDataset, Sample, SampleError,
    SampleRng,
};
pub use predictions::{
    Cell, Prediction, PredictionError, PredictionFault, PredictionFormat, PredictionOptions, PredictionWriter,
};
pub use sampler::{
    DataId, DistributedSampler, EvalSampler, PlannedBatches, PlannedOptions, Sampler, SamplerError,
    SamplerOptions, SamplerPosition,
};
