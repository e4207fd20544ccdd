//! Which part of each tensor this rank holds, where ranks divide the state of a training among them.
//!
//! ```text
//!   model       `fc.weight` [8, 4]      rank 0: rows 0 to 4      rank 1: rows 5 to 7
//!   optimizer   `fc.weight.exp_avg`     the same rows            the same rows
//!               `fc.weight.row_var`     [5, 1] of [8, 1]         [3, 1]
//!               `fc.weight.col_var` [4] whole; saved here        whole
//!               `fc.weight.step` []     whole; saved here        whole
//! ```
//! A slot of the optimizer that has the shape of its parameter is divided as the parameter is. Another one of two or more
//! dims has a row for each row of the parameter, and is divided by the same rows. One with fewer dims is whole on each
//! rank that holds rows of the parameter, and the rank with the first row saves it.
//!
//! Not here: a rank's boxes of one tensor (`boxes`), files (`shards`), and which rank owns what, which the engine decides.

use std::collections::BTreeMap;

use drumline_comm::{Axis, MeshShape};
use drumline_parallel::{Engine, Placed, Whole};
use drumline_torch::{Named, OptimizerState};
use tch::Tensor;

use super::boxes::{Boxes, to_usize};
use super::error::CheckpointError;
use super::section::plain_name;
use super::shard_writer::TensorPart;
use super::state::RunState;

/// The tensors of a training, and which part of each this rank holds.
#[derive(Debug, Clone, Default)]
pub struct StateLayout {
    /// By the names of the model's tensors.
    model: BTreeMap<String, Divided>,
    /// By the names of the optimizer's parameters.
    optimizer: BTreeMap<String, Divided>,
}

/// A tensor that ranks divide among them.
#[derive(Debug, Clone)]
struct Divided {
    shape: Vec<usize>,
    /// `None` if this rank holds nothing of it.
    held: Option<Held>,
}

#[derive(Debug, Clone)]
struct Held {
    boxes: Boxes,
    is_saved_here: bool,
}

impl Divided {
    /// The rows of a state tensor that this rank holds, if it has a row for each row of its parameter and another shape.
    fn rows_of(&self, shape: &[usize]) -> Option<Boxes> {
        let (held, first_dim) = (self.held.as_ref()?, self.shape.first());
        if shape.len() < 2 || shape == self.shape || shape.first() != first_dim {
            return None;
        }
        held.boxes.rows(&self.shape, shape)
    }
}

impl StateLayout {
    /// The layout of a training of one model. `whole` are all tensors of the model
    /// ([`Engine::tensors`](crate::engine::Engine::tensors)), `held` those parts that this rank holds
    /// ([`Engine::state`](crate::engine::Engine::state)).
    pub fn new(whole: &[Whole], held: &[Placed]) -> Result<Self, CheckpointError> {
        let mut layout = Self::default();
        layout.add_model(whole, held, str::to_owned)?;
        layout.add_optimizer(whole, held, str::to_owned)?;
        Ok(layout)
    }

    /// The layout of the training of a model by an engine; `None` if each rank holds all tensors, and rank 0 saves them.
    pub(crate) fn of_engine(engine: &dyn Engine) -> Result<Option<Self>, CheckpointError> {
        let layout = is_divided(engine.mesh().shape()).then(|| Self::new(&engine.tensors(), &engine.state()));
        layout.transpose()
    }

    /// Adds a model, whose tensors get these names in the checkpoint.
    pub(crate) fn add_model(
        &mut self,
        whole: &[Whole],
        held: &[Placed],
        name_of: impl Fn(&str) -> String,
    ) -> Result<(), CheckpointError> {
        add(&mut self.model, whole, held, name_of)
    }

    /// Adds the optimizer of a model, whose parameters get these names in the checkpoint.
    pub(crate) fn add_optimizer(
        &mut self,
        whole: &[Whole],
        held: &[Placed],
        name_of: impl Fn(&str) -> String,
    ) -> Result<(), CheckpointError> {
        add(&mut self.optimizer, whole, held, name_of)
    }

