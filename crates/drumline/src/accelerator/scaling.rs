//! Loss scaling between a backward and a step, in fp16.
//!
//! ```text
//!   backward ─▶ scaled gradients ─ first of clip_grad_norm and step ─▶ unscaled ─ step ─▶ weights, or skipped
//! ```
//! Scaled gradients are never clipped and never used for a step: the first call that needs them unscales them. Several
//! optimizers may step after one backward, all with gradients of the same scale. The scale is updated once for all of
//! them, when it is needed next.

use std::cell::{Cell, Ref, RefCell, RefMut};
use std::collections::HashSet;
use std::rc::Rc;

use drumline_comm::ProcessGroup;
use drumline_torch::{LossScaler, Named, Optimizer, StepMade, Unscaled};
use tch::Tensor;

use super::error::Result;
use super::model::Replica;
use crate::comm::alike::usage_error;
use crate::run_error::UsageError;

/// The scaler of all models, and the number of scaled backwards of each.
pub(super) struct Scaling {
    scaler: RefCell<LossScaler>,
    /// What optimizers have found since the last update of the scale.
    found: RefCell<Option<Unscaled>>,
    models: RefCell<Vec<ScaledModel>>,
}

struct ScaledModel {
    replica: Rc<Replica>,
    tensors: Vec<Named>,
    backwards: u64,
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
        Self { scaler: scaler.into(), found: RefCell::default(), models: RefCell::default() }
    }

    /// Adds a model.
    pub(super) fn add_model(&self, replica: Rc<Replica>, tensors: Vec<Named>) {
        self.models.borrow_mut().push(ScaledModel { replica, tensors, backwards: 0 });
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
        replica: &Rc<Replica>,
        loss: &Tensor,
        backward: impl FnOnce(&Tensor) -> Result,
    ) -> Result {
        self.note_backward(replica);
        drop(self.scaler()?.backward_with(loss, backward)?);
        Ok(())
    }

    /// Counts a backward of a scaled loss, on this rank or on others.
    pub(super) fn note_backward(&self, replica: &Rc<Replica>) {
        let mut models = self.models.borrow_mut();
        models
            .iter_mut()
            .filter(|model| Rc::ptr_eq(&model.replica, replica))
            .for_each(|model| model.backwards += 1);
    }

    /// The number of backwards of the models that have some of these parameters.
    fn backwards_of(&self, parameters: &[Named]) -> u64 {
        let place = |named: &Named| named.tensor.data_ptr();
        let places: HashSet<_> = parameters.iter().map(place).collect();
        let models = self.models.borrow();
        let concerned =
            models.iter().filter(|model| model.tensors.iter().any(|named| places.contains(&place(named))));
        concerned.map(|model| model.backwards).sum()
    }
}

/// One optimizer and the scaling that it shares with the others.
pub(super) struct Scaled<'a> {
    pub(super) scaling: &'a Scaling,
    pub(super) group: &'a ProcessGroup,
    pub(super) own: &'a Rc<OwnGrads>,
}

impl Scaled<'_> {
    /// Unscales the gradients unless that is done, and returns whether they have overflowed on some rank. Every rank
    /// calls it.
    pub(super) fn unscale(&self, parameters: Vec<Named>) -> Result<bool> {
        let (scaler, backwards) = (self.scaling.scaler.borrow(), self.scaling.backwards_of(&parameters));
        let mut held = self.own.unscaled.borrow_mut();
        if let Some((unscaled, at)) = &*held {
            if *at != backwards {
                return Err(usage_error(self.group, UsageError::BackwardAfterClip));
            }
            return Ok(unscaled.has_overflowed()?);
        }
        if backwards > 0 && self.own.stepped_at.get() == backwards {
            return Err(usage_error(self.group, UsageError::StepWithoutBackward));
        }
        let mut unscaled = scaler.received().unscale(&scaler, parameters)?;
        unscaled.agree(self.group)?;
        let has_overflowed = unscaled.has_overflowed()?;
        *held = Some((unscaled, backwards));
        Ok(has_overflowed)
    }

    /// Steps the optimizer, unless gradients have overflowed.
    pub(super) fn step(&self, optimizer: &mut dyn Optimizer) -> Result<StepMade> {
        self.unscale(optimizer.parameters())?;
        let Some((unscaled, at)) = self.own.unscaled.take() else { return Ok(StepMade::Skipped) };
        let made = unscaled.step_alone(optimizer)?;
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
