//! Activation checkpoints: the tensors that a function saves for backward are freed, and computed again when backward
//! needs them.
//!
//! ```text
//!   forward    inputs ─▶ function ─▶ outputs        kept: the inputs, and a number for each saved tensor
//!   backward   an operation needs its saved tensor 3 ─▶ second forward: function(inputs) ─▶ tensors 0, 1, 2, 3, …
//!              the next operation needs tensor 2 ─▶ it is there, and is freed when it has been used
//! ```
//! As PyTorch's `torch.utils.checkpoint` with `use_reentrant=False`: the first forward builds the graph, and hooks on
//! saved tensors (`saved_tensors`) replace its tensors by numbers. The second forward builds a graph that nobody uses;
//! the tensors that its operations save, in order, are those of the first.
//!
//! - `first`, `second`: what is noted in the first forward, and collected in the second
//! - `frame`, `record`: what a checkpoint keeps; `surroundings`: autocast and random numbers of the first forward
//! - `keep`, `origin`: results that are not computed again
#![allow(unsafe_code)]

mod error;
mod first;
mod frame;
mod input;
mod keep;
mod operation;
mod origin;
mod record;
mod second;
mod surroundings;
#[cfg(test)]
mod tests;

use tch::Tensor;

use crate::error::TorchError;
use crate::function::{FunctionError, forward_failed};
use first::First;
use frame::Again;
use input::Input;
use surroundings::Begun;

pub(crate) use keep::NoCheckpoint;
pub use keep::{keep, keep_drawn};
pub use second::is_recomputing;

unsafe extern "C" {
    fn drumline_grad_is_enabled() -> bool;
}

/// The results that a checkpoint keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kept {
    /// None.
    Nothing,
    /// Those that [`keep`] marks.
    Marked,
}

/// Runs `function` without keeping what it saves for backward. Backward runs it again, from the same inputs.
///
/// The second forward must do what the first has done. It sees the same inputs, autocast settings and random numbers.
/// If it saves other tensors, fails or panics, backward ends with an error that says so; a tensor that was modified in
/// place is an error as without a checkpoint. Code with a lasting effect, such as running statistics, asks
/// [`is_recomputing`].
///
/// Any number of inputs may require gradients, and checkpoints may be nested. Tensors that the function captures are
/// kept alive, but they are not inputs: pass activations as inputs. Without gradients (`tch::no_grad`) the function just
/// runs.
///
/// ```
/// use drumline_torch::checkpoint;
/// use tch::{Device, Kind, Tensor};
///
/// let weight = Tensor::ones([8, 8], (Kind::Float, Device::Cpu)).set_requires_grad(true);
/// let x = Tensor::ones([2, 8], (Kind::Float, Device::Cpu));
/// let block = {
///     let weight = weight.shallow_clone();
///     move |xs: &[Tensor]| Ok(xs[0].f_matmul(&weight)?.f_gelu("none")?)
/// };
/// let y = checkpoint(block, &[&x])?;
/// y.sum(Kind::Float).backward();
/// assert!(weight.grad().defined());
/// # Ok::<(), drumline_torch::TorchError>(())
/// ```
pub fn checkpoint<R>(
    function: impl Fn(&[Tensor]) -> Result<R, FunctionError> + Send + 'static,
    inputs: &[&Tensor],
) -> Result<R, TorchError> {
    run(Kept::Nothing, function, inputs)
}

/// A [`checkpoint`] that keeps the results that [`keep`] marks, and computes only the rest again.
pub fn selective_checkpoint<R>(
    function: impl Fn(&[Tensor]) -> Result<R, FunctionError> + Send + 'static,
    inputs: &[&Tensor],
) -> Result<R, TorchError> {
    run(Kept::Marked, function, inputs)
}

fn run<R>(
    kept: Kept,
    function: impl Fn(&[Tensor]) -> Result<R, FunctionError> + Send + 'static,
    inputs: &[&Tensor],
) -> Result<R, TorchError> {
    let tensors: Vec<Tensor> = inputs.iter().map(|input| input.shallow_clone()).collect();
    if !grad_is_enabled() {
        return function(&tensors).map_err(forward_failed);
    }
    let inputs = inputs.iter().map(|input| Input::new(input)).collect::<Result<_, _>>()?;
    let begun = Begun::now(&tensors)?;
    let first = First::new(kept);
    let made = first.run(|| function(&tensors))?;
    let surroundings = begun.end()?;
    let made = made.map_err(forward_failed)?;
    first.end(|record| {
        let function = Box::new(move |inputs: &[Tensor]| function(inputs).map(drop));
        Again { function, inputs, surroundings, record }
    })?;
    Ok(made)
}

fn grad_is_enabled() -> bool {
    // SAFETY: takes nothing, and returns a bool.
    unsafe { drumline_grad_is_enabled() }
}