    /// What this rank saves of its parts of the model.
    pub(super) fn saved_of_model(&self, held: &[Named]) -> Result<Vec<TensorPart>, CheckpointError> {
        let saved = |named: &Named| {
            let tensor = self.model.get(&named.name)?;
            let held = tensor.held.as_ref().filter(|held| held.is_saved_here)?;
            Some(held.boxes.parts(named, &tensor.shape))
        };
        joined(held.iter().filter_map(saved))
    }

    /// What this rank saves of its optimizer's tensors.
    pub(super) fn saved_of_optimizer(&self, held: &[Named]) -> Result<Vec<TensorPart>, CheckpointError> {
        let saved = |named: &Named| {
            let parameter = self.optimizer.get(parameter_of(&named.name))?;
            let held = parameter.held.as_ref().filter(|held| held.is_saved_here)?;
            let (shape, whole) = (shape_of(&named.tensor), &parameter.shape);
            if shape == held.boxes.shape() {
                return Some(held.boxes.parts(named, whole));
            }
            let global = [whole.get(..1).unwrap_or(&[]), shape.get(1..).unwrap_or(&[])].concat();
            if let Some(rows) = parameter.rows_of(&global).filter(|rows| rows.shape() == shape) {
                return Some(rows.parts(named, &global));
            }
            held.boxes.is_first().then(|| Ok(vec![TensorPart::whole(named)]))
        };
        joined(held.iter().filter_map(saved))
    }

    /// What this rank holds of a tensor of the model; `None` if it holds nothing of it. Trained parameters have the names
    /// that they have in files.
    pub(super) fn wanted_of_model(&self, name: &str, shape: &[usize]) -> Option<Boxes> {
        let Some(tensor) = self.model.get(plain_name(name)) else { return Some(Boxes::whole(shape)) };
        tensor.held.as_ref().map(|held| held.boxes.clone())
    }

    /// The same of an optimizer's tensor.
    pub(super) fn wanted_of_optimizer(&self, name: &str, shape: &[usize]) -> Option<Boxes> {
        let Some(parameter) = self.optimizer.get(parameter_of(name)) else {
            return Some(Boxes::whole(shape));
        };
        let held = parameter.held.as_ref()?;
        if shape == parameter.shape {
            return Some(held.boxes.clone());
        }
        Some(parameter.rows_of(shape).unwrap_or_else(|| Boxes::whole(shape)))
    }

    /// Returns an error with all differences unless a checkpoint has the names and shapes of the model's tensors.
    pub(super) fn check_names<'a>(
        &self,
        saved: impl Iterator<Item = (&'a str, &'a [usize])>,
    ) -> Result<(), CheckpointError> {
        let saved: BTreeMap<_, _> = saved.collect();
        let missing = self.model.keys().filter(|name| !saved.contains_key(name.as_str()));
        let unexpected = saved.keys().filter(|name| !self.model.contains_key(**name));
        let mut differences: Vec<_> =
            missing.map(|name| format!("`{name}` is not in the checkpoint")).collect();
        differences.extend(unexpected.map(|name| format!("`{name}` is not in the model")));
        let both =
            saved.iter().filter_map(|(name, found)| Some((name, *found, &self.model.get(*name)?.shape)));
        differences.extend(both.filter(|(_, found, wanted)| found != wanted).map(|(name, found, wanted)| {
            format!("`{name}` has shape {found:?} in the checkpoint and {wanted:?} in the model")
        }));
        if differences.is_empty() { Ok(()) } else { Err(CheckpointError::Mismatch { differences }) }
    }

    /// This rank's parts of a loaded state, whose tensors may be whole or be these parts already.
    pub(crate) fn part_of(&self, state: &RunState) -> Result<RunState, CheckpointError> {
        self.check_shapes(&state.model)?;
        let of_model = |named: &Named| {
            let Some(tensor) = self.model.get(&named.name) else { return Some(Ok(named.clone())) };
            tensor.held.as_ref().map(|held| cut(named, &tensor.shape, &held.boxes))
        };
        let of_optimizer = |named: &Named| {
            let Some(parameter) = self.optimizer.get(parameter_of(&named.name)) else {
                return Some(Ok(named.clone()));
            };
            parameter.held.as_ref().map(|held| {
                let shape = shape_of(&named.tensor);
                match parameter.rows_of(&shape) {
                    Some(rows) => cut(named, &shape, &rows),
                    None => cut(named, &parameter.shape, &held.boxes),
                }
            })
        };
        let optimizer = OptimizerState {
            tensors: state.optimizer.tensors.iter().filter_map(of_optimizer).collect::<Result<_, _>>()?,
            ..state.optimizer.clone()
        };
        let of_list = |list: &[Named]| list.iter().filter_map(of_model).collect::<Result<Vec<_>, _>>();
        Ok(RunState {
            model: of_list(&state.model)?,
            trained: of_list(&state.trained)?,
            optimizer,
            ..state.clone()
        })
    }
}

