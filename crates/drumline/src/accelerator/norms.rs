//! Batch norms over all ranks in turns in which not every rank has a batch: who has none makes the others' calls with nothing to say.
//!
//! ```text
//!   rank 0   turn 0: statistics gradients │ turn 1: statistics gradients
//!   rank 1   turn 0: statistics gradients │ turn 1: no batch, the same two with a count of 0 and with zeros
//! ```

use std::cell::{Cell, RefCell};

use drumline_comm::{CommError, ProcessGroup};
use drumline_parallel::{SyncCall, SyncGroup};

use super::error::Result;
use super::window::Turn;
use crate::shared_failure::SharedFailure;

/// What is known of the calls that a model's synchronised norms make.
#[derive(Debug)]
pub(super) struct Norms {
    /// `None` if the model has no such norms.
    group: Option<SyncGroup>,
    /// Those of one turn, since there was one.
    calls: RefCell<Option<Vec<SyncCall>>>,
    /// Calls of this window before this turn.
    before: Cell<usize>,
}

impl Norms {
    pub(super) fn new(group: Option<SyncGroup>) -> Self {
        Self { group, calls: RefCell::default(), before: Cell::new(0) }
    }

    /// A turn has ended in which this rank had a batch: another one will make the same calls.
    pub(super) fn learn(&self) {
        let Some(group) = &self.group else { return };
        let mut calls = group.calls();
        let before = self.before.replace(calls.len()).min(calls.len());
        self.calls.replace(Some(calls.split_off(before)));
    }

    /// A window begins. Where some rank has no batch in it, all hear of the calls from those that know them; every rank calls it.
    pub(super) fn begin_window(&self, group: &ProcessGroup, turn: &Turn) -> Result {
        self.before.set(0);
        if self.group.is_none() || !turn.window.is_uneven {
            return Ok(());
        }
        let all = group.all_gather_object(&*self.calls.borrow())?;
        self.calls.replace(all.into_iter().flatten().next());
        match turn.samples.iter().position(|samples| *samples == 0) {
            Some(rank) if self.calls.borrow().is_none() => Err(SharedFailure::alike(format!(
                "rank {rank} has no batch in the first turn, and cannot know which synchronised norms the others wait for; \
                 try more data, or smaller batches"
            ))
            .into()),
            _ => Ok(()),
        }
    }

    /// The calls that the others make in a turn; `None` where that is not known. They have been made after a first backward.
    pub(super) fn calls_of(&self, turn: &Turn) -> Option<Vec<SyncCall>> {
        match self.group.is_none() || turn.backwards.get() > 0 {
            true => Some(Vec::new()),
            false => self.calls.borrow().clone(),
        }
    }

    /// Makes these calls with nothing to say.
    pub(super) fn shadow(&self, calls: &[SyncCall]) -> std::result::Result<(), CommError> {
        self.group.as_ref().map_or(Ok(()), |group| group.shadow(calls))
    }

    /// A forward that the other ranks do not make.
    pub(super) fn alone<R>(&self, body: impl FnOnce() -> R) -> R {
        match &self.group {
            Some(group) => group.alone(body),
            None => body(),
        }
    }
}
