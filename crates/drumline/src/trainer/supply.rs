//! The batches of each step of an epoch: taken when the step begins, or one step ahead, while the GPU computes.
//!
//! ```text
//!   host   launch k ─ take k+1, begin its upload ─ read loss k ─ launch optimizer ─ agree ─ launch k+1 ─ …
//!   GPU    ┃ forward ─ loss ─ backward of k       ┃              ┃ optimizer ┃           ┃ copy ─ forward …
//!   copies        ┃ batches of k+1 ┃
//! ```
//! Failures of batches that are taken ahead are reported in their own step. Positions in the data are counted by steps,
//! not by the batches taken, so that checkpoints do not depend on this.

use std::time::Instant;

use drumline_observe::trace::Track;
use drumline_parallel::Brought;

use super::batch::Batch;
use super::context::Context;
use super::data::AnyDataset;
use super::learner::Learner;
use super::model::Model;
use crate::comm::shared_failure::{LocalFailure, guarded};
use crate::data::loader::{Dataset, Epoch, Loader};

/// The remaining batches of an epoch.
pub(super) struct Supply<B: Batch> {
    batches: Epoch<AnyDataset<B>>,
    /// The batches of the next step, if they were taken ahead.
    ahead: Option<Window<B>>,
    /// Whether batches are made on the GPU.
    is_on_device: bool,
    has_workers: bool,
}

/// The batches of a step, and this rank's contribution to the agreement.
pub(super) struct Window<B> {
    pub(super) batches: Vec<B>,
    pub(super) brought: Brought,
    /// Whether they are being copied to the GPU.
    pub(super) is_uploaded: bool,
    pub(super) failure: Option<LocalFailure>,
}

impl<B: Batch> Supply<B> {
    pub(super) fn new(batches: Epoch<AnyDataset<B>>, loader: &Loader<AnyDataset<B>>) -> Self {
        Self {
            batches,
            ahead: None,
            is_on_device: loader.dataset().is_on_device(),
            has_workers: loader.options().workers > 0,
        }
    }

    pub(super) fn is_on_device(&self) -> bool {
        self.is_on_device
    }

    /// Without workers a batch is made when it is requested, which must not be before a checkpoint has saved the random
    /// number generators. A batch that is made on the GPU uses only its samples' own random numbers.
    pub(super) fn can_take_ahead(&self) -> bool {
        self.has_workers || self.is_on_device
    }

    /// Keeps the batches of the next step.
    pub(super) fn keep_ahead(&mut self, window: Window<B>) {
        self.ahead = Some(window);
    }

    /// The batches of the next step; fewer at the end of an epoch. A failure is kept for the next agreement.
    pub(super) fn next<M: Model<B> + ?Sized>(
        &mut self,
        learner: &Learner<'_, M, B>,
        context: &mut Context<'_>,
    ) -> Window<B> {
        let mut window = match self.ahead.take() {
            Some(window) => window,
            None => self.take(learner, context),
        };
        if let Some(failure) = window.failure.take() {
            context.hooks.note(failure);
        }
        window
    }

    /// Takes up to `update_every` batches.
    pub(super) fn take<M: Model<B> + ?Sized>(
        &mut self,
        learner: &Learner<'_, M, B>,
        context: &mut Context<'_>,
    ) -> Window<B> {
        let begin = Instant::now();
        let mut window =
            Window { batches: Vec::new(), brought: Brought::default(), is_uploaded: false, failure: None };
        while window.batches.len() < context.settings.update_every {
            match self.batches.next() {
                None => break,
                Some(Err(error)) => window.failure = Some(error.into()),
                Some(Ok(batch)) => window.add(batch, learner),
            }
            if window.failure.is_some() || context.hooks.failure().is_some() {
                break;
            }
        }
        context.state.times.load += begin.elapsed();
        context.tracer.span("batches", Track::Loading, begin);
        window
    }
}

impl<B: Batch> Window<B> {
    fn add<M: Model<B> + ?Sized>(&mut self, batch: B, learner: &Learner<'_, M, B>) {
        match guarded(|| Ok((learner.loss.count(&batch)?, batch.num_samples()))) {
            Err(failure) => self.failure = Some(failure.within("the loss's count")),
            Ok((count, samples)) => {
                self.brought.batches += 1;
                self.brought.samples += samples;
                self.brought.count += count;
                self.batches.push(batch);
            }
        }
    }
}
