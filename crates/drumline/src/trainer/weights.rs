//! Weights that are evaluated and saved instead of the trained ones, if a callback has any.
//!
//! ```text
//!   training      model: trained     callback: averaged
//!   exchange          ╳
//!   evaluation    model: averaged    callback: trained       checkpoints: averaged as the model, trained beside it
//!   exchange          ╳
//!   training      model: trained     callback: averaged
//! ```

use std::collections::BTreeMap;

use drumline_parallel::Engine;
use drumline_torch::{Named, TorchError};
use tch::{Tensor, no_grad};

use super::context::Context;
use super::error::TrainerError;
use crate::checkpoint::{RunState, held_by, restore};
use crate::comm::shared_failure::{LocalFailure, SharedFailure, agree};
use crate::data::loader::Cause;

/// Runs `act` while the model has the weights for evaluation. Afterwards it has the trained ones again, also after an
/// error.
pub(super) fn with_evaluation_weights<'a, T>(
    context: &mut Context<'a>,
    engine: &dyn Engine,
    act: impl FnOnce(&mut Context<'a>) -> Result<T, TrainerError>,
) -> Result<T, TrainerError> {
    exchange_weights(context, engine)?;
    let done = act(context);
    let exchanged = exchange_weights(context, engine);
    done.and_then(|done| exchanged.map(|()| done))
}

fn exchange_weights(context: &Context<'_>, engine: &dyn Engine) -> Result<(), TrainerError> {
    // All ranks have the same callbacks, so all get the same error.
    let on_all_ranks = |cause: Cause| SharedFailure::on_all_ranks(cause.to_string());
    let Some(weights) = context.hooks.evaluation_weights().map_err(on_all_ranks)? else { return Ok(()) };
    // A rank may hold nothing of a parameter, and not find what others do.
    let pairs = agree::<_, TrainerError>(&context.state.group, pairs(&context.state.parameters, weights))?;
    let mut exchanged = Ok(());
    engine.change_parameters(&mut || {
        exchanged = pairs.iter().try_for_each(|(trained, other)| exchange(trained, other));
    })?;
    Ok(exchanged?)
}

/// Each parameter with the tensor whose values it gets.
fn pairs<'a>(
    trained: &'a [Named],
    weights: &'a [Named],
) -> Result<Vec<(&'a Tensor, &'a Tensor)>, LocalFailure> {
    let trained: BTreeMap<_, _> = trained.iter().map(|named| (&named.name, &named.tensor)).collect();
    let pair = |Named { name, tensor }: &'a Named| match trained.get(name) {
        Some(trained) => Ok((*trained, tensor)),
        None => Err(format!("there is no parameter `{name}` that could be evaluated with other weights")),
    };
    Ok(weights.iter().map(pair).collect::<Result<_, _>>()?)
}

/// The trained weights, while the model has others.
pub(super) fn trained_beside(context: &Context<'_>) -> Result<Vec<Named>, Cause> {
    Ok(context.hooks.evaluation_weights()?.map_or_else(Vec::new, <[_]>::to_vec))
}

/// The trained weights of a checkpoint, and the other tensors of its model.
pub(super) fn trained_of(saved: &RunState) -> Vec<Named> {
    let trained: BTreeMap<_, _> = saved.trained.iter().map(|named| (&named.name, named)).collect();
    let model = saved.model.iter().map(|named| (*trained.get(&named.name).unwrap_or(&named)).clone());
    model.collect()
}

/// Copies values into the tensors that this rank holds. All ranks call it.
pub(super) fn restore_held(engine: &dyn Engine, from: &[Named]) -> Result<(), TrainerError> {
    let mut restored = Ok(());
    engine.change_parameters(&mut || restored = restore(&held_by(engine), from))?;
    agree(engine.mesh().whole(), restored.map_err(LocalFailure::from))
}

/// Swaps the values of two tensors. The tensors keep their memory.
fn exchange(one: &Tensor, other: &Tensor) -> Result<(), TorchError> {
    no_grad(|| {
        let saved = one.detach().copy();
        one.shallow_clone().f_copy_(other)?;
        other.shallow_clone().f_copy_(&saved)?;
        Ok(())
    })
}
