//! The calls of synchronised norms in a step in which ranks have different numbers of batches: a rank without a batch
//! makes the calls of the other ranks with zeros.
//!
//! ```text
//!   rank 0   micro-batch 0: statistics gradients │ micro-batch 1: statistics gradients
//!   rank 1   micro-batch 0: statistics gradients │ micro-batch 1: no batch, the same two calls with a count of 0 and zeros
//! ```
//! A rank knows these calls from its own last micro-batch. A rank that has not had one yet gets them from the other
//! ranks when a step begins.

use std::cell::{Cell, RefCell};

use drumline_comm::{CommError, ProcessGroup};

use crate::agreement::Agreed;
use crate::error::ParallelError;
use crate::sync_group::{SyncCall, SyncGroup};

/// The calls that a model's synchronised norms make, as far as they are known.
#[derive(Debug)]
pub(super) struct NormCalls {
    /// `None` if the model has no such norms.
    group: Option<SyncGroup>,
    /// The calls of one micro-batch, after the first one.
    known: RefCell<Option<Vec<SyncCall>>>,
    /// Calls of this step before this micro-batch.
    before: Cell<usize>,
    stage: Cell<Stage>,
}

/// The progress of a micro-batch on this rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// No micro-batch has begun.
    Outside,
    Begun,
    /// It has a batch, whose forward has run.
    Forwarded,
    /// It has no batch, and the calls of the other ranks have been made.
    Joined,
}

impl NormCalls {
    pub(super) fn new(group: Option<SyncGroup>) -> Self {
        Self { group, known: RefCell::default(), before: Cell::new(0), stage: Cell::new(Stage::Outside) }
    }

    /// The group of the norms begins to note the calls of a step.
    pub(super) fn restart(&self) {
        self.before.set(0);
    }

    /// Begins a step. If some rank has no batch in it, all ranks get the calls from those that know them. Every rank
    /// calls it.
    pub(super) fn begin_step(&self, group: &ProcessGroup, agreed: &Agreed) -> Result<(), ParallelError> {
        self.learn();
        if self.group.is_none() || !agreed.is_uneven() {
            return Ok(());
        }
        let all = group.all_gather_object(&*self.known.borrow())?;
        self.known.replace(all.into_iter().flatten().next());
        match agreed.without_data() {
            Some(rank) if self.known.borrow().is_none() => Err(ParallelError::NoFirstBatch { rank }),
            _ => Ok(()),
        }
    }

    /// Begins a micro-batch of the step.
    pub(super) fn begin_micro_batch(&self) {
        self.learn();
        self.stage.set(Stage::Begun);
    }

    /// The forward of this rank's batch runs, together with those of the other ranks.
    pub(super) fn note_forward(&self) {
        if self.group.as_ref().is_some_and(|group| !group.is_alone()) {
            self.stage.set(Stage::Forwarded);
        }
    }

    /// A micro-batch has ended. If this rank had a batch in it, its calls are those of the next micro-batch as well.
    fn learn(&self) {
        let Some(group) = &self.group else { return };
        if self.stage.replace(Stage::Outside) == Stage::Forwarded {
            let mut calls = group.calls();
            let before = self.before.replace(calls.len()).min(calls.len());
            self.known.replace(Some(calls.split_off(before)));
        }
    }

    /// The calls of the other ranks in this micro-batch, once; `None` if they are not known.
    pub(super) fn take(&self) -> Option<Vec<SyncCall>> {
        if self.group.is_none() || self.stage.get() == Stage::Joined {
            return Some(Vec::new());
        }
        if self.stage.get() != Stage::Outside {
            self.stage.set(Stage::Joined);
        }
        self.known.borrow().clone()
    }

    /// Makes these calls with zeros.
    pub(super) fn shadow(&self, calls: &[SyncCall]) -> Result<(), CommError> {
        self.group.as_ref().map_or(Ok(()), |group| group.shadow(calls))
    }
}
