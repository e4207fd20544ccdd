//! Dropout by position in a loop of a program: any number of ranks draws the same masks, and a checkpoint draws them again.
//!
//! ```text
//!   window = step      turn 0: samples 0, 2 of rank 0 and 1, 3 of rank 1      turn 1: samples 4, 6 and 5, 7
//!   mask               of the seed, the step, the sample, the forward in its turn, and the dropout in its forward
//! ```
//! Only with a seed ([`AcceleratorBuilder::seed`](super::AcceleratorBuilder::seed)), so that a training that resumes draws
//! the masks of one that never stopped. Without one, and outside of loops and windows, dropout draws from libtorch's
//! generators, whose state is saved.

use std::cell::Cell;

use drumline_comm::Mesh;
use drumline_torch::{MaskScope, Masks, StepSamples, TorchError, mask_layer};
use tch::Device;

use super::window::Turn;

/// The masks of a training.
pub(super) struct TurnMasks {
    masks: Masks,
    /// The steps that optimizers have begun.
    steps: Cell<u64>,
}

/// Dropout draws the masks of a forward until this is dropped.
#[must_use = "dropout draws as before when this is dropped"]
pub(super) struct InForward {
    /// Ends before the scope around it.
    _forward: MaskScope,
    _samples: MaskScope,
}

impl TurnMasks {
    pub(super) fn new(seed: u64, device: Device) -> Result<Self, TorchError> {
        Ok(Self { masks: Masks::new(seed, device)?, steps: Cell::new(0) })
    }

    /// The masks, at the step that begins.
    pub(super) fn of_next_step(&self) -> Result<&Masks, TorchError> {
        self.masks.set_step(self.steps.get() + 1)?;
        Ok(&self.masks)
    }

    /// An optimizer begins this step, or has made it before a training was resumed.
    pub(super) fn note_step(&self, step: u64) {
        self.steps.set(self.steps.get().max(step));
    }

    /// The training continues after this step of a saved one.
    pub(super) fn resume_at(&self, step: u64) {
        self.steps.set(step);
    }

    /// Enters a forward of this turn, of a batch with so many samples. `None` if they are not known.
    pub(super) fn enter(
        &self,
        mesh: &Mesh,
        turn: &Turn,
        count: Option<usize>,
    ) -> Result<Option<InForward>, TorchError> {
        let own = turn.samples.get(mesh.whole().rank()).copied();
        let Some(count) = own.or(count).filter(|_| turn.factor.is_some()) else { return Ok(None) };
        // Outside of prepared loops the turns of a window have batches of one size.
        let seen = if own.is_some() { turn.seen } else { turn.window.backwards.get() * count };
        let step = turn.window.masks_of.get().unwrap_or_else(|| self.steps.get() + 1);
        if turn.window.masks_of.replace(Some(step)).is_none() {
            self.masks.set_step(step)?;
        }
        let ranks = mesh.samples();
        let (rank, stride) = (ranks.rank() as u64, ranks.size() as u64);
        let first = rank + stride * seen as u64;
        let samples = self.masks.enter(StepSamples { first, stride, count: count as u64 });
        let forward = mask_layer("forward", turn.forwards.replace(turn.forwards.get() + 1));
        Ok(Some(InForward { _forward: forward, _samples: samples }))
    }
}
