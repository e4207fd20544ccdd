//! What all prepared things know of each other: the turn that is on, and whether gradients are reduced in it.

use std::cell::{Cell, OnceCell, RefCell};
use std::rc::Rc;

use drumline_comm::ProcessGroup;
use drumline_torch::{Autocast, LossScaler, nccl};
use tch::{Device, Tensor};

use super::error::{AcceleratorError, Result};
use super::model::Replica;
use super::save::Place;
use super::scaling::{OwnGrads, Scaled, Scaling};
use super::window::{Turn, Window};
use crate::alike::mistake;
use crate::rehearsal::Rehearsal;
use crate::trainer::Precision;

pub(super) struct Shared {
    pub(super) group: ProcessGroup,
    pub(super) device: Device,
    precision: Precision,
    /// In fp16.
    pub(super) scaling: Option<Scaling>,
    /// Turns of a window.
    pub(super) window: usize,
    /// Where the first loader that was prepared is.
    pub(super) place: OnceCell<Rc<Place>>,
    /// The loops that are going on, the innermost last: an evaluation may come between two turns of a training.
    turns: RefCell<Vec<(u64, Rc<Turn>)>>,
    loops: Cell<u64>,
    /// Calls of `accumulate` outside prepared loops, in their window.
    scopes: RefCell<(usize, Rc<Window>)>,
    is_syncing: Cell<bool>,
    /// Gradients were added up and not reduced since.
    is_unreduced: Cell<bool>,
    /// Models that have trained, and whose buffers are not yet the same on all ranks.
    stale: RefCell<Vec<Rc<dyn Replica>>>,
    rehearsal: RefCell<Rehearsal>,
    /// What a forward could not return; backward does.
    trouble: RefCell<Option<AcceleratorError>>,
}

impl Shared {
    pub(super) fn new(
        group: ProcessGroup,
        device: Device,
        (precision, scaler): (Precision, Option<LossScaler>),
        window: usize,
    ) -> Result<Self> {
        Ok(Self {
            rehearsal: Rehearsal::from_env(&group)?.into(),
            group,
            device,
            precision,
            scaling: scaler.map(Scaling::new),
            window,
            place: OnceCell::new(),
            turns: RefCell::default(),
            loops: Cell::new(0),
            scopes: RefCell::default(),
            is_syncing: Cell::new(true),
            is_unreduced: Cell::new(false),
            stale: RefCell::default(),
            trouble: RefCell::default(),
        })
    }

    /// An optimizer comes to its step number `step`: faults on purpose happen here.
    pub(super) fn come_to(&self, step: u64) {
        self.rehearsal.borrow_mut().at(step, &self.group);
    }

    /// The turn that is on.
    pub(super) fn turn(&self) -> Rc<Turn> {
        self.turns.borrow().last().map_or_else(|| Rc::new(Turn::alone()), |(_, turn)| turn.clone())
    }

    /// A turn of `accumulate`: that of the loop which is on, or else one that counts the calls.
    pub(super) fn scope(self: &Rc<Self>) -> Option<Entry> {
        if !self.turns.borrow().is_empty() {
            return None;
        }
        let mut scopes = self.scopes.borrow_mut();
        if scopes.0 == 0 {
            scopes.1 = Rc::default();
        }
        scopes.0 = (scopes.0 + 1) % self.window;
        let mut entry = Entry::new(self);
        entry.begin(Turn {
            window: scopes.1.clone(),
            factor: Some(1.0 / self.window as f64),
            is_last: scopes.0 == 0,
            ..Turn::alone()
        });
        Some(entry)
    }

