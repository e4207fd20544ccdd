//! A prepared loader: this rank's share of each epoch, turn by turn, on the device.

use std::rc::Rc;
use std::sync::Arc;

use drumline_parallel::Count;

use super::error::Result;
use super::save::LoaderPosition;
use super::share::Share;
use super::shared::Shared;
use super::window::{CountedBatch, Turns};
use crate::comm::alike::{NamedValues, check_alike};
use crate::comm::shared_failure::{LocalFailure, SharedFailure, guarded};
use crate::data::loader::{Dataset, Epoch, Loader, LoaderOptions};
use crate::data::sampler::{Sampler, SamplerPosition};
use crate::trainer::Batch;

/// The values that must be the same on all ranks.
fn shared_values(
    whole: &dyn Sampler,
    options: &LoaderOptions,
    fingerprint: Option<u32>,
) -> std::result::Result<NamedValues, LocalFailure> {
    if whole.num_replicas() != 1 {
        return Err(format!(
            "the loader's samples are already divided over {} ranks; try a sampler for one rank, because prepare divides them",
            whole.num_replicas()
        )
        .into());
    }
    let shared_values = [
        ("number of samples", whole.num_samples().to_string()),
        ("fingerprint of the data", format!("{fingerprint:08x?}")),
        ("seed", whole.seed().to_string()),
        ("batch_size", options.batch_size.to_string()),
        ("drop_last", options.drop_last.to_string()),
    ];
    Ok(shared_values.map(|(name, value)| (name.to_owned(), value)).to_vec())
}

/// The weight of a batch.
type Weigh<B> = Rc<dyn Fn(&B) -> f64>;

/// A loader of this rank's batches; see [`Accelerator::prepare`](super::Accelerator::prepare).
///
/// All ranks iterate over an epoch together and get the same number of batches. Each sample counts once: none is
/// repeated to make shares equal.
pub struct PreparedLoader<D: Dataset> {
    loader: Loader<D>,
    share: Arc<Share>,
    shared: Rc<Shared>,
    weigh: Weigh<D::Batch>,
    position: Rc<LoaderPosition>,
}

impl<D: Dataset + 'static> PreparedLoader<D>
where
    D::Batch: Batch,
{
    pub(super) fn new(loader: Loader<D>, shared: &Rc<Shared>) -> Result<Self> {
        let (dataset, whole, options) = loader.into_parts();
        check_alike(&shared.group, "loader", &shared_values(&*whole, &options, dataset.fingerprint()))?;
        let LoaderOptions { batch_size, drop_last, .. } = options;
        let (rank, num_replicas) = (shared.mesh.samples().rank(), shared.mesh.samples().size());
        let share = Arc::new(Share { whole, rank, num_replicas, batch_size, drop_last });
        if shared.group.rank() == 0 && share.positions_of(0) == 0 {
            tracing::warn!(
                "a loader has no batch of {batch_size} for each of {num_replicas} ranks, as its data set has {} samples: its epochs are empty",
                share.whole.num_samples()
            );
        }
        let options = LoaderOptions {
            drop_last: false,
            pin_memory: shared.device.is_cuda() || options.pin_memory,
            ..options
        };
        // The same options were valid for the loader that was prepared.
        let loader = Loader::shared(dataset, share.clone(), options)
            .map_err(|error| SharedFailure::on_all_ranks(error.to_string()))?;
        let position = Rc::new(LoaderPosition::new(share.clone(), loader.data_id()));
        let weigh = Rc::new(|batch: &D::Batch| batch.num_samples() as f64);
        Ok(Self { loader, share, shared: shared.clone(), weigh, position })
    }

    pub(super) fn position(&self) -> Rc<LoaderPosition> {
        self.position.clone()
    }

    /// Weighs batches by something else than samples, such as the tokens over which a loss is the mean. The gradient of
    /// a window is that of the mean over all of them.
    #[must_use]
    pub fn weighing(self, weigh: impl Fn(&D::Batch) -> f64 + 'static) -> Self {
        Self { weigh: Rc::new(weigh), ..self }
    }

    /// The batches of an epoch; after [`load_state`](super::Accelerator::load_state) those that are left of it.
    pub fn epoch(&self, epoch: u64) -> Batches<D> {
        let position = self.position.take_resumed(epoch).unwrap_or_else(|| self.position.start(epoch));
        self.from(position)
    }

    /// The batches of an epoch after the first `num_batches` of each rank.
    pub(super) fn after(&self, epoch: u64, num_batches: usize) -> Batches<D> {
        let start = self.position.start(epoch);
        let samples_seen =
            num_batches.saturating_mul(self.share.turn()).min(self.share.whole.count_from(&start));
        self.from(SamplerPosition { samples_seen, ..start })
    }

    fn from(&self, position: SamplerPosition) -> Batches<D> {
        let real = self.share.taken(&position).real.div_ceil(self.share.of_batch());
        let num_positions = self.share.positions_of(position.epoch);
        let source = Source {
            batches: self.loader.resume(position).map_err(|error| Some(LocalFailure::from(error))),
            real,
            weigh: self.weigh.clone(),
        };
        self.position.set(position);
        Batches {
            turns: Turns::new(source, &self.shared),
            shared: self.shared.clone(),
            position: self.position.clone(),
            at: position,
            turn: self.share.turn(),
            num_positions,
        }
    }

    /// Batches of each rank in an epoch; in the first one, where a sampler's epochs differ.
    pub fn num_batches(&self) -> usize {
        self.loader.num_batches()
    }

    /// Batches of each rank in this epoch.
    pub fn num_batches_of(&self, epoch: u64) -> usize {
        self.loader.num_batches_of(epoch)
    }

    /// Whether ranks run out of data at different times; in the first epoch, where a sampler's epochs differ.
    pub fn is_uneven(&self) -> bool {
        self.share.has_filler(0)
    }

    /// The data set.
    pub fn dataset(&self) -> &D {
        self.loader.dataset()
    }
}

