//! Loss scaling between a backward and a step, in fp16.
//!
//! ```text
//!   backward ─▶ scaled gradients ─ first of clip_grad_norm and step ─▶ unscaled ─ step ─▶ weights, or skipped
//! ```
//! Scaled gradients are never clipped and never used for a step: the first call that needs them unscales them. Several
//! optimizers may step after one backward, all with gradients of the same scale. The scale is updated once for all of
//! them, when it is needed next.

use std::cell::{Cell, Ref, RefCell, RefMut};
use std::rc::Rc;

use drumline_torch::{LossScaler, Named, Optimizer, StepMade, Unscaled};
use tch::Tensor;

use super::error::Result;
use super::model::Replica;
use super::shared::Shared;
use crate::comm::alike::usage_error;
use crate::run_error::UsageError;

/// The scaler of all models.
pub(super) struct Scaling {
    scaler: RefCell<LossScaler>,
    /// What optimizers have found since the last update of the scale.
    found: RefCell<Option<Unscaled>>,
}

/// The state of an optimizer's gradients.
#[derive(Default)]
pub(super) struct OwnGrads {
    /// Set once they are unscaled, with the number of backwards at that time.
    unscaled: RefCell<Option<(Unscaled, u64)>>,
    /// The number of backwards at the last step.
    stepped_at: Cell<u64>,
    pub(super) skipped: Cell<u64>,
    pub(super) was_skipped: Cell<bool>,
}

impl Scaling {
    pub(super) fn new(scaler: LossScaler) -> Self {
        Self { scaler: scaler.into(), found: RefCell::default() }
    }

    /// The scaler, with the scale of the next backward.
    pub(super) fn scaler(&self) -> Result<Ref<'_, LossScaler>> {
        self.advance()?;
        Ok(self.scaler.borrow())
    }

    /// The scaler, to load a checkpoint into.
    pub(super) fn scaler_mut(&self) -> Result<RefMut<'_, LossScaler>> {
        self.advance()?;
        Ok(self.scaler.borrow_mut())
    }

    /// Updates the scale for the next backward, to the same value on all ranks.
    pub(super) fn advance(&self) -> Result {
        if let Some(found) = self.found.take() {
            drop(found.update(&mut self.scaler.borrow_mut())?);
        }
        Ok(())
    }

    fn note_found(&self, unscaled: Unscaled) -> Result {
        let all = match self.found.take() {
            Some(others) => others.and(unscaled)?,
            None => unscaled,
        };
        self.found.replace(Some(all));
        Ok(())
    }

    /// Runs backward from the loss times the scale.
    pub(super) fn backward(
        &self,
        replica: &Replica,
        loss: &Tensor,
        backward: impl FnOnce(&Tensor) -> Result,
    ) -> Result {
        replica.note_scaled_backward();
        drop(self.scaler()?.backward_with(loss, backward)?);
        Ok(())
    }
}

/// One optimizer and the scaling that it shares with the others.
pub(super) struct Scaled<'a> {
    pub(super) scaling: &'a Scaling,
    pub(super) shared: &'a Shared,
    pub(super) own: &'a Rc<OwnGrads>,
}

impl Scaled<'_> {
    /// Unscales the gradients unless that is done, and returns whether they have overflowed on some rank. `model` is
    /// the place of the model that the optimizer trains. Every rank calls it.
    pub(super) fn unscale(&self, parameters: &[Named], model: Option<usize>) -> Result<bool> {
        let by_model = self.shared.trained_in(model, parameters);
        let backwards = by_model.iter().map(|(replica, _)| replica.scaled_backwards()).sum();
        let mut held = self.own.unscaled.borrow_mut();
        if let Some((unscaled, at)) = &*held {
            if *at != backwards {
                return Err(usage_error(&self.shared.group, UsageError::BackwardAfterClip));
            }
            return Ok(unscaled.has_overflowed()?);
        }
        if backwards > 0 && self.own.stepped_at.get() == backwards {
            return Err(usage_error(&self.shared.group, UsageError::StepWithoutBackward));
        }
        let scaler = self.scaling.scaler.borrow();
        let mut all: Option<Unscaled> = None;
        for (replica, own) in by_model {
            let unscaled = replica.engine().unscale(&scaler, own)?;
            all = Some(match all {
                Some(others) => others.and(unscaled)?,
                None => unscaled,
            });
        }
        let has_overflowed = all.as_ref().map_or(Ok(false), Unscaled::has_overflowed)?;
        *held = all.map(|unscaled| (unscaled, backwards));
        Ok(has_overflowed)
    }

    /// Steps the optimizer, unless gradients have overflowed.
    pub(super) fn step(&self, optimizer: &mut dyn Optimizer, model: Option<usize>) -> Result<StepMade> {
        self.unscale(&optimizer.parameters(), model)?;
        let Some((unscaled, at)) = self.own.unscaled.take() else { return Ok(StepMade::Skipped) };
        let made = if unscaled.has_overflowed()? {
            StepMade::Skipped
        } else {
            self.shared.step(optimizer, model)?;
            StepMade::Yes
        };
        self.scaling.note_found(unscaled)?;
        self.own.stepped_at.set(at);
        self.own.was_skipped.set(made == StepMade::Skipped);
        self.own.skipped.set(self.own.skipped.get() + u64::from(made == StepMade::Skipped));
        Ok(made)
    }
}

impl OwnGrads {
    /// The gradients were cleared.
    pub(super) fn clear(&self) {
        self.unscaled.take();
    }
}
