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

use drumline_torch::{Named, TorchError};
use tch::nn::VarStore;
use tch::{Tensor, no_grad};

use super::context::Context;
use super::error::TrainerError;
use crate::checkpoint::{RunState, named, restore};
use crate::comm::shared_failure::SharedFailure;
use crate::data::loader::Cause;

/// Runs `act` while the model has the weights for evaluation. Afterwards it has the trained ones again, also after an
/// error.
pub(super) fn with_evaluation_weights<'a, T>(
    context: &mut Context<'a>,
    act: impl FnOnce(&mut Context<'a>) -> Result<T, TrainerError>,
) -> Result<T, TrainerError> {
    exchange_weights(context)?;
    let done = act(context);
    exchange_weights(context)?;
    done
}

fn exchange_weights(context: &Context<'_>) -> Result<(), TrainerError> {
    // All ranks have the same callbacks, so all get the same error.
    let on_all_ranks = |cause: Cause| SharedFailure::on_all_ranks(cause.to_string());
    let Some(weights) = context.hooks.evaluation_weights().map_err(on_all_ranks)? else { return Ok(()) };
    let parameters = context.state.parameters.iter();
    let trained: BTreeMap<_, _> = parameters.map(|named| (&named.name, &named.tensor)).collect();
    for Named { name, tensor } in weights {
        let trained = trained.get(name).ok_or_else(|| {
            SharedFailure::on_all_ranks(format!(
                "there is no parameter `{name}` that could be evaluated with other weights"
            ))
        })?;
        exchange(trained, tensor)?;
    }
    Ok(())
}

/// The trained weights, while the model has others.
pub(super) fn trained_beside(context: &Context<'_>) -> Result<Vec<Named>, Cause> {
    Ok(context.hooks.evaluation_weights()?.map_or_else(Vec::new, <[_]>::to_vec))
}

/// Loads the trained weights of a checkpoint into the model, and passes the evaluated ones to callbacks.
pub(super) fn load_weights(
    context: &mut Context<'_>,
    store: &VarStore,
    saved: &RunState,
) -> Result<(), Cause> {
    let trained: BTreeMap<_, _> = saved.trained.iter().map(|named| (&named.name, named)).collect();
    let model = saved.model.iter().map(|named| (*trained.get(&named.name).unwrap_or(&named)).clone());
    restore(&named(store), &model.collect::<Vec<_>>())?;
    if saved.trained.is_empty() { Ok(()) } else { context.hooks.load_evaluation_weights(&saved.model) }
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
