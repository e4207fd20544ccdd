//! A prepared optimizer steps where windows end, and its schedule with it.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use drumline_comm::{call_site, on_behalf_of};
use drumline_torch::{Named, Optimizer, StepMade};

use super::error::Result;
use super::scaling::OwnGrads;
use super::shared::Shared;
use crate::schedule::{At, Schedule};

/// An optimizer, whatever its type is, and its steps.
pub(super) struct Kept {
    pub(super) optimizer: Rc<RefCell<dyn Optimizer>>,
    pub(super) steps: Rc<Cell<u64>>,
    pub(super) grads: Rc<OwnGrads>,
}

/// An optimizer that steps when a window is complete; see [`Accelerator::prepare`](super::Accelerator::prepare).
pub struct PreparedOptimizer<O> {
    optimizer: Rc<RefCell<O>>,
    steps: Rc<Cell<u64>>,
    grads: Rc<OwnGrads>,
    shared: Rc<Shared>,
}

impl<O: Optimizer + 'static> PreparedOptimizer<O> {
    pub(super) fn new(optimizer: O, shared: &Rc<Shared>) -> Self {
        let optimizer = Rc::new(RefCell::new(optimizer));
        Self { optimizer, steps: Rc::default(), grads: Rc::default(), shared: shared.clone() }
    }

    pub(super) fn kept(&self) -> Kept {
        Kept { optimizer: self.optimizer.clone(), steps: self.steps.clone(), grads: self.grads.clone() }
    }
}

impl<O: Optimizer> PreparedOptimizer<O> {
    /// Changes the parameters in a turn that ends a window; in others it does nothing. In fp16 it does nothing either where gradients have overflowed.
    #[track_caller]
    pub fn step(&mut self) -> Result {
        on_behalf_of(call_site(), || self.step_if_last())
    }

    fn step_if_last(&mut self) -> Result {
        if !self.shared.turn().is_last {
            return Ok(());
        }
        self.shared.check_reduced()?;
        self.shared.come_to(self.steps.get() + self.skipped_steps() + 1);
        let mut optimizer = self.optimizer.borrow_mut();
        let made = match self.shared.scaled(&self.grads) {
            Some(scaled) => scaled.step(&mut *optimizer)?,
            None => optimizer.step().map(|()| StepMade::Yes)?,
        };
        self.steps.set(self.steps.get() + u64::from(made == StepMade::Yes));
        Ok(())
    }

    /// Leaves the parameters without gradients, except those of a window that is not complete: so it may stand before the forward or behind the step.
    pub fn zero_grad(&mut self) -> Result {
        if self.shared.turn().is_open() {
            return Ok(());
        }
        self.shared.note_cleared();
        self.grads.clear();
        Ok(self.optimizer.borrow_mut().zero_grad()?)
    }

    /// Whether the last step was left out, as the gradients of fp16 had overflowed. A prepared schedule then stays where it is.
    pub fn step_was_skipped(&self) -> bool {
        self.grads.was_skipped.get()
    }

    /// Steps that were left out.
    pub fn skipped_steps(&self) -> u64 {
        self.grads.skipped.get()
    }

    /// Steps done, without those that were left out.
    pub fn steps(&self) -> u64 {
        self.steps.get()
    }

    /// The learning rate.
    pub fn lr(&self) -> f64 {
        self.optimizer.borrow().lr()
    }

    /// Sets the learning rate.
    pub fn set_lr(&mut self, lr: f64) {
        self.optimizer.borrow_mut().set_lr(lr);
    }

    /// What is trained.
    pub fn parameters(&self) -> Vec<Named> {
        self.optimizer.borrow().parameters()
    }
}

impl<O> std::fmt::Debug for PreparedOptimizer<O> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PreparedOptimizer").field("steps", &self.steps).finish_non_exhaustive()
    }
}

/// A schedule that goes on when its optimizer has stepped; see [`Accelerator::prepare_schedule`](super::Accelerator::prepare_schedule).
pub struct PreparedSchedule<O, S> {
    inner: Rc<OneSchedule<O, S>>,
}

struct OneSchedule<O, S> {
    schedule: S,
    optimizer: Rc<RefCell<O>>,
    steps: Rc<Cell<u64>>,
    /// The steps that it was last asked after.
    seen: Cell<u64>,
    shared: Rc<Shared>,
}

/// A schedule, whatever its type is.
pub(super) trait Scheduled {
    /// Sets the learning rate of the next step.
    fn set(&self);
}

impl<O: Optimizer, S: Schedule> Scheduled for OneSchedule<O, S> {
    fn set(&self) {
        let epoch = self.shared.place.get().map_or(0.0, |place| place.epochs_done());
        let step = self.steps.get();
        self.seen.set(step);
        self.optimizer.borrow_mut().set_lr(self.schedule.lr(At { epoch, step }));
    }
}

impl<O: Optimizer + 'static, S: Schedule + 'static> PreparedSchedule<O, S> {
    pub(super) fn kept(&self) -> Rc<dyn Scheduled> {
        self.inner.clone()
    }
}

impl<O: Optimizer, S: Schedule> PreparedSchedule<O, S> {
    pub(super) fn new(of: &PreparedOptimizer<O>, schedule: S) -> Self {
        let (optimizer, steps, shared) = (of.optimizer.clone(), of.steps.clone(), of.shared.clone());
        let inner = Rc::new(OneSchedule { schedule, optimizer, steps, seen: Cell::new(0), shared });
        inner.set();
        Self { inner }
    }

    /// Sets the learning rate of the next step, if there was a step since it was last called: after each batch, or after each epoch.
    pub fn step(&mut self) {
        if self.inner.seen.get() != self.inner.steps.get() {
            self.inner.set();
        }
    }

    /// The learning rate.
    pub fn lr(&self) -> f64 {
        self.inner.optimizer.borrow().lr()
    }
}

impl<O, S: std::fmt::Debug> std::fmt::Debug for PreparedSchedule<O, S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PreparedSchedule").field("schedule", &self.inner.schedule).finish_non_exhaustive()
    }
}
