//! A prepared optimizer steps at the end of windows; its schedule moves with it.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use drumline_comm::{call_site, on_behalf_of};
use drumline_torch::{Named, Optimizer, StepMade};

use super::error::Result;
use super::scaling::OwnGrads;
use super::shared::Shared;
use crate::schedule::{At, Schedule};

/// A prepared optimizer of any type, with its counts.
pub(super) struct OptimizerHandle {
    pub(super) optimizer: Rc<RefCell<dyn Optimizer>>,
    pub(super) steps: Rc<Cell<u64>>,
    pub(super) grads: Rc<OwnGrads>,
    /// The place of the model that it trains, when that is prepared.
    pub(super) model: Rc<Cell<Option<usize>>>,
}

impl OptimizerHandle {
    /// Lets the optimizer step what this rank holds of its model, unless that was done.
    pub(super) fn adopt(&self, shared: &Shared) -> Result {
        if self.model.get().is_none() {
            self.model.set(shared.adopt(&mut *self.optimizer.borrow_mut())?);
        }
        Ok(())
    }

    /// Whether all its parameters are those of prepared models.
    pub(super) fn is_of_prepared_models(&self, shared: &Shared) -> bool {
        let (own, models) = (self.optimizer.borrow().parameters(), shared.models.borrow());
        !own.is_empty() && own.iter().all(|named| models.iter().any(|model| model.has(named)))
    }

    /// Whether it trains one of these parameters on this rank.
    pub(super) fn trains(&self, parameters: &[Named]) -> bool {
        let own = self.optimizer.borrow().parameters();
        let is_own = |named: &Named| own.iter().any(|own| own.tensor.data_ptr() == named.tensor.data_ptr());
        parameters.iter().any(is_own)
    }
}

/// An optimizer that steps at the end of a window; see [`Accelerator::prepare`](super::Accelerator::prepare).
pub struct PreparedOptimizer<O> {
    optimizer: Rc<RefCell<O>>,
    steps: Rc<Cell<u64>>,
    grads: Rc<OwnGrads>,
    model: Rc<Cell<Option<usize>>>,
    shared: Rc<Shared>,
}

impl<O: Optimizer + 'static> PreparedOptimizer<O> {
    pub(super) fn new(optimizer: O, shared: &Rc<Shared>) -> Self {
        let optimizer = Rc::new(RefCell::new(optimizer));
        let (steps, grads, model) = (Rc::default(), Rc::default(), Rc::default());
        Self { optimizer, steps, grads, model, shared: shared.clone() }
    }

    pub(super) fn handle(&self) -> OptimizerHandle {
        OptimizerHandle {
            optimizer: self.optimizer.clone(),
            steps: self.steps.clone(),
            grads: self.grads.clone(),
            model: self.model.clone(),
        }
    }
}

impl<O: Optimizer + 'static> PreparedOptimizer<O> {
    /// Updates the parameters in a turn that ends a window; in other turns it does nothing. In fp16 the step is skipped
    /// if gradients have overflowed.
    #[track_caller]
    pub fn step(&mut self) -> Result {
        on_behalf_of(call_site(), || self.step_if_last())
    }

    fn step_if_last(&mut self) -> Result {
        if !self.shared.turn().is_last {
            return Ok(());
        }
        self.shared.check_reduced()?;
        self.handle().adopt(&self.shared)?;
        self.shared.at_step(self.steps.get() + self.skipped_steps() + 1);
        let mut optimizer = self.optimizer.borrow_mut();
        let made = match self.shared.scaled(&self.grads) {
            Some(scaled) => scaled.step(&mut *optimizer, self.model.get())?,
            None => self.shared.step(&mut *optimizer, self.model.get()).map(|()| StepMade::Yes)?,
        };
        self.steps.set(self.steps.get() + u64::from(made == StepMade::Yes));
        Ok(())
    }

    /// Clears the gradients, except those of a window that is not complete. So the call may come before the forward or
    /// after the step.
    pub fn zero_grad(&mut self) -> Result {
        if self.shared.turn().is_open() {
            return Ok(());
        }
        self.shared.gradients_cleared();
        self.grads.clear();
        Ok(self.optimizer.borrow_mut().zero_grad()?)
    }

    /// Whether the last step was skipped because gradients had overflowed in fp16. A prepared schedule does not advance
    /// then.
    pub fn step_was_skipped(&self) -> bool {
        self.grads.was_skipped.get()
    }

    /// The number of skipped steps.
    pub fn skipped_steps(&self) -> u64 {
        self.grads.skipped.get()
    }

    /// The number of steps done, without the skipped ones.
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

    /// The parameters that are trained; where ranks divide them, the rows that this rank owns.
    pub fn parameters(&self) -> Vec<Named> {
        self.optimizer.borrow().parameters()
    }
}

impl<O> std::fmt::Debug for PreparedOptimizer<O> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PreparedOptimizer").field("steps", &self.steps).finish_non_exhaustive()
    }
}

/// A schedule that advances when its optimizer has stepped; see
/// [`Accelerator::prepare_schedule`](super::Accelerator::prepare_schedule).
pub struct PreparedSchedule<O, S> {
    inner: Rc<OneSchedule<O, S>>,
}

struct OneSchedule<O, S> {
    schedule: S,
    optimizer: Rc<RefCell<O>>,
    steps: Rc<Cell<u64>>,
    /// The optimizer's steps when the learning rate was last set.
    seen: Cell<u64>,
    /// The initial learning rate of the optimizer.
    base_lr: f64,
    shared: Rc<Shared>,
}

/// A prepared schedule of any type.
pub(super) trait Scheduled {
    /// Sets the learning rate of the next step.
    fn set(&self);
}

impl<O: Optimizer, S: Schedule> Scheduled for OneSchedule<O, S> {
    fn set(&self) {
        let epoch = self.shared.first_loader.get().map_or(0.0, |loader| loader.epochs_done());
        let step = self.steps.get();
        self.seen.set(step);
        let at = At { epoch, step, total_steps: None, base_lr: self.base_lr };
        let mut optimizer = self.optimizer.borrow_mut();
        optimizer.set_lr(self.schedule.lr(at));
        if let Some((beta1, beta2)) = self.schedule.betas(at)
            && let Err(error) = optimizer.set_betas(beta1, beta2)
        {
            self.shared.note(error.into());
        }
    }
}

impl<O: Optimizer + 'static, S: Schedule + 'static> PreparedSchedule<O, S> {
    pub(super) fn handle(&self) -> Rc<dyn Scheduled> {
        self.inner.clone()
    }
}

impl<O: Optimizer, S: Schedule> PreparedSchedule<O, S> {
    pub(super) fn new(of: &PreparedOptimizer<O>, schedule: S) -> Self {
        let (optimizer, steps, shared) = (of.optimizer.clone(), of.steps.clone(), of.shared.clone());
        let base_lr = optimizer.borrow().lr();
        let inner = Rc::new(OneSchedule { schedule, optimizer, steps, seen: Cell::new(0), base_lr, shared });
        inner.set();
        Self { inner }
    }

    /// Sets the learning rate of the next step if the optimizer has stepped since the last call. Call it after each
    /// batch, or after each epoch.
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
