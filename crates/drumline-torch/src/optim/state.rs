//! Saving and loading the state of an optimizer.
//!
//! A state tensor is named after its parameter and its slot, as in PyTorch: `conv1.weight.momentum_buffer`. A parameter
//! that has not made a step yet has none.

use std::collections::BTreeMap;

use tch::{Kind, Tensor};

use super::trained::{Parameter, Trained};
use crate::error::TorchError;
use crate::kernels::BLOCK;
use crate::named::Named;

/// A state tensor that an optimizer keeps for a parameter.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Slot {
    /// The last part of its name.
    pub(super) name: &'static str,
    pub(super) like: Like,
}

/// The shape and the kind of a state tensor.
///
/// If ranks divide the parameter by rows, tensors of two or more dims are divided as well. A matrix is the last two dims
/// of a parameter.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Like {
    /// One f32.
    Number,
    /// As the parameter.
    Parameter,
    /// The shape of the parameter, in this kind.
    Elements(Kind),
    /// One f32 for each block of a row: `[rows, blocks]`.
    Blocks,
    /// One f32 for each row of each matrix.
    MatrixRows,
    /// One f32 for each column of each matrix. Those of a parameter that is one matrix have one dim: they are means over
    /// the rows of all ranks.
    MatrixColumns,
}

/// The slot for the number of steps.
pub(super) const STEP: Slot = Slot { name: "step", like: Like::Number };

impl Slot {
    pub(super) const fn new(name: &'static str, like: Like) -> Self {
        Self { name, like }
    }

    /// The shape of a parameter's tensor, and its kind.
    fn size_and_kind(&self, parameter: &Tensor) -> (Vec<i64>, Kind) {
        let mut size = parameter.size();
        let num_dims = size.len();
        match self.like {
            Like::Number => return (Vec::new(), Kind::Float),
            Like::Parameter => return (size, parameter.kind()),
            Like::Elements(kind) => return (size, kind),
            Like::Blocks => {
                let row_len: i64 = size[1..].iter().product();
                size = vec![size[0], (row_len as u64).div_ceil(BLOCK as u64) as i64];
            }
            Like::MatrixRows => size[num_dims - 1] = 1,
            Like::MatrixColumns if num_dims == 2 => {
                size.remove(0);
            }
            Like::MatrixColumns => size[num_dims - 2] = 1,
        }
        (size, Kind::Float)
    }

    /// A new tensor, filled with zeros.
    pub(super) fn empty(&self, parameter: &Tensor) -> Tensor {
        let ((size, kind), device) = (self.size_and_kind(parameter), parameter.device());
        match self.like {
            Like::Parameter => tch::no_grad(|| parameter.zeros_like()),
            Like::Elements(_) => {
                let stride = parameter.stride();
                tch::no_grad(|| parameter.new_empty_strided(size, stride, (kind, device)).zero_())
            }
            _ => Tensor::zeros(size, (kind, device)),
        }
    }
}

