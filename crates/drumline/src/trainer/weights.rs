//! Weights that are evaluated and saved in place of the trained ones, where a callback keeps such.
//!
//! ```text
//!   training      model: trained     callback: averaged
//!   exchange          ╳
//!   evaluation    model: averaged    callback: trained       checkpoints are saved so: the averaged as the model, the trained beside
//!   exchange          ╳
//!   training      model: trained     callback: averaged
//! ```

use std::collections::BTreeMap;

use drumline_torch::{Named, TorchError};
use tch::{Tensor, no_grad};

use super::batch::Batch;
use super::error::TrainerError;
use super::model::Model;
use super::run::Run;
use crate::checkpoint::{TrainState, named, restore};
use crate::loader::Cause;
use crate::shared_failure::SharedFailure;

impl<M: Model<B> + ?Sized, B: Batch> Run<'_, M, B> {
    /// Does something while the weights to be evaluated are the model's. Afterwards the trained ones are, whatever came of it.
    pub(super) fn with_evaluation_weights<T>(
        &mut self,
        act: impl FnOnce(&mut Self) -> Result<T, TrainerError>,
    ) -> Result<T, TrainerError> {
        self.exchange_weights()?;
        let done = act(self);
        self.exchange_weights()?;
        done
    }

    fn exchange_weights(&self) -> Result<(), TrainerError> {
        // All ranks have the same callbacks, so that all find the same wrong.
        let alike = |cause: Cause| SharedFailure::alike(cause.to_string());
        let Some(weights) = self.hooks.evaluation_weights().map_err(alike)? else { return Ok(()) };
        let trained: BTreeMap<_, _> =
            self.state.parameters.iter().map(|named| (&named.name, &named.tensor)).collect();
        for Named { name, tensor } in weights {
            let trained = trained.get(name).ok_or_else(|| {
                SharedFailure::alike(format!(
                    "there is no parameter `{name}` that could be evaluated with other weights"
                ))
            })?;
            exchange(trained, tensor)?;
        }
        Ok(())
    }

    /// The trained weights, while others are the model's.
    pub(super) fn trained_beside(&self) -> Result<Vec<Named>, Cause> {
        Ok(self.hooks.evaluation_weights()?.map_or_else(Vec::new, <[_]>::to_vec))
    }

    /// The trained weights become the model's, and callbacks are told of those that were evaluated.
    pub(super) fn load_weights(&mut self, saved: &TrainState) -> Result<(), Cause> {
        let trained: BTreeMap<_, _> = saved.trained.iter().map(|named| (&named.name, named)).collect();
        let model = saved.model.iter().map(|named| (*trained.get(&named.name).unwrap_or(&named)).clone());
        restore(&named(self.store), &model.collect::<Vec<_>>())?;
        if saved.trained.is_empty() { Ok(()) } else { self.hooks.load_evaluation_weights(&saved.model) }
    }
}

/// Values change places; each tensor stays where it is.
fn exchange(one: &Tensor, other: &Tensor) -> Result<(), TorchError> {
    no_grad(|| {
        let kept = one.detach().copy();
        one.shallow_clone().f_copy_(other)?;
        other.shallow_clone().f_copy_(&kept)?;
        Ok(())
    })
}
