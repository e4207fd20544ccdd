//! The first forward of a checkpoint: what its operations save, and the results that are marked.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use tch::Tensor;

use super::Kept;
use super::error::Meta;
use super::frame::{Again, Frame};
use super::input::Role;
use super::keep::{Current, InCheckpoint, Mark};
use super::operation;
use super::origin::Origin;
use super::record::{Blank, MarkedResult, Record, Replay, Source};
use super::surroundings::Generators;
use crate::error::TorchError;
use crate::function::FunctionError;
use crate::rng::RngState;
use crate::saved_tensors::{HooksScope, SavedTensor, Saving, Unchanged, Unpack};

/// Notes a first forward.
pub(super) struct First {
    frame: Arc<Frame>,
    kept: Kept,
    noted: RefCell<Noted>,
}

#[derive(Default)]
struct Noted {
    saved: Vec<Meta>,
    marks: Vec<Marked>,
    /// The mark whose function runs.
    open: Option<Open>,
}

/// A saved tensor of a mark.
enum InMark {
    From(Origin),
    Kept(Unchanged),
}

/// A mark whose function runs.
struct Open {
    kept: Kept,
    inputs: Vec<Tensor>,
    first: usize,
    /// `None` if one of its saved tensors can neither be made again nor is kept.
    saved: Option<Vec<InMark>>,
}

/// A mark whose function has run.
struct Marked {
    first: usize,
    saved: Option<Vec<InMark>>,
    role: Role,
    blank: Blank,
    /// The result, if it may be kept.
    result: Option<Unchanged>,
    drawn: Option<Drawn>,
}

/// The random numbers of a mark whose result must be kept.
struct Drawn {
    generators: Generators,
    before: RngState,
    /// `None` if it has drawn none.
    after: Option<RngState>,
    /// Whether an earlier operation was random.
    is_late: bool,
}

impl Drawn {
    fn begin(inputs: &[&Tensor]) -> Result<Self, TorchError> {
        let generators = Generators::of(inputs.iter().map(|input| input.device()))?;
        let is_late = operation::random().is_some();
        Ok(Self { generators, before: generators.state()?, after: None, is_late })
    }

    fn end(mut self) -> Result<Self, TorchError> {
        if !self.is_late {
            operation::forget_random();
        }
        let state = self.generators.state()?;
        self.after = (state != self.before).then_some(state);
        Ok(self)
    }
}

impl First {
    pub(super) fn new(kept: Kept) -> Rc<Self> {
        Rc::new(Self { frame: Arc::default(), kept, noted: RefCell::default() })
    }

    /// Runs the function under hooks that note what is saved.
    pub(super) fn run<R>(self: &Rc<Self>, function: impl FnOnce() -> R) -> Result<R, TorchError> {
        let pack = |saving: Saving<'_>| self.pack(saving);
        let _hooks = HooksScope::enter(&pack)?;
        let _current = InCheckpoint::begin(Current::First(Rc::clone(self)));
        Ok(function())
    }

    /// Ends the forward. From here on backward can run the function again.
    pub(super) fn end(self: Rc<Self>, again: impl FnOnce(Record) -> Again) -> Result<(), TorchError> {
        let first = Rc::into_inner(self).ok_or(TorchError::Internal { what: "a forward has not ended" })?;
        let Self { frame, noted, .. } = first;
        let Noted { saved, marks, .. } = noted.into_inner();
        let total = saved.len();
        let marks = marks.into_iter().map(|mark| mark.end(total)).collect::<Result<_, _>>()?;
        frame.complete(again(Record { saved, marks }));
        Ok(())
    }

    fn pack(&self, saving: Saving<'_>) -> Result<Unpack, FunctionError> {
        let mut noted = self.noted.borrow_mut();
        let index = noted.saved.len();
        noted.saved.push(Meta::of(&saving.data));
        if let Some(open) = &mut noted.open {
            open.note(saving)?;
        }
        let frame = Arc::clone(&self.frame);
        Ok(Box::new(move || frame.tensor(index)))
    }

    /// Runs the function of a mark.
    pub(super) fn keep(
        &self,
        mark: Mark,
        inputs: &[&Tensor],
        function: impl FnOnce() -> Result<Tensor, TorchError>,
    ) -> Result<Tensor, TorchError> {
        if self.noted.borrow().open.is_some() {
            return function();
        }
        let first = self.noted.borrow().saved.len();
        let drawn = (mark == Mark::Drawn).then(|| Drawn::begin(inputs)).transpose()?;
        let inputs = inputs.iter().map(|input| input.shallow_clone()).collect();
        let kept = if drawn.is_some() { Kept::Marked } else { self.kept };
        self.noted.borrow_mut().open = Some(Open { kept, inputs, first, saved: Some(Vec::new()) });
        let result = function();
        let drawn = drawn.map(Drawn::end).transpose()?;
        let mut noted = self.noted.borrow_mut();
        if let (Some(open), Ok(result)) = (noted.open.take(), &result) {
            noted.marks.push(Marked { drawn, ..open.end(result)? });
        }
        drop(noted);
        result
    }
}

impl Open {
    fn note(&mut self, saving: Saving<'_>) -> Result<(), TorchError> {
        let Some(saved) = &mut self.saved else { return Ok(()) };
        match Origin::of(&saving, &self.inputs)? {
            Origin::Unknown if self.kept == Kept::Marked => {
                saved.push(InMark::Kept(Unchanged::new(saving.data)))
            }
            Origin::Unknown => self.saved = None,
            origin => saved.push(InMark::From(origin)),
        }
        Ok(())
    }

    fn end(self, result: &Tensor) -> Result<Marked, TorchError> {
        let Self { first, saved, kept, .. } = self;
        let data = Role::CONSTANT.give(result)?;
        let in_result = |saved: InMark| match saved {
            InMark::Kept(tensor) => match Origin::in_result(tensor.get_unchecked(), &data) {
                Origin::Unknown => InMark::Kept(tensor),
                origin => InMark::From(origin),
            },
            from => from,
        };
        let saved = saved.map(|all| all.into_iter().map(in_result).collect());
        let (role, blank) = (Role::of(result), Blank::like(result));
        let result = (kept == Kept::Marked).then(|| Unchanged::new(data));
        Ok(Marked { first, saved, role, blank, result, drawn: None })
    }
}

impl Marked {
    /// What the second forward does, when the first has saved `total` tensors.
    fn end(self, total: usize) -> Result<Option<Replay>, TorchError> {
        let Self { first, saved, role, blank, result, drawn } = self;
        let Some(saved) = saved else { return Ok(None) };
        let needs_result = saved.iter().any(|saved| matches!(saved, InMark::From(Origin::Result { .. })));
        let is_last = first + saved.len() == total && !needs_result;
        let result = match result.map(Unchanged::into_tensor) {
            _ if is_last => MarkedResult::Blank(blank),
            Some(Ok(result)) => MarkedResult::Kept(SavedTensor::new(&result)?),
            Some(Err(cause)) if drawn.is_some() => {
                let operation = "a result with random numbers cannot be kept";
                return Err(TorchError::Custom { operation, cause: cause.into() });
            }
            _ => return Ok(None),
        };
        let sources = saved.into_iter().map(|saved| match saved {
            InMark::From(origin) => Ok(Source::From(origin)),
            InMark::Kept(tensor) => Ok(Source::Kept(SavedTensor::new(tensor.get_unchecked())?)),
        });
        let sources = sources.collect::<Result<_, TorchError>>()?;
        Ok(Some(Replay { first, sources, role, result, drawn: drawn.and_then(|drawn| drawn.after) }))
    }
}