    /// Nothing is reduced until this is dropped.
    pub(super) fn without_sync(&self) -> WithoutSync<'_> {
        WithoutSync { shared: self, before: self.is_syncing.replace(false) }
    }

    /// Whether a backward reduces now.
    pub(super) fn reduces(&self, turn: &Turn) -> bool {
        turn.is_last && self.is_syncing.get()
    }

    /// A model begins a turn of training; every rank does so in every turn.
    pub(super) fn begin(&self, replica: &Rc<dyn Replica>, turn: &Rc<Turn>) -> Result {
        replica.begin(turn)?;
        let mut stale = self.stale.borrow_mut();
        if turn.window.buffers_of.is_some() && !stale.iter().any(|known| Rc::ptr_eq(known, replica)) {
            stale.push(replica.clone());
        }
        Ok(())
    }

    /// Gives all ranks the same buffers, those of a rank that has trained to the end; where loops begin and end, so that evaluations are exact.
    pub(super) fn settle(&self) -> Result {
        nccl::settle(self.device)?;
        for replica in self.stale.take() {
            replica.sync_buffers()?;
        }
        Ok(())
    }

    pub(super) fn backward(&self, replica: &Rc<dyn Replica>, loss: &Tensor) -> Result {
        let turn = self.turn();
        let Some(factor) = turn.factor else { return self.backward_nothing(replica) };
        self.check()?;
        if !loss.requires_grad() {
            return Err(mistake(
                &self.group,
                "the loss does not depend on anything that is trained; try model.forward_t(&x, true), and no no_grad around it",
            ));
        }
        self.begin(replica, &turn)?;
        let loss = if factor == 1.0 { loss.shallow_clone() } else { loss * factor };
        let reduces = self.reduces(&turn);
        let backward = |loss: &Tensor| -> Result {
            match reduces {
                true => replica.backward(loss)?,
                false => replica.backward_unreduced(loss)?,
            }
            Ok(())
        };
        match &self.scaling {
            None => backward(&loss)?,
            Some(scaling) => scaling.backward(replica, &loss, backward)?,
        }
        self.is_unreduced.set(!reduces);
        turn.note_backward();
        Ok(())
    }

    pub(super) fn backward_nothing(&self, replica: &Rc<dyn Replica>) -> Result {
        let turn = self.turn();
        self.check()?;
        self.begin(replica, &turn)?;
        self.scaling.iter().try_for_each(Scaling::move_on)?;
        match self.reduces(&turn) {
            true => {
                replica.backward_nothing(&turn)?;
                self.scaling.iter().for_each(|scaling| scaling.note_backward(replica));
                self.is_unreduced.set(false);
            }
            false => replica.backward_nothing_unreduced(&turn)?,
        }
        turn.note_backward();
        Ok(())
    }

    /// An error if a forward had one, or if gradients are of this rank alone: ranks would grow apart without a word.
    pub(super) fn check_reduced(&self) -> Result {
        self.check()?;
        nccl::check()?;
        match self.is_unreduced.get() {
            false => Ok(()),
            true => Err(mistake(
                &self.group,
                "the optimizer would step with gradients that were not reduced over ranks, as the last backward was inside no_sync; \
                 try a backward outside before the step",
            )),
        }
    }

    /// How an optimizer steps in fp16.
    pub(super) fn scaled<'a>(&'a self, own: &'a Rc<OwnGrads>) -> Option<Scaled<'a>> {
        let (scaling, group) = (self.scaling.as_ref()?, &self.group);
        Some(Scaled { scaling, group, own })
    }

    /// The gradients are gone.
    pub(super) fn note_cleared(&self) {
        self.is_unreduced.set(false);
    }

    fn check(&self) -> Result {
        self.trouble.take().map_or(Ok(()), Err)
    }

    /// Keeps an error that a forward cannot return.
    pub(super) fn note(&self, error: AcceleratorError) {
        self.trouble.borrow_mut().get_or_insert(error);
    }

    /// In fewer bits, if that is wanted, until this is dropped.
    pub(super) fn autocast(&self) -> Result<Option<Autocast>> {
        let kind = self.precision.autocast();
        Ok(kind.map(|kind| Autocast::new(self.device, kind)).transpose()?)
    }
}

/// A loop's place among those that are going on; it leaves when this is dropped.
pub(super) struct Entry {
    shared: Rc<Shared>,
    name: u64,
}

impl Entry {
    pub(super) fn new(shared: &Rc<Shared>) -> Self {
        let name = shared.loops.get();
        shared.loops.set(name + 1);
        Self { shared: shared.clone(), name }
    }

    /// The loop comes to its next turn.
    pub(super) fn begin(&mut self, turn: Turn) {
        let (mut turns, turn) = (self.shared.turns.borrow_mut(), Rc::new(turn));
        match turns.iter_mut().find(|(name, _)| *name == self.name) {
            Some((_, place)) => *place = turn,
            None => turns.push((self.name, turn)),
        }
    }

    pub(super) fn end(&mut self) {
        self.shared.turns.borrow_mut().retain(|(name, _)| *name != self.name);
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.end();
    }
}

/// Puts reduction back to what it was.
pub(super) struct WithoutSync<'a> {
    shared: &'a Shared,
    before: bool,
}

impl Drop for WithoutSync<'_> {
    fn drop(&mut self) {
        self.shared.is_syncing.set(self.before);
    }
}