impl StateLayout {
    /// Returns an error with all tensors that are neither whole nor the part that this rank holds.
    fn check_shapes(&self, model: &[Named]) -> Result<(), CheckpointError> {
        let difference = |Named { name, tensor }: &Named| {
            let (known, found) = (self.model.get(name)?, shape_of(tensor));
            let is_held = known.held.as_ref().is_some_and(|held| held.boxes.shape() == found);
            let wanted = &known.shape;
            (found != *wanted && !is_held).then(|| {
                format!("`{name}` has shape {found:?} in the checkpoint and {wanted:?} in the model")
            })
        };
        let differences: Vec<_> = model.iter().filter_map(difference).collect();
        if differences.is_empty() { Ok(()) } else { Err(CheckpointError::Mismatch { differences }) }
    }
}

/// Whether ranks on such a mesh divide the state among them. The answer is the same on all ranks.
pub(crate) fn is_divided(mesh: &MeshShape) -> bool {
    mesh.num_ranks() > mesh.size(Axis::Dp)
}

/// The tensors that this rank holds, under the names of the whole ones.
pub(crate) fn held_by(engine: &dyn Engine) -> Vec<Named> {
    let named = |placed: Placed| Named { name: placed.name, tensor: placed.tensor };
    engine.state().into_iter().map(named).collect()
}

fn add(
    tensors: &mut BTreeMap<String, Divided>,
    whole: &[Whole],
    held: &[Placed],
    name_of: impl Fn(&str) -> String,
) -> Result<(), CheckpointError> {
    for Whole { name, size } in whole {
        let divided = Divided { shape: to_usize(size), held: None };
        tensors.insert(name_of(name), divided);
    }
    for placed in held {
        let Some(tensor) = tensors.get_mut(&name_of(&placed.name)) else { continue };
        let boxes = Boxes::of(placed)
            .map_err(|source| super::index::IndexError::Region { name: placed.name.clone(), source })?;
        tensor.held = Some(Held { boxes, is_saved_here: placed.is_saved_here });
    }
    Ok(())
}

/// The parameter of an optimizer's tensor.
pub(super) fn parameter_of(name: &str) -> &str {
    name.rsplit_once('.').map_or(name, |(parameter, _)| parameter)
}

/// All parts, or the first error.
fn joined(
    parts: impl Iterator<Item = Result<Vec<TensorPart>, CheckpointError>>,
) -> Result<Vec<TensorPart>, CheckpointError> {
    Ok(parts.collect::<Result<Vec<_>, _>>()?.into_iter().flatten().collect())
}

/// What a rank holds of a tensor that has the whole shape; any other tensor itself.
fn cut(named: &Named, whole: &[usize], held: &Boxes) -> Result<Named, CheckpointError> {
    let is_whole = shape_of(&named.tensor) == whole;
    let tensor = if is_whole { held.of_whole(&named.tensor)? } else { named.tensor.shallow_clone() };
    Ok(Named { name: named.name.clone(), tensor })
}

fn shape_of(tensor: &Tensor) -> Vec<usize> {
    to_usize(&tensor.size())
}
