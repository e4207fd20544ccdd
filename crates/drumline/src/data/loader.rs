//! Loading: threads prepare batches ahead of their use, in order.
//!
//! ```text
//!   Sampler ─▶ indices of batch 0 │ batch 1 │ batch 2 │ …          (Plan)
//!                            ▼         ▼        ▼
//!                        worker 0   worker 1  worker 0 …            (Crew: threads, each makes whole batches)
//!                            └────▶ in order, at most `workers × prefetch` ahead ────▶ Epoch: Iterator
//! ```
//!
//! A sample is made from its index and a seed of (run's seed, epoch, index), so that its randomness depends neither on
//! the number of workers nor on that of ranks. Not here: what the samples are (`Dataset` is yours, or one of
//! `drumline-zoo`'s).

mod attempt;
mod crew;
mod dataset;
mod epoch;
mod error;
mod image_batch;
mod map_dataset;
mod plan;
mod sample;

use std::sync::{Arc, OnceLock};

use drumline_torch::cuda;

use crate::data::sampler::{DataId, Sampler, SamplerPosition};
use plan::Plan;

pub use dataset::Dataset;
pub use epoch::Epoch;
pub use error::{LoaderError, SampleError};
pub use image_batch::ImageBatch;
pub use map_dataset::{Cause, MapDataset};
pub use sample::{Sample, SampleRng};

/// Options of a [`Loader`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoaderOptions {
    /// Samples in a batch of this rank. It is ignored with a sampler of whole batches,
    /// [`PlannedBatches`](crate::data::PlannedBatches).
    pub batch_size: usize,
    /// Threads that make batches. With 0 the calling thread makes a batch when it asks for it.
    pub workers: usize,
    /// How many batches each worker may be ahead of the caller.
    pub prefetch: usize,
    /// Leave out a last batch that is incomplete.
    pub drop_last: bool,
    /// Copy batches to pinned memory, from which copies to a GPU are fast, with [`Dataset::pin_memory`]. Without a GPU
    /// this does nothing.
    pub pin_memory: bool,
}

impl Default for LoaderOptions {
    fn default() -> Self {
        Self { batch_size: 32, workers: 2, prefetch: 2, drop_last: false, pin_memory: false }
    }
}

/// Makes the batches of a rank, epoch by epoch.
///
/// ```
/// use drumline::data::{Cause, DistributedSampler, Loader, LoaderOptions, MapDataset, SamplerOptions};
///
/// let squares = MapDataset::new(10, |sample| Ok(sample.index * sample.index), Ok::<_, Cause>);
/// let sampler = DistributedSampler::new(SamplerOptions { num_samples: 10, shuffle: false, ..Default::default() })?;
/// let loader = Loader::new(squares, sampler, LoaderOptions { batch_size: 4, ..Default::default() })?;
/// for epoch in 0..2 {
///     let batches = loader.epoch(epoch).collect::<Result<Vec<_>, _>>()?;
///     assert_eq!(batches, [vec![0, 1, 4, 9], vec![16, 25, 36, 49], vec![64, 81]]);
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Loader<D: Dataset> {
    dataset: Arc<D>,
    sampler: Box<dyn Sampler>,
    options: LoaderOptions,
    data_id: OnceLock<DataId>,
}

impl<D: Dataset + 'static> Loader<D> {
    /// Batches of `dataset` in the order of `sampler`.
    pub fn new(
        dataset: D,
        sampler: impl Sampler + 'static,
        options: LoaderOptions,
    ) -> Result<Self, LoaderError> {
        Self::shared(Arc::new(dataset), sampler, options)
    }

    /// Batches of a data set that is shared with others.
    pub fn shared(
        dataset: Arc<D>,
        sampler: impl Sampler + 'static,
        options: LoaderOptions,
    ) -> Result<Self, LoaderError> {
        let sampler = Box::new(sampler);
        if options.batch_size == 0 {
            return Err(LoaderError::EmptyBatches);
        }
        if options.workers > 0 && options.prefetch == 0 {
            return Err(LoaderError::NoPrefetch { workers: options.workers });
        }
        if sampler.num_samples() != dataset.len() {
            return Err(LoaderError::OtherLength { sampler: sampler.num_samples(), dataset: dataset.len() });
        }
        let is_on_device = dataset.is_on_device();
        let workers = if is_on_device { 0 } else { options.workers };
        let pin_memory = options.pin_memory && cuda::is_open() && !is_on_device;
        let options = LoaderOptions { workers, pin_memory, ..options };
        Ok(Self { dataset, sampler, options, data_id: OnceLock::new() })
    }

    /// The batches of an epoch. The threads that make them end when the iterator is dropped.
    pub fn epoch(&self, epoch: u64) -> Epoch<D> {
        self.resume(self.start(epoch)).unwrap_or_else(Epoch::failed)
    }

    /// The batches that are left of an epoch after a position of [`Epoch::sampler_position`], from this or any number
    /// of ranks. A position of another data set is an error; one without [`data`](SamplerPosition::data) is accepted.
    pub fn resume(&self, position: SamplerPosition) -> Result<Epoch<D>, LoaderError> {
        position.check_data(self.data_id())?;
        Epoch::begin(Arc::new(Plan::new(Arc::clone(&self.dataset), &*self.sampler, position, self.options)?))
    }

    /// The beginning of an epoch.
    pub fn start(&self, epoch: u64) -> SamplerPosition {
        SamplerPosition { data: Some(self.data_id()), ..self.sampler.start(epoch) }
    }

    /// Identifies the data set.
    pub fn data_id(&self) -> DataId {
        let new = || DataId { num_samples: self.dataset.len(), fingerprint: self.dataset.fingerprint() };
        *self.data_id.get_or_init(new)
    }

    /// How many batches this rank gets in an epoch; in the first one, where a sampler's epochs differ.
    pub fn num_batches(&self) -> usize {
        self.num_batches_of(0)
    }

    /// How many batches this rank gets in this epoch.
    pub fn num_batches_of(&self, epoch: u64) -> usize {
        let positions = self.sampler.count_from(&self.sampler.start(epoch));
        let of_batch = self.sampler.positions_of_batch(self.options.batch_size);
        if self.options.drop_last { positions / of_batch } else { positions.div_ceil(of_batch) }
    }

    /// The data set, sampler and options, for a loader that divides the samples over ranks.
    pub(crate) fn into_parts(self) -> (Arc<D>, Box<dyn Sampler>, LoaderOptions) {
        (self.dataset, self.sampler, self.options)
    }

    /// The data set.
    pub fn dataset(&self) -> &D {
        &self.dataset
    }

    /// The sampler.
    pub fn sampler(&self) -> &dyn Sampler {
        &*self.sampler
    }

    /// The options. `workers` and `pin_memory` have their effective values.
    pub fn options(&self) -> &LoaderOptions {
        &self.options
    }
}

impl<D: Dataset> std::fmt::Debug for Loader<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Loader").field("options", &self.options).finish_non_exhaustive()
    }
}
