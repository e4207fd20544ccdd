//! A prepared loader: this rank's share, turn by turn, on the device.

use std::rc::Rc;
use std::sync::Arc;

use super::error::Result;
use super::save::Place;
use super::share::Share;
use super::shared::Shared;
use super::window::{Count, Piece, Turns};
use crate::alike::{Given, check_alike};
use crate::loader::{Dataset, Epoch, Loader, LoaderOptions};
use crate::sampler::{Sampler, SamplerPosition};
use crate::shared_failure::{SharedFailure, Trouble, guarded};
use crate::trainer::Batch;

/// What must be the same on all ranks.
fn given(
    whole: &dyn Sampler,
    options: &LoaderOptions,
    fingerprint: Option<u32>,
) -> std::result::Result<Given, Trouble> {
    if whole.num_replicas() != 1 {
        return Err(format!(
            "the loader's samples are already shared out over {} ranks; try a sampler for one, as prepare shares them out",
            whole.num_replicas()
        )
        .into());
    }
    let given = [
        ("number of samples", whole.num_samples().to_string()),
        ("fingerprint of the data", format!("{fingerprint:08x?}")),
        ("seed", whole.seed().to_string()),
        ("batch_size", options.batch_size.to_string()),
        ("drop_last", options.drop_last.to_string()),
    ];
    Ok(given.map(|(name, value)| (name.to_owned(), value)).to_vec())
}

/// What is counted in a batch.
type Weigh<B> = Rc<dyn Fn(&B) -> f64>;

/// A loader whose batches are those of this rank; see [`Accelerator::prepare`](super::Accelerator::prepare).
///
/// All ranks go through their epochs together and get as many batches. Each sample counts once: none is repeated to make shares equal.
pub struct PreparedLoader<D: Dataset> {
    loader: Loader<D>,
    share: Arc<Share>,
    shared: Rc<Shared>,
    weigh: Weigh<D::Batch>,
    place: Rc<Place>,
}

impl<D: Dataset + 'static> PreparedLoader<D>
where
    D::Batch: Batch,
{
    pub(super) fn new(loader: Loader<D>, shared: &Rc<Shared>) -> Result<Self> {
        let (dataset, whole, options) = loader.into_parts();
        check_alike(&shared.group, "loader", given(&*whole, &options, dataset.fingerprint()))?;
        let LoaderOptions { batch_size, drop_last, .. } = options;
        let (rank, num_replicas) = (shared.group.rank(), shared.group.size());
        let share = Arc::new(Share { whole, rank, num_replicas, batch_size, drop_last });
        if rank == 0 && share.positions_of(0) == 0 {
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
        // They were good before.
        let loader = Loader::shared(dataset, share.clone(), options)
            .map_err(|error| SharedFailure::alike(error.to_string()))?;
        let place = Rc::new(Place::new(share.clone(), loader.data_id()));
        let weigh = Rc::new(|batch: &D::Batch| batch.num_samples() as f64);
        Ok(Self { loader, share, shared: shared.clone(), weigh, place })
    }

    pub(super) fn place(&self) -> Rc<Place> {
        self.place.clone()
    }

    /// Counts something else than samples, such as the tokens that a loss is the mean of: a window's gradient is that of the mean over all of them.
    #[must_use]
    pub fn weighing(self, weigh: impl Fn(&D::Batch) -> f64 + 'static) -> Self {
        Self { weigh: Rc::new(weigh), ..self }
    }

    /// The batches of an epoch; after [`load_state`](super::Accelerator::load_state) those that were left of it.
    pub fn epoch(&self, epoch: u64) -> Batches<D> {
        let position = self.place.take_resumed(epoch).unwrap_or_else(|| self.place.start(epoch));
        self.from(position)
    }

    /// The batches that are left after some.
    pub(super) fn after(&self, epoch: u64, num_batches: usize) -> Batches<D> {
        let start = self.place.start(epoch);
        let samples_seen =
            num_batches.saturating_mul(self.share.turn()).min(self.share.whole.count_from(&start));
        self.from(SamplerPosition { samples_seen, ..start })
    }

    fn from(&self, position: SamplerPosition) -> Batches<D> {
        let real = self.share.taken(&position).real.div_ceil(self.share.of_batch());
        let num_positions = self.share.positions_of(position.epoch);
        let source = Source {
            batches: self.loader.resume(position).map_err(|error| Some(Trouble::from(error))),
            real,
            weigh: self.weigh.clone(),
        };
        self.place.set(position);
        Batches {
            turns: Turns::new(source, &self.shared),
            shared: self.shared.clone(),
            place: self.place.clone(),
            at: position,
            turn: self.share.turn(),
            num_positions,
        }
    }

    /// Batches of each rank in an epoch: the first, where a sampler's epochs differ.
    pub fn num_batches(&self) -> usize {
        self.loader.num_batches()
    }

    /// Batches of each rank in that epoch.
    pub fn num_batches_of(&self, epoch: u64) -> usize {
        self.loader.num_batches_of(epoch)
    }

    /// Whether ranks run out at different times: in the first epoch, where a sampler's epochs differ.
    pub fn is_uneven(&self) -> bool {
        self.share.has_filler(0)
    }

    /// What the batches are made of.
    pub fn dataset(&self) -> &D {
        self.loader.dataset()
    }
}

impl<D: Dataset> std::fmt::Debug for PreparedLoader<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PreparedLoader").field("loader", &self.loader).finish_non_exhaustive()
    }
}

/// This rank's batches, and what each counts for.
struct Source<D: Dataset> {
    /// An error that is to be told once.
    batches: std::result::Result<Epoch<D>, Option<Trouble>>,
    /// How many of them are no filler.
    real: usize,
    weigh: Weigh<D::Batch>,
}

impl<D: Dataset + 'static> Iterator for Source<D>
where
    D::Batch: Batch,
{
    type Item = std::result::Result<Piece<D::Batch>, Trouble>;

    fn next(&mut self) -> Option<Self::Item> {
        let batch = match &mut self.batches {
            Err(trouble) => return trouble.take().map(Err),
            Ok(batches) => batches.next()?.map_err(Trouble::from),
        };
        Some(batch.and_then(|batch| {
            let is_filler = self.real == 0;
            self.real = self.real.saturating_sub(1);
            let count = if is_filler { Count::default() } else { self.counted(&batch)? };
            Ok(Piece { batch, count })
        }))
    }
}

impl<D: Dataset> Source<D>
where
    D::Batch: Batch,
{
    fn counted(&self, batch: &D::Batch) -> std::result::Result<Count, Trouble> {
        guarded(|| {
            let (samples, weight) = (batch.num_samples(), (self.weigh)(batch));
            // Its loss would be a mean over nothing, and no number, which the reduction would spread over all ranks.
            if weight > 0.0 && weight.is_finite() {
                return Ok(Count { samples, weight });
            }
            Err(format!("a batch of {samples} samples weighs {weight}; try data without such batches").into())
        })
    }
}

/// The batches of an epoch; see [`PreparedLoader::epoch`].
pub struct Batches<D: Dataset> {
    turns: Turns<D::Batch, Source<D>>,
    shared: Rc<Shared>,
    place: Rc<Place>,
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
        self.place.set(self.at);
        Some(batch.to_device(self.shared.device).map_err(Into::into))
    }
}

impl<D: Dataset> std::fmt::Debug for Batches<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Batches").field("at", &self.at).finish_non_exhaustive()
    }
}