/// The state of an optimizer: all that is needed to resume, besides the parameters.
#[derive(Debug, Clone, Default)]
pub struct OptimizerState {
    /// Which optimizer: `sgd`, `adagrad`, `adam`, `adamw`, `lion`, `lamb` or `adafactor`.
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
    /// A tensor is in 8 bits and must not be, or the other way round.
    #[error("`{name}` is of kind {got:?}; expected {expected:?}; try the moments it was saved with")]
    Kind {
        /// The tensor.
        name: String,
        /// Its kind.
        got: Kind,
        /// The kind that is needed.
        expected: Kind,
    },
    /// Some tensors of a parameter are missing.
    #[error("of `{parameter}` it has only {found} of {slots:?}")]
    Incomplete {
        /// The parameter.
        parameter: String,
        /// How many tensors it has.
        found: usize,
        /// The tensors that this optimizer keeps for the parameter.
        slots: Vec<&'static str>,
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
        /// The tensors that this optimizer keeps for the parameter.
        slots: Vec<&'static str>,
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

/// The name of an optimizer, and the tensors that it keeps for each parameter.
#[derive(Clone, Copy)]
pub(super) struct Layout<'a> {
    pub(super) kind: &'static str,
    pub(super) slots: &'a dyn Fn(&Parameter) -> &'static [Slot],
}

impl Layout<'_> {
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
        (self.slots)(parameter).iter().zip(&parameter.kept).map(move |(slot, tensor)| Named {
            name: format!("{name}.{}", slot.name),
            tensor: tensor.shallow_clone(),
        })
    }

    /// Loads the state of the parameters whose names are `wanted`.
    pub(super) fn load(
        &self,
        trained: &mut Trained,
        state: &OptimizerState,
        wanted: &dyn Fn(&str) -> bool,
    ) -> Result<(), TorchError> {
        if state.kind != self.kind {
            return Err(StateError::OtherOptimizer { saved: state.kind.clone(), here: self.kind }.into());
        }
        let lr = *state.scalars.get("lr").ok_or(StateError::NoLearningRate)?;
        let mut saved = by_name(&state.tensors)?;
        let is_wanted = |parameter: &Parameter| wanted(&parameter.named.name);
        let parameters = trained.parameters().filter(|parameter| is_wanted(parameter));
        let kept = parameters.map(|parameter| self.load_parameter(parameter, &mut saved));
        let kept: Vec<_> = kept.collect::<Result<_, _>>()?;
        if let Some(name) = saved.keys().next() {
            return Err(self.unknown_tensor(name, trained).into());
        }
        trained.set_lr(lr);
        let parameters = trained.parameters_mut().filter(|parameter| is_wanted(parameter));
        parameters.zip(kept).for_each(|(parameter, kept)| parameter.kept = kept);
        Ok(())
    }

    /// The bytes of all slots of a parameter; `None` if it is not trained here.
    pub(super) fn state_bytes(&self, trained: &Trained, Named { name, tensor }: &Named) -> Option<usize> {
        let known = trained.parameters().find(|known| known.named.name == *name)?;
        let bytes = |slot: &Slot| {
            let (size, kind) = slot.size_and_kind(tensor);
            size.iter().product::<i64>() as usize * kind.elt_size_in_bytes()
        };
        Some((self.slots)(known).iter().map(bytes).sum())
    }

    /// Copies of the parameter's state tensors, which are removed from `saved`; empty if it has none there.
    fn load_parameter(
        &self,
        parameter: &Parameter,
        saved: &mut BTreeMap<&str, &Tensor>,
    ) -> Result<Vec<Tensor>, TorchError> {
        let Named { name, tensor } = &parameter.named;
        let (mut kept, slots) = (Vec::new(), (self.slots)(parameter));
        for slot in slots {
            let full_name = format!("{name}.{}", slot.name);
            let Some(found) = saved.remove(full_name.as_str()) else { continue };
            kept.push(copy_for(tensor, slot, Saved { name: &full_name, tensor: found })?);
        }
        if !kept.is_empty() && kept.len() < slots.len() {
            let (parameter, found) = (name.clone(), kept.len());
            return Err(StateError::Incomplete { parameter, found, slots: names(slots) }.into());
        }
        Ok(kept)
    }

    /// Why `name` in a saved state does not belong to this optimizer.
    fn unknown_tensor(&self, name: &str, trained: &Trained) -> StateError {
        let (parameter, slot) = name.rsplit_once('.').unwrap_or((name, ""));
        if let Some(known) = trained.parameters().find(|known| known.named.name == parameter) {
            let slots = names((self.slots)(known));
            return StateError::UnknownSlot { name: name.to_owned(), slot: slot.to_owned(), slots };
        }
        StateError::UnknownParameter { name: name.to_owned(), parameter: parameter.to_owned() }
    }
}

fn names(slots: &[Slot]) -> Vec<&'static str> {
    slots.iter().map(|slot| slot.name).collect()
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
fn copy_for(parameter: &Tensor, slot: &Slot, saved: Saved<'_>) -> Result<Tensor, TorchError> {
    let mut copy = slot.empty(parameter);
    let Saved { name, tensor } = saved;
    if copy.size() != tensor.size() {
        let (got, expected) = (tensor.size(), copy.size());
        return Err(StateError::Shape { name: name.to_owned(), got, expected }.into());
    }
    if (copy.kind() == Kind::Uint8) != (tensor.kind() == Kind::Uint8) {
        let (got, expected) = (tensor.kind(), copy.kind());
        return Err(StateError::Kind { name: name.to_owned(), got, expected }.into());
    }
    tch::no_grad(|| copy.f_copy_(tensor))?;
    Ok(copy)
}
