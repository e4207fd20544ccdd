//! Loss scaling between a backward and a step, in fp16.
//!
//! ```text
//!   backward ─▶ scaled gradients ─ clip_grad_norm or step, whichever comes first ─▶ unscaled ─ step ─▶ weights, or skipped
//! ```
//! Gradients that are scaled are never clipped, and never stepped by: whoever comes first unscales them. Several optimizers may step after one backward, each by
//! gradients of the same scale: it moves on when it is asked for next, once for all of them.

use std::cell::{Cell, Ref, RefCell, RefMut};
use std::collections::HashSet;
use std::rc::Rc;

use drumline_comm::ProcessGroup;
use drumline_torch::{LossScaler, Named, Optimizer, StepMade, Unscaled};
use tch::Tensor;

use super::error::Result;
use super::model::Replica;
use crate::alike::mistake;

/// The scaler of all models, and how many backwards of each it has scaled.
pub(super) struct Scaling {
    scaler: RefCell<LossScaler>,
    /// What optimizers have found since the scale moved on.
    found: RefCell<Option<Unscaled>>,
    models: RefCell<Vec<ScaledModel>>,
}

struct ScaledModel {
    replica: Rc<dyn Replica>,
    tensors: Vec<Named>,
    backwards: u64,
}

/// What an optimizer knows of its gradients.
#[derive(Default)]
pub(super) struct OwnGrads {
    /// Since they are unscaled, with the number of backwards by then.
    unscaled: RefCell<Option<(Unscaled, u64)>>,
    /// Backwards by the last step.
    stepped_at: Cell<u64>,
    pub(super) skipped: Cell<u64>,
    pub(super) was_skipped: Cell<bool>,
}

impl Scaling {
    pub(super) fn new(scaler: LossScaler) -> Self {
        Self { scaler: scaler.into(), found: RefCell::default(), models: RefCell::default() }
    }

    /// One more model.
    pub(super) fn add_model(&self, replica: Rc<dyn Replica>, tensors: Vec<Named>) {
        self.models.borrow_mut().push(ScaledModel { replica, tensors, backwards: 0 });
    }

    /// The scaler, with the scale of the next backward.
    pub(super) fn scaler(&self) -> Result<Ref<'_, LossScaler>> {
        self.move_on()?;
        Ok(self.scaler.borrow())
    }

    /// The same, to be changed by a checkpoint.
    pub(super) fn scaler_mut(&self) -> Result<RefMut<'_, LossScaler>> {
        self.move_on()?;
        Ok(self.scaler.borrow_mut())
    }

    /// The scale becomes that of the next backward, on all ranks alike.
    pub(super) fn move_on(&self) -> Result {
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

    /// Backward of a model from the loss times the scale.
    pub(super) fn backward(
        &self,
        replica: &Rc<dyn Replica>,
        loss: &Tensor,
        backward: impl FnOnce(&Tensor) -> Result,
    ) -> Result {
        self.note_backward(replica);
        drop(self.scaler()?.backward_with(loss, backward)?);
        Ok(())
    }

    /// Gradients of a scaled loss have come to a model, from this rank or from others.
    pub(super) fn note_backward(&self, replica: &Rc<dyn Replica>) {
        let mut models = self.models.borrow_mut();
        models
            .iter_mut()
            .filter(|model| Rc::ptr_eq(&model.replica, replica))
            .for_each(|model| model.backwards += 1);
    }

    /// How many backwards there were of the models that have some of these parameters.
    fn backwards_of(&self, parameters: &[Named]) -> u64 {
        let place = |named: &Named| named.tensor.data_ptr();
        let places: HashSet<_> = parameters.iter().map(place).collect();
        let models = self.models.borrow();
        let concerned =
            models.iter().filter(|model| model.tensors.iter().any(|named| places.contains(&place(named))));
        concerned.map(|model| model.backwards).sum()
    }
}

/// One optimizer, and what it shares with the others.
pub(super) struct Scaled<'a> {
    pub(super) scaling: &'a Scaling,
    pub(super) group: &'a ProcessGroup,
    pub(super) own: &'a Rc<OwnGrads>,
}

impl Scaled<'_> {
    /// Unscales, if that is not done yet, and says whether the gradients have overflowed on some rank. Every rank calls it.
    pub(super) fn unscale(&self, parameters: Vec<Named>) -> Result<bool> {
        let (scaler, backwards) = (self.scaling.scaler.borrow(), self.scaling.backwards_of(&parameters));
        let mut held = self.own.unscaled.borrow_mut();
        if let Some((unscaled, at)) = &*held {
            if *at != backwards {
                return Err(
                    self.mistake("a backward has added scaled gradients to those that were clipped already")
                );
            }
            return Ok(unscaled.has_overflowed()?);
        }
        if backwards > 0 && self.own.stepped_at.get() == backwards {
            return Err(self.mistake("there was no backward since the optimizer's last step"));
        }
        let mut unscaled = scaler.received().unscale(&scaler, parameters)?;
        unscaled.agree(self.group)?;
        let has_overflowed = unscaled.has_overflowed()?;
        *held = Some((unscaled, backwards));
        Ok(has_overflowed)
    }

    /// A step, unless gradients have overflowed.
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

    fn mistake(&self, what: &str) -> super::AcceleratorError {
        mistake(
            self.group,
            &format!("{what}; try backward, clip_grad_norm, step and zero_grad in this order"),
        )
    }
}

impl OwnGrads {
    /// The gradients are gone.
    pub(super) fn clear(&self) {
        self.unscaled.take();
    }
}
