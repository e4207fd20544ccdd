//! What a checkpoint keeps between forward and backward, and the tensors of its second forward until they are used.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tch::Tensor;

use super::error::CheckpointError;
use super::input::Input;
use super::record::Record;
use super::second::Second;
use super::surroundings::Surroundings;
use crate::function::FunctionError;
use crate::saved_tensors::Unchanged;
use crate::status::panicked;

/// What runs twice.
type Function = Box<dyn Fn(&[Tensor]) -> Result<(), FunctionError> + Send>;

/// The function, ready to run again.
pub(super) struct Again {
    pub(super) function: Function,
    pub(super) inputs: Vec<Input>,
    pub(super) surroundings: Surroundings,
    pub(super) record: Record,
}

/// A checkpoint. Each of its saved tensors in the graph refers to it.
#[derive(Default)]
pub(super) struct Frame {
    /// `None` during the first forward. Locked during the second: threads of backward make one together.
    again: Mutex<Option<Again>>,
    /// The tensors of the second forward that are not used yet.
    slots: Mutex<Vec<Option<Unchanged>>>,
}

impl Frame {
    pub(super) fn complete(&self, again: Again) {
        *lock(&self.again) = Some(again);
    }

    /// Takes a saved tensor, for which the function runs again if need be.
    pub(super) fn tensor(&self, index: usize) -> Result<Tensor, FunctionError> {
        if let Some(tensor) = self.take(index)? {
            return Ok(tensor);
        }
        let mut again = lock(&self.again);
        // Another thread may have made it while this one waited.
        if let Some(tensor) = self.take(index)? {
            return Ok(tensor);
        }
        let slots = again.as_mut().ok_or(CheckpointError::NotEnded)?.run()?;
        *lock(&self.slots) = slots;
        Ok(self.take(index)?.ok_or(CheckpointError::Missing { index })?)
    }

    fn take(&self, index: usize) -> Result<Option<Tensor>, FunctionError> {
        let slot = lock(&self.slots).get_mut(index).and_then(Option::take);
        Ok(slot.map(Unchanged::into_tensor).transpose()?)
    }
}

impl Again {
    /// Runs the second forward. Returns the tensors that it saves.
    fn run(&mut self) -> Result<Vec<Option<Unchanged>>, FunctionError> {
        let inputs = self.inputs.iter().map(Input::again).collect::<Result<Vec<_>, _>>()?;
        let second = Rc::new(Second::new(std::mem::take(&mut self.record)));
        let function = || -> Result<(), FunctionError> {
            second.run(|| self.surroundings.within(|| (self.function)(&inputs)))??
        };
        let ended = catch_unwind(AssertUnwindSafe(function));
        let ended = ended.unwrap_or_else(|panic| Err(panicked(&*panic).into()));
        let (record, collected) = Rc::into_inner(second).ok_or(CheckpointError::NotEnded)?.into_parts();
        let ended = ended.map_err(|error| CheckpointError::Failed(error.to_string()));
        // If it saved other tensors, that is why it failed.
        let slots = collected.end(&record, ended);
        self.record = record;
        Ok(slots?)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
