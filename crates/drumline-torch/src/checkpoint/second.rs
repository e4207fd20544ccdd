//! The second forward of a checkpoint: collects what its operations save, and compares it with the first.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use tch::Tensor;

use super::error::{CheckpointError, Meta};
use super::keep::{Current, InCheckpoint};
use super::operation::{self, Watch};
use super::record::Record;
use crate::error::TorchError;
use crate::saved_tensors::{HooksScope, Saving, Unchanged, Unpack};

thread_local! {
    /// The number of second forwards of this thread, one inside of the other.
    static DEPTH: Cell<usize> = const { Cell::new(0) };
}

/// Whether this thread runs the second forward of a checkpoint. Code with an effect that must happen once, such as an
/// update of running statistics, leaves it out then.
pub fn is_recomputing() -> bool {
    DEPTH.get() > 0
}

/// A second forward, until this is dropped.
struct Recomputing;

impl Recomputing {
    fn begin() -> Self {
        DEPTH.set(DEPTH.get() + 1);
        Self
    }
}

impl Drop for Recomputing {
    fn drop(&mut self) {
        DEPTH.set(DEPTH.get() - 1);
    }
}

unsafe extern "C" {
    fn drumline_grad_enable(enabled: bool) -> bool;
}

/// Gradients are on, until this is dropped.
struct WithGrad(bool);

impl WithGrad {
    fn begin() -> Self {
        // SAFETY: takes and returns a bool.
        Self(unsafe { drumline_grad_enable(true) })
    }
}

impl Drop for WithGrad {
    fn drop(&mut self) {
        // SAFETY: as above.
        unsafe { drumline_grad_enable(self.0) };
    }
}

/// Follows the record of the first forward.
pub(super) struct Second {
    record: Record,
    collected: RefCell<Collected>,
}

/// What the second forward has saved.
#[derive(Default)]
pub(super) struct Collected {
    slots: Vec<Option<Unchanged>>,
    /// The number of marks so far.
    marks: usize,
    /// Whether the function of a mark runs.
    in_mark: bool,
    /// The first difference from the first forward.
    difference: Option<CheckpointError>,
}

impl Second {
    pub(super) fn new(record: Record) -> Self {
        Self { record, collected: RefCell::default() }
    }

    /// Runs the function under hooks that collect what is saved.
    pub(super) fn run<R>(self: &Rc<Self>, function: impl FnOnce() -> R) -> Result<R, TorchError> {
        let pack = |saving: Saving<'_>| Ok(self.collect(saving));
        let _recomputing = Recomputing::begin();
        let _grad = WithGrad::begin();
        let _operations = Watch::operations()?;
        let _hooks = HooksScope::enter(&pack)?;
        let _current = InCheckpoint::begin(Current::Second(Rc::clone(self)));
        Ok(function())
    }

    pub(super) fn into_parts(self) -> (Record, Collected) {
        (self.record, self.collected.into_inner())
    }

    fn collect(&self, saving: Saving<'_>) -> Unpack {
        let mut collected = self.collected.borrow_mut();
        let (index, got) = (collected.slots.len(), Meta::of(&saving.data));
        if collected.difference.is_none() {
            let operation = operation::current;
            collected.difference = match self.record.saved.get(index) {
                Some(expected) if *expected == got => None,
                Some(expected) => {
                    let expected = expected.clone();
                    let (got, expected) = (Box::new(got), Box::new(expected));
                    Some(CheckpointError::Other { operation: operation(), index, got, expected })
                }
                None => Some(CheckpointError::More { operation: operation(), count: index, got }),
            };
        }
        collected.slots.push(Some(Unchanged::new(saving.data)));
        Box::new(|| Err(CheckpointError::NoBackward.into()))
    }

    /// Does what the mark does in the second forward.
    pub(super) fn keep(
        &self,
        inputs: &[&Tensor],
        function: impl FnOnce() -> Result<Tensor, TorchError>,
    ) -> Result<Tensor, TorchError> {
        if self.collected.borrow().in_mark {
            return function();
        }
        let (mark, saved) = {
            let mut collected = self.collected.borrow_mut();
            collected.marks += 1;
            (collected.marks - 1, collected.slots.len())
        };
        let replay = self.record.marks.get(mark).and_then(Option::as_ref);
        let Some(replay) = replay.filter(|replay| replay.first == saved) else {
            self.collected.borrow_mut().in_mark = true;
            let result = function();
            self.collected.borrow_mut().in_mark = false;
            return result;
        };
        let (result, saved) = replay.run(inputs)?;
        let slots = saved.into_iter().map(|tensor| Some(Unchanged::new(tensor)));
        self.collected.borrow_mut().slots.extend(slots);
        Ok(result)
    }
}

impl Collected {
    /// The saved tensors, if they are those of the first forward. `ended` says how the function has ended.
    pub(super) fn end(
        self,
        record: &Record,
        ended: Result<(), CheckpointError>,
    ) -> Result<Vec<Option<Unchanged>>, CheckpointError> {
        if let Some(difference) = self.difference {
            return Err(difference);
        }
        ended?;
        let (saved, expected) = (self.slots.len(), record.saved.len());
        match record.saved.get(saved) {
            Some(missing) => Err(CheckpointError::Fewer { saved, expected, missing: missing.clone() }),
            None => Ok(self.slots),
        }
    }
}
