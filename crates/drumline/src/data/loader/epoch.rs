//! The batches of one epoch, one after the other.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use super::crew::Crew;
use super::plan::Plan;
use super::{Dataset, LoaderError};
use crate::data::sampler::SamplerPosition;

/// The batches of an epoch, in order. After an error there are no more.
///
/// Dropping it, even mid-epoch, stops and joins its threads. It waits for the current sample of each thread if the data
/// set can be stopped ([`Dataset::batch_unless_stopped`], as with [`MapDataset`](super::MapDataset)), otherwise for the
/// batch.
pub struct Epoch<D: Dataset> {
    source: Source<D>,
    num_taken: usize,
}

enum Source<D: Dataset> {
    /// The caller's thread makes the batches.
    Here(Arc<Plan<D>>),
    Workers(Arc<Plan<D>>, Crew<D::Batch>),
    /// It has failed. The error may not have been returned yet.
    Failed {
        pending_error: Option<LoaderError>,
        position: SamplerPosition,
    },
}

impl<D: Dataset + 'static> Epoch<D> {
    pub(super) fn begin(plan: Arc<Plan<D>>) -> Result<Self, LoaderError> {
        let source = match plan.options.workers {
            0 => Source::Here(plan),
            _ => Crew::start(&plan).map(|crew| Source::Workers(plan, crew))?,
        };
        Ok(Self { source, num_taken: 0 })
    }
}

impl<D: Dataset> Epoch<D> {
    pub(super) fn failed(error: LoaderError) -> Self {
        let position = SamplerPosition::default();
        Self { source: Source::Failed { pending_error: Some(error), position }, num_taken: 0 }
    }

    /// The position of the epoch, over all ranks, after the batches returned so far. Save it for
    /// [`Loader::resume`](super::Loader::resume). Batches that are only prepared do not count. All ranks must have
    /// taken the same number of batches.
    pub fn sampler_position(&self) -> SamplerPosition {
        match &self.source {
            Source::Here(plan) | Source::Workers(plan, _) => plan.position_after(self.num_taken),
            Source::Failed { position, .. } => *position,
        }
    }

    fn left(&self) -> usize {
        match &self.source {
            Source::Here(plan) | Source::Workers(plan, _) => plan.num_batches() - self.num_taken,
            Source::Failed { pending_error, .. } => usize::from(pending_error.is_some()),
        }
    }
}

impl<D: Dataset + 'static> Iterator for Epoch<D> {
    type Item = Result<D::Batch, LoaderError>;

    fn next(&mut self) -> Option<Self::Item> {
        let batch = match &mut self.source {
            Source::Here(plan) if self.num_taken < plan.num_batches() => {
                plan.load(self.num_taken, &AtomicBool::new(false)).transpose()?
            }
            Source::Here(_) => return None,
            Source::Workers(_, crew) => crew.take()?,
            Source::Failed { pending_error, .. } => return pending_error.take().map(Err),
        };
        match &batch {
            Ok(_) => self.num_taken += 1,
            Err(_) => self.source = Source::Failed { pending_error: None, position: self.sampler_position() },
        }
        Some(batch)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left(), Some(self.left()))
    }
}

impl<D: Dataset + 'static> ExactSizeIterator for Epoch<D> {}

impl<D: Dataset> std::fmt::Debug for Epoch<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Epoch")
            .field("taken", &self.num_taken)
            .field("left", &self.left())
            .finish_non_exhaustive()
    }
}
