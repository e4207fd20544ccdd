//! The batches of one epoch, one after the other.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use super::crew::Crew;
use super::plan::Plan;
use super::{Dataset, LoaderError};
use crate::sampler::SamplerPosition;

/// The batches of an epoch, in order. After an error there are no more.
///
/// Dropping it, also in mid-epoch, stops and joins its threads. It waits for the sample that each is at if the data set can be stopped
/// ([`Dataset::batch_unless_stopped`], as [`MapDataset`](super::MapDataset) does), else for the batch.
pub struct Epoch<D: Dataset> {
    source: Source<D>,
    given: usize,
}

enum Source<D: Dataset> {
    /// The caller's thread makes the batches.
    Here(Arc<Plan<D>>),
    Workers(Arc<Plan<D>>, Crew<D::Batch>),
    /// It has ended by an error, which may not be told yet.
    Failed {
        told_yet: Option<LoaderError>,
        position: SamplerPosition,
    },
}

impl<D: Dataset + 'static> Epoch<D> {
    pub(super) fn begin(plan: Arc<Plan<D>>) -> Result<Self, LoaderError> {
        let source = match plan.options.workers {
            0 => Source::Here(plan),
            _ => Crew::start(&plan).map(|crew| Source::Workers(plan, crew))?,
        };
        Ok(Self { source, given: 0 })
    }
}

impl<D: Dataset> Epoch<D> {
    pub(super) fn failed(error: LoaderError) -> Self {
        let position = SamplerPosition::default();
        Self { source: Source::Failed { told_yet: Some(error), position }, given: 0 }
    }

    /// Where the epoch stands, over all ranks, when the batches given so far are done: what to save for
    /// [`Loader::resume`](super::Loader::resume). Batches made ahead do not count. All ranks must have taken as many.
    pub fn sampler_position(&self) -> SamplerPosition {
        match &self.source {
            Source::Here(plan) | Source::Workers(plan, _) => plan.position_after(self.given),
            Source::Failed { position, .. } => *position,
        }
    }

    fn left(&self) -> usize {
        match &self.source {
            Source::Here(plan) | Source::Workers(plan, _) => plan.num_batches() - self.given,
            Source::Failed { told_yet, .. } => usize::from(told_yet.is_some()),
        }
    }
}

impl<D: Dataset + 'static> Iterator for Epoch<D> {
    type Item = Result<D::Batch, LoaderError>;

    fn next(&mut self) -> Option<Self::Item> {
        let batch = match &mut self.source {
            Source::Here(plan) if self.given < plan.num_batches() => {
                plan.load(self.given, &AtomicBool::new(false)).transpose()?
            }
            Source::Here(_) => return None,
            Source::Workers(_, crew) => crew.take()?,
            Source::Failed { told_yet, .. } => return told_yet.take().map(Err),
        };
        match &batch {
            Ok(_) => self.given += 1,
            Err(_) => self.source = Source::Failed { told_yet: None, position: self.sampler_position() },
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
            .field("given", &self.given)
            .field("left", &self.left())
            .finish_non_exhaustive()
    }
}
