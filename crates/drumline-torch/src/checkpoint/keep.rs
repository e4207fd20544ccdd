//! Marks: results that a selective checkpoint keeps, and that no checkpoint computes again if nothing needs them.

use std::cell::RefCell;
use std::rc::Rc;

use tch::Tensor;

use super::first::First;
use super::second::Second;
use crate::error::TorchError;

/// The checkpoint whose forward runs on this thread.
#[derive(Clone)]
pub(super) enum Current {
    First(Rc<First>),
    Second(Rc<Second>),
}

thread_local! {
    static CURRENT: RefCell<Option<Current>> = const { RefCell::new(None) };
}

/// A checkpoint is the current one, until this is dropped.
pub(super) struct InCheckpoint {
    _before: NoCheckpoint,
}

impl InCheckpoint {
    pub(super) fn begin(current: Current) -> Self {
        let _before = NoCheckpoint::begin();
        CURRENT.set(Some(current));
        Self { _before }
    }
}

/// No checkpoint is the current one, until this is dropped: other hooks are.
pub(crate) struct NoCheckpoint(Option<Current>);

impl NoCheckpoint {
    pub(crate) fn begin() -> Self {
        Self(CURRENT.take())
    }
}

impl Drop for NoCheckpoint {
    fn drop(&mut self) {
        CURRENT.set(self.0.take());
    }
}

/// Runs `function`, an expensive operation on `inputs` such as a matrix product. [`selective_checkpoint`] keeps its
/// result instead of running it again.
///
/// In any checkpoint, an operation after which nothing is saved for backward is not run again: its result would not be
/// used. So mark the last product of a block, too. The second forward then continues with a result whose elements have
/// no meaning.
///
/// `function` does not draw random numbers, and its result is not modified in place. What it saves for backward should be
/// its inputs, casts of its inputs and of parameters, and its result: anything else is kept by a selective checkpoint, and
/// by other checkpoints computed again. Outside of a checkpoint this just runs the function.
///
/// ```
/// use drumline_torch::{keep, selective_checkpoint};
/// use tch::{Device, Kind, Tensor};
///
/// let weight = Tensor::ones([8, 8], (Kind::Float, Device::Cpu)).set_requires_grad(true);
/// let x = Tensor::ones([2, 8], (Kind::Float, Device::Cpu));
/// let block = {
///     let weight = weight.shallow_clone();
///     move |xs: &[Tensor]| {
///         let hidden = keep(&[&xs[0]], || Ok(xs[0].f_matmul(&weight)?))?;
///         Ok(hidden.f_gelu("none")?)
///     }
/// };
/// // Backward runs gelu again, but not the product.
/// selective_checkpoint(block, &[&x])?.sum(Kind::Float).backward();
/// assert!(weight.grad().defined());
/// # Ok::<(), drumline_torch::TorchError>(())
/// ```
///
/// [`selective_checkpoint`]: crate::selective_checkpoint
pub fn keep(
    inputs: &[&Tensor],
    function: impl FnOnce() -> Result<Tensor, TorchError>,
) -> Result<Tensor, TorchError> {
    marked(Mark::Repeatable, inputs, function)
}

/// The same for a function that draws random numbers from libtorch's generators, such as attention with dropout. Every
/// checkpoint keeps its result, and what it saves for backward, because it cannot be drawn again in a CUDA graph.
///
/// Dropout in a scope of [`Masks`](crate::Masks) draws nothing, and needs no mark.
pub fn keep_drawn(
    inputs: &[&Tensor],
    function: impl FnOnce() -> Result<Tensor, TorchError>,
) -> Result<Tensor, TorchError> {
    marked(Mark::Drawn, inputs, function)
}

/// What a mark says of its function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mark {
    /// It computes the same again.
    Repeatable,
    /// It draws random numbers.
    Drawn,
}

fn marked(
    mark: Mark,
    inputs: &[&Tensor],
    function: impl FnOnce() -> Result<Tensor, TorchError>,
) -> Result<Tensor, TorchError> {
    match CURRENT.with_borrow(Clone::clone) {
        None => function(),
        Some(Current::First(first)) => first.keep(mark, inputs, function),
        Some(Current::Second(second)) => second.keep(inputs, function),
    }
}
