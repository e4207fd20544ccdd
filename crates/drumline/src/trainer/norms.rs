//! Batch norms over all ranks, where ranks have different numbers of batches in a step: who has fewer makes the others' calls with nothing to say.

use drumline_comm::{CommError, ProcessGroup};
use drumline_parallel::{ParallelError, SyncCall, SyncGroup};

use super::error::TrainerError;
use super::meeting::Agreed;
use crate::shared_failure::{SharedFailure, Trouble};

/// What is known of the calls that the model's synchronised norms make.
#[derive(Debug)]
pub(super) struct Norms {
    /// `None` if the model has no such norms.
    group: Option<SyncGroup>,
    /// Those of one batch.
    calls: Vec<SyncCall>,
}

impl Norms {
    pub(super) fn new(group: Option<SyncGroup>) -> Self {
        Self { group, calls: Vec::new() }
    }

    /// The calls of one batch.
    pub(super) fn calls(&self) -> &[SyncCall] {
        &self.calls
    }

    /// Forward and backward of so many batches of a step are done.
    pub(super) fn learn(&mut self, done: usize) {
        if let Some(group) = self.group.as_ref().filter(|_| done == 1) {
            self.calls = group.calls();
        }
    }

    /// A rank that has had no batch yet hears from the others what calls there are. All ranks call it.
    pub(super) fn share(&mut self, group: &ProcessGroup, agreed: &Agreed) -> Result<(), TrainerError> {
        if self.group.is_none() || !agreed.is_uneven {
            return Ok(());
        }
        let all = group.all_gather_object(&self.calls)?;
        self.calls = all.into_iter().find(|calls| !calls.is_empty()).unwrap_or_default();
        match agreed.without_data {
            Some(rank) if self.calls.is_empty() => Err(SharedFailure::alike(format!(
                "rank {rank} has no batch in the first step, and cannot know which synchronised norms the others wait for; \
                 try more data, or smaller batches"
            ))
            .into()),
            _ => Ok(()),
        }
    }

    /// Takes part in so many of the others' batches.
    pub(super) fn shadow(&self, batches: usize) -> Result<(), CommError> {
        let Some(group) = &self.group else { return Ok(()) };
        (0..batches).try_for_each(|_| group.shadow(&self.calls))
    }

    /// Runs a forward and a backward that the others do not make.
    pub(super) fn alone<R>(&self, body: impl FnOnce() -> R) -> R {
        match &self.group {
            Some(group) => group.alone(body),
            None => body(),
        }
    }

    /// An error if the others may be in a norm that waits for this rank's trouble to end.
    pub(super) fn can_go_on(&self, trouble: &Trouble) -> Result<(), TrainerError> {
        match self.group {
            None => Ok(()),
            Some(_) => Err(ParallelError::Unfit(trouble.text.clone()).into()),
        }
    }
}
