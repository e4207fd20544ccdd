//! Batches on their way to the steps of an epoch: taken when a step begins, or one step before that, while the GPU computes.
//!
//! ```text
//!   host   launch k ─ take k+1, begin its upload ─ read loss k ─ launch optimizer ─ meet ─ launch k+1 ─ …
//!   GPU    ┃ forward ─ loss ─ backward of k       ┃              ┃ optimizer ┃          ┃ copy ─ forward …
//!   copies        ┃ batches of k+1 ┃
//! ```
//! What goes wrong with batches that are taken before their turn is told when their turn comes. Positions in the data are counted by steps, not by what was
//! taken, so that a checkpoint knows nothing of this.

use std::time::Instant;

use drumline_observe::trace::Track;

use super::batch::Batch;
use super::data::AnyDataset;
use super::graphs::Recorded;
use super::meeting::Brought;
use super::model::Model;
use super::run::Run;
use crate::loader::{Dataset, Epoch};
use crate::shared_failure::{Trouble, guarded};

/// The batches of an epoch that are left.
pub(super) struct Supply<B: Batch> {
    batches: Epoch<AnyDataset<B>>,
    /// Of the next step, if they were taken before their turn.
    ahead: Option<Window<B>>,
}

impl<B: Batch> Supply<B> {
    pub(super) fn new(batches: Epoch<AnyDataset<B>>) -> Self {
        Self { batches, ahead: None }
    }
}

/// The batches of a step, and what is brought to the meeting about them.
pub(super) struct Window<B> {
    pub(super) batches: Vec<B>,
    pub(super) brought: Brought,
    /// Whether copies of them are on their way to the GPU.
    pub(super) is_uploaded: bool,
    pub(super) trouble: Option<Trouble>,
}

impl<M: Model<B> + ?Sized, B: Batch> Run<'_, M, B> {
    /// The batches of the next step; fewer at the end of an epoch.
    pub(super) fn window(&mut self, supply: &mut Supply<B>) -> Window<B> {
        let mut window = match supply.ahead.take() {
            Some(window) => window,
            None => self.take_window(supply),
        };
        if let Some(trouble) = window.trouble.take() {
            self.hooks.note(trouble);
        }
        window.brought.graphs = self.can_use_graphs(&window.batches);
        window.brought.records = window.brought.graphs && self.has_to_record();
        window
    }

    /// Takes those of the step after the one that is under way, and begins to bring them to the GPU.
    pub(super) fn take_ahead(&mut self, supply: &mut Supply<B>, recorded: &mut Recorded<B, M::Output>) {
        let is_on_device = self.train.dataset().is_on_device();
        // Without workers a batch is made when it is asked for, which must not be before a checkpoint has the generators' state. One that is made on the
        // GPU draws nothing but its samples' own numbers.
        let is_made_here = self.train.options().workers == 0 && !is_on_device;
        let is_last = self.state.max_steps.is_some_and(|most| self.state.step + 1 >= most);
        if is_made_here || is_last || self.hooks.trouble().is_some() {
            return;
        }
        let mut window = match is_on_device {
            true => recorded.beside(|| self.take_window(supply)),
            false => self.take_window(supply),
        };
        recorded.begin_upload(&mut window);
        supply.ahead = Some(window);
    }

    fn take_window(&mut self, supply: &mut Supply<B>) -> Window<B> {
        let begin = Instant::now();
        let mut window =
            Window { batches: Vec::new(), brought: Brought::default(), is_uploaded: false, trouble: None };
        while window.batches.len() < self.settings.update_every {
            match supply.batches.next() {
                None => break,
                Some(Err(error)) => window.trouble = Some(error.into()),
                Some(Ok(batch)) => match guarded(|| Ok((self.loss.count(&batch)?, batch.num_samples()))) {
                    Err(trouble) => window.trouble = Some(trouble.within("the loss's count")),
                    Ok((count, samples)) => {
                        window.brought.batches += 1;
                        window.brought.samples += samples;
                        window.brought.count += count;
                        window.batches.push(batch);
                    }
                },
            }
            if window.trouble.is_some() || self.hooks.trouble().is_some() {
                break;
            }
        }
        self.state.times.load += begin.elapsed();
        self.tracer.span("batches", Track::Loading, begin);
        window
    }
}