impl<D: Dataset> std::fmt::Debug for PreparedLoader<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PreparedLoader").field("loader", &self.loader).finish_non_exhaustive()
    }
}

/// This rank's batches with their counts.
struct Source<D: Dataset> {
    /// The error is returned once.
    batches: std::result::Result<Epoch<D>, Option<LocalFailure>>,
    /// How many of them are not fillers.
    real: usize,
    weigh: Weigh<D::Batch>,
}

impl<D: Dataset + 'static> Iterator for Source<D>
where
    D::Batch: Batch,
{
    type Item = std::result::Result<CountedBatch<D::Batch>, LocalFailure>;

    fn next(&mut self) -> Option<Self::Item> {
        let batch = match &mut self.batches {
            Err(failure) => return failure.take().map(Err),
            Ok(batches) => batches.next()?.map_err(LocalFailure::from),
        };
        Some(batch.and_then(|batch| {
            let is_filler = self.real == 0;
            self.real = self.real.saturating_sub(1);
            let count = if is_filler { Count::default() } else { self.counted(&batch)? };
            Ok(CountedBatch { batch, count })
        }))
    }
}

impl<D: Dataset> Source<D>
where
    D::Batch: Batch,
{
    fn counted(&self, batch: &D::Batch) -> std::result::Result<Count, LocalFailure> {
        guarded(|| {
            let (samples, weight) = (batch.num_samples(), (self.weigh)(batch));
            // The loss would be a mean over nothing, which is NaN, and the reduction would spread it to all ranks.
            if weight > 0.0 && weight.is_finite() {
                return Ok(Count { samples, weight });
            }
            Err(format!("a batch of {samples} samples has a weight of {weight}, expected more than 0; try data without such batches").into())
        })
    }
}

/// The batches of an epoch; see [`PreparedLoader::epoch`].
pub struct Batches<D: Dataset> {
    turns: Turns<D::Batch, Source<D>>,
    shared: Rc<Shared>,
    position: Rc<LoaderPosition>,
    at: SamplerPosition,
    turn: usize,
    num_positions: usize,
}

impl<D: Dataset + 'static> Iterator for Batches<D>
where
    D::Batch: Batch,
{
    type Item = Result<D::Batch>;

    fn next(&mut self) -> Option<Self::Item> {
        let batch = match self.turns.next()? {
            Ok(batch) => batch?,
            Err(error) => return Some(Err(error)),
        };
        self.at.samples_seen = (self.at.samples_seen + self.turn).min(self.num_positions);
        self.position.set(self.at);
        Some(batch.to_device(self.shared.device).map_err(Into::into))
    }
}

impl<D: Dataset> std::fmt::Debug for Batches<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Batches").field("at", &self.at).finish_non_exhaustive()
    }
}
