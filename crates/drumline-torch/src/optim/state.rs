//! The state of an optimizer, to be saved and loaded.
//!
//! A kept tensor is named after its parameter and its slot, as in PyTorch: `conv1.weight.momentum_buffer`. A parameter that has not
//! made a step yet has none.

use std::collections::BTreeMap;

use tch::{Kind, Tensor};

use super::trained::{Parameter, Trained};
use crate::error::TorchError;
use crate::named::Named;

/// How many steps a parameter has made: a number, where other slots are like the parameter.
pub(super) const STEP: &str = "step";

/// What an optimizer knows beside the parameters.
#[derive(Debug, Clone, Default)]
pub struct OptimizerState {
    /// Which optimizer: `sgd`, `adam` or `adamw`.
    pub kind: String,
    /// Its settings, among them `lr`.
    pub scalars: BTreeMap<String, f64>,
    /// What it keeps for each parameter: `<parameter>.momentum_buffer`, `<parameter>.exp_avg`, …
    pub tensors: Vec<Named>,
}

/// What an optimizer calls itself and the tensors that it keeps for a parameter.
#[derive(Debug, Clone, Copy)]
pub(super) struct Layout {
    pub(super) kind: &'static str,
    pub(super) slots: &'static [&'static str],
}

impl Layout {
    pub(super) fn save(&self, trained: &Trained, scalars: &[(&str, f64)]) -> OptimizerState {
        let scalars = scalars.iter().map(|(name, value)| (name.to_string(), *value));
        OptimizerState {
            kind: self.kind.into(),
            scalars: scalars.chain([("lr".to_owned(), trained.lr())]).collect(),
            tensors: trained.parameters().flat_map(|parameter| self.save_parameter(parameter)).collect(),
        }
    }

    fn save_parameter(&self, parameter: &Parameter) -> impl Iterator<Item = Named> {
        let name = &parameter.named.name;
        self.slots.iter().zip(&parameter.kept).map(move |(slot, tensor)| Named {
            name: format!("{name}.{slot}"),
            tensor: tensor.shallow_clone(),
        })
    }

    pub(super) fn load(&self, trained: &mut Trained, state: &OptimizerState) -> Result<(), TorchError> {
        if state.kind != self.kind {
            return Err(unfit(format!("it is of `{}`, and this optimizer is `{}`", state.kind, self.kind)));
        }
        let lr = *state.scalars.get("lr").ok_or_else(|| unfit("it has no `lr`".into()))?;
        let mut saved = by_name(&state.tensors)?;
        let kept: Result<Vec<_>, _> =
            trained.parameters().map(|parameter| self.load_parameter(parameter, &mut saved)).collect();
        let kept = kept?;
        if let Some(name) = saved.keys().next() {
            return Err(self.stray(name, trained));
        }
        trained.set_lr(lr);
        trained.parameters_mut().zip(kept).for_each(|(parameter, kept)| parameter.kept = kept);
        Ok(())
    }

    /// Copies of the parameter's tensors, taken out of `saved`; none if it has none there.
    fn load_parameter(
        &self,
        parameter: &Parameter,
        saved: &mut BTreeMap<&str, &Tensor>,
    ) -> Result<Vec<Tensor>, TorchError> {
        let Named { name, tensor } = &parameter.named;
        let mut kept = Vec::new();
        for slot in self.slots {
            let full_name = format!("{name}.{slot}");
            let Some(found) = saved.remove(full_name.as_str()) else { continue };
            kept.push(
                copy_for(tensor, slot, found).map_err(|wrong| unfit(format!("`{full_name}` {wrong}")))?,
            );
        }
        if !kept.is_empty() && kept.len() < self.slots.len() {
            return Err(unfit(format!("of `{name}` it has only {} of {:?}", kept.len(), self.slots)));
        }
        Ok(kept)
    }

    /// Why `name` in a saved state belongs to nothing here.
    fn stray(&self, name: &str, trained: &Trained) -> TorchError {
        let (parameter, slot) = name.rsplit_once('.').unwrap_or((name, ""));
        if trained.parameters().any(|known| known.named.name == parameter) {
            let slots = self.slots;
            return unfit(format!(
                "it has `{name}`, and this optimizer keeps {slots:?} and no `{slot}`; try the settings it was saved with"
            ));
        }
        unfit(format!("it has `{name}`, and no parameter `{parameter}` is trained here"))
    }
}

fn by_name(tensors: &[Named]) -> Result<BTreeMap<&str, &Tensor>, TorchError> {
    let mut names = BTreeMap::new();
    for Named { name, tensor } in tensors {
        if names.insert(name.as_str(), tensor).is_some() {
            return Err(unfit(format!("it has `{name}` twice")));
        }
    }
    Ok(names)
}

/// A copy that lies in memory as the parameter does.
fn copy_for(parameter: &Tensor, slot: &str, saved: &Tensor) -> Result<Tensor, String> {
    let mut copy = empty_slot(parameter, slot);
    if copy.size() != saved.size() {
        return Err(format!("has shape {:?}; expected {:?}", saved.size(), copy.size()));
    }
    tch::no_grad(|| copy.f_copy_(saved).map(|_| ())).map_err(|error| error.to_string())?;
    Ok(copy)
}

/// A new tensor for a slot, filled with zeros.
pub(super) fn empty_slot(parameter: &Tensor, slot: &str) -> Tensor {
    if slot == STEP {
        return Tensor::zeros([], (Kind::Float, parameter.device()));
    }
    tch::no_grad(|| parameter.zeros_like())
}

fn unfit(why: String) -> TorchError {
    TorchError::Unfit(format!("cannot load the state of an optimizer: {why}"))
}
