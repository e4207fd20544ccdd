//! Saving and loading the state of an optimizer.
//!
//! A state tensor is named after its parameter and its slot, as in PyTorch: `conv1.weight.momentum_buffer`. A parameter
//! that has not made a step yet has none.

use std::collections::BTreeMap;

use tch::{Kind, Tensor};

use super::trained::{Parameter, Trained};
use crate::error::TorchError;
use crate::named::Named;

/// The slot for the number of steps: one number, while other slots have the parameter's shape.
pub(super) const STEP: &str = "step";

/// The state of an optimizer: all that is needed to resume, besides the parameters.
#[derive(Debug, Clone, Default)]
pub struct OptimizerState {
    /// Which optimizer: `sgd`, `adam` or `adamw`.
    pub kind: String,
    /// Its settings, among them `lr`.
    pub scalars: BTreeMap<String, f64>,
    /// Its state tensors: `<parameter>.momentum_buffer`, `<parameter>.exp_avg`, …
    pub tensors: Vec<Named>,
}

/// Why a saved state does not fit an optimizer.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum StateError {
    /// It was saved by an optimizer of another kind.
    #[error("it is of `{saved}`, and this optimizer is `{here}`")]
    OtherOptimizer {
        /// The kind that saved it.
        saved: String,
        /// The kind of this optimizer.
        here: &'static str,
    },
    /// It has no learning rate.
    #[error("it has no `lr`")]
    NoLearningRate,
    /// It has a tensor twice.
    #[error("it has `{name}` twice")]
    Duplicate {
        /// The tensor.
        name: String,
    },
    /// A tensor has another shape than its parameter.
    #[error("`{name}` has shape {got:?}; expected {expected:?}")]
    Shape {
        /// The tensor.
        name: String,
        /// Its shape.
        got: Vec<i64>,
        /// The shape that its parameter needs.
        expected: Vec<i64>,
    },
    /// Some tensors of a parameter are missing.
    #[error("of `{parameter}` it has only {found} of {slots:?}")]
    Incomplete {
        /// The parameter.
        parameter: String,
        /// How many tensors it has.
        found: usize,
        /// The tensors that this optimizer keeps for a parameter.
        slots: &'static [&'static str],
    },
    /// It has a tensor that this optimizer does not keep with its settings.
    #[error(
        "it has `{name}`, and this optimizer keeps {slots:?} and no `{slot}`; try the settings it was saved with"
    )]
    UnknownSlot {
        /// The tensor.
        name: String,
        /// The last part of its name.
        slot: String,
        /// The tensors that this optimizer keeps for a parameter.
        slots: &'static [&'static str],
    },
    /// It has a tensor of a parameter that this optimizer does not train.
    #[error("it has `{name}`, and no parameter `{parameter}` is trained here")]
    UnknownParameter {
        /// The tensor.
        name: String,
        /// The parameter.
        parameter: String,
    },
    /// The master copy of a parameter is missing, or has another shape.
    #[error(
        "it has no `{name}` of shape {shape:?}, the f32 copy of a parameter in {kind:?}; try the precision it was saved with"
    )]
    NoMasterWeight {
        /// The tensor.
        name: String,
        /// The shape of the parameter.
        shape: Vec<i64>,
        /// The kind of the parameter.
        kind: Kind,
    },
}

/// The name of an optimizer, and the names of the tensors that it keeps for a parameter.
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
            return Err(StateError::OtherOptimizer { saved: state.kind.clone(), here: self.kind }.into());
        }
        let lr = *state.scalars.get("lr").ok_or(StateError::NoLearningRate)?;
        let mut saved = by_name(&state.tensors)?;
        let kept: Result<Vec<_>, _> =
            trained.parameters().map(|parameter| self.load_parameter(parameter, &mut saved)).collect();
        let kept = kept?;
        if let Some(name) = saved.keys().next() {
            return Err(self.unknown_tensor(name, trained).into());
        }
        trained.set_lr(lr);
        trained.parameters_mut().zip(kept).for_each(|(parameter, kept)| parameter.kept = kept);
        Ok(())
    }

    /// Copies of the parameter's state tensors, which are removed from `saved`; empty if it has none there.
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
            kept.push(copy_for(tensor, slot, Saved { name: &full_name, tensor: found })?);
        }
        if !kept.is_empty() && kept.len() < self.slots.len() {
            return Err(StateError::Incomplete {
                parameter: name.clone(),
                found: kept.len(),
                slots: self.slots,
            }
            .into());
        }
        Ok(kept)
    }

    /// Why `name` in a saved state does not belong to this optimizer.
    fn unknown_tensor(&self, name: &str, trained: &Trained) -> StateError {
        let (parameter, slot) = name.rsplit_once('.').unwrap_or((name, ""));
        if trained.parameters().any(|known| known.named.name == parameter) {
            return StateError::UnknownSlot {
                name: name.to_owned(),
                slot: slot.to_owned(),
                slots: self.slots,
            };
        }
        StateError::UnknownParameter { name: name.to_owned(), parameter: parameter.to_owned() }
    }
}

fn by_name(tensors: &[Named]) -> Result<BTreeMap<&str, &Tensor>, TorchError> {
    let mut names = BTreeMap::new();
    for Named { name, tensor } in tensors {
        if names.insert(name.as_str(), tensor).is_some() {
            return Err(StateError::Duplicate { name: name.clone() }.into());
        }
    }
    Ok(names)
}

/// A tensor of a saved state.
#[derive(Clone, Copy)]
struct Saved<'a> {
    name: &'a str,
    tensor: &'a Tensor,
}

/// A copy with the parameter's memory layout.
fn copy_for(parameter: &Tensor, slot: &str, saved: Saved<'_>) -> Result<Tensor, TorchError> {
    let mut copy = empty_slot(parameter, slot);
    let Saved { name, tensor } = saved;
    if copy.size() != tensor.size() {
        let (got, expected) = (tensor.size(), copy.size());
        return Err(StateError::Shape { name: name.to_owned(), got, expected }.into());
    }
    tch::no_grad(|| copy.f_copy_(tensor))?;
    Ok(copy)
}

/// A new tensor for a slot, filled with zeros.
pub(super) fn empty_slot(parameter: &Tensor, slot: &str) -> Tensor {
    if slot == STEP {
        return Tensor::zeros([], (Kind::Float, parameter.device()));
    }
    tch::no_grad(|| parameter.zeros_like())
}
