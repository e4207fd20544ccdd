//! Models that are cut: each rank of `pp × tp` has a part of the model, and knows what the others have.
//!
//! ```text
//!   pp 2 × tp 2       embed.weight [8, 4]    block.0.weight [4, 8]    block.1.weight [4, 8]
//!   rank 0 (0, 0)     rows 0 to 3            columns 0 to 3
//!   rank 1 (0, 1)     rows 4 to 7            columns 4 to 7
//!   rank 2 (1, 0)                                                     columns 0 to 3
//!   rank 3 (1, 1)                                                     columns 4 to 7
//! ```
//! A tensor that several of these ranks have whole, such as a norm's weight along `tp`, counts in norms and is saved on
//! the first of them.
//!
//! Not here: what ranks with the same part do (`ddp`, `shard`), how layers use their parts (`tensor`).

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;

use drumline_comm::{Axis, Mesh, MeshShape, ReduceOp, ShapeError};
use drumline_torch::{Named, TensorCollectives, buffers, parameters};
use serde::{Deserialize, Serialize};
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};

use super::{Engine, EngineOptions, EngineSetup, Placed, Result, Whole};
use crate::error::{NotRecordable, ParallelError};
use crate::kinds::{kind_name, kind_of};

/// A variable of this rank that is a part of a whole tensor of the model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// The whole tensor; the variable has its name.
    pub whole: Whole,
    /// The offset of the part along each dim.
    pub offsets: Vec<i64>,
}

/// The options of an engine for a model that is cut along `pp` and `tp`, or whose samples are cut along `cp`. Ranks with the
/// same part train it by the engine `within`.
pub struct ModelParallel {
    /// Ranks along `pp`, each with some of the layers.
    pub pp: usize,
    /// Ranks along `cp`, each with some of the tokens of the same samples.
    pub cp: usize,
    /// Ranks along `tp`, each with a part of each layer.
    pub tp: usize,
    /// This rank's variables that are parts. All others are whole.
    pub parts: Vec<Part>,
    /// What ranks do that have the same part.
    pub within: Box<dyn EngineOptions>,
}

impl Default for ModelParallel {
    fn default() -> Self {
        Self { pp: 1, cp: 1, tp: 1, parts: Vec::new(), within: Default::default() }
    }
}

impl EngineOptions for ModelParallel {
    fn mesh_shape(&self, num_ranks: usize) -> std::result::Result<MeshShape, ShapeError> {
        let own =
            MeshShape::default().with(Axis::Pp, self.pp).with(Axis::Cp, self.cp).with(Axis::Tp, self.tp);
        let rest = own.with_rest(Axis::Dp, num_ranks)?.size(Axis::Dp);
        let within = self.within.mesh_shape(rest)?;
        Ok([Axis::Dp, Axis::Shard].into_iter().fold(own, |own, axis| own.with(axis, within.size(axis))))
    }

    #[track_caller]
    fn engine(self: Box<Self>, setup: EngineSetup<'_>) -> Result<Box<dyn Engine>> {
        let parts = ModelParts::meet(setup.store, setup.mesh, &self.parts)?;
        self.within.engine(EngineSetup { parts, ..setup })
    }
}

/// Which part of the model this rank has, and which the other ranks have. By default, each rank has all of it.
#[derive(Debug, Clone, Default)]
pub struct ModelParts(Option<Parts>);

#[derive(Debug, Clone)]
struct Parts {
    /// The offsets of this rank's parts, and zeros for what it has whole.
    own: HashMap<String, Vec<i64>>,
    /// Tensors of this rank that another rank has as well, which counts and saves them.
    of_others: HashSet<String>,
    /// Those of all ranks.
    tensors: BTreeMap<String, Known>,
}

/// A tensor of the model that some rank has.
#[derive(Debug, Clone)]
struct Known {
    size: Vec<i64>,
    kind: Kind,
    /// The different parts that ranks have.
    parts: Vec<Told>,
}

impl Known {
    /// An error unless the parts cover the tensor, and none overlap.
    fn check(&self) -> Result {
        let Self { size, parts, .. } = self;
        let name = |part: &Told| format!("a part of `{}`", part.name);
        for (place, part) in parts.iter().enumerate() {
            if let Some(other) = parts[..place].iter().find(|other| other.shared(part) > 0) {
                let got = format!("{part} beside {other}");
                return Err(ParallelError::value(
                    name(part),
                    got,
                    "the same as another, or none of its elements",
                ));
            }
        }
        let covered: i64 = parts.iter().map(|part| part.size.iter().product::<i64>()).sum();
        match parts.first().filter(|_| covered != size.iter().product::<i64>()) {
            Some(first) => {
                let got = parts.iter().map(Told::to_string).collect::<Vec<_>>().join(", ");
                let expected = format!("parts that cover the whole, which has size {size:?}");
                Err(ParallelError::value(format!("`{}` on all ranks", first.name), got, expected))
            }
            None => Ok(()),
        }
    }
}

/// What ranks tell each other of a tensor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Told {
    name: String,
    whole: Vec<i64>,
    offsets: Vec<i64>,
    size: Vec<i64>,
    kind: String,
}

impl Told {
    fn of(named: &Named, parts: &HashMap<String, Part>) -> Self {
        let (name, size) = (named.name.clone(), named.tensor.size());
        let (whole, offsets) = match parts.get(&name) {
            Some(Part { whole, offsets }) => (whole.size.clone(), offsets.clone()),
            None => (size.clone(), vec![0; size.len()]),
        };
        Self { name, whole, offsets, size, kind: kind_name(named.tensor.kind()) }
    }

    fn is_same(&self, other: &Self) -> bool {
        self.name == other.name && self.offsets == other.offsets && self.size == other.size
    }

    /// An error if this is no part of the whole tensor.
    fn check(&self) -> Result {
        let Self { name, whole, offsets, size, .. } = self;
        let is_within = offsets.len() == whole.len()
            && size.len() == whole.len()
            && offsets
                .iter()
                .zip(size)
                .zip(whole)
                .all(|((offset, size), whole)| *offset >= 0 && offset + size <= *whole);
        if is_within {
            return Ok(());
        }
        let expected = format!("inside of the whole, which has size {whole:?}");
        Err(ParallelError::value(format!("a part of `{name}`"), self, expected))
    }

    /// The number of elements that two parts share.
    fn shared(&self, other: &Self) -> i64 {
        let dims = self.offsets.iter().zip(&self.size).zip(other.offsets.iter().zip(&other.size));
        dims.map(|((offset, size), (other, len))| {
            ((offset + size).min(other + len) - offset.max(other)).max(0)
        })
        .product()
    }
}

impl fmt::Display for Told {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} at {:?}", self.size, self.offsets)
    }
}

impl ModelParts {
    /// Tells the ranks of `pp × tp` which part of the model each has. An error, the same on all of them, unless the parts of
    /// each tensor cover it and none overlap.
    #[track_caller]
    pub fn meet(store: &VarStore, mesh: &Mesh, parts: &[Part]) -> Result<Self> {
        let group = mesh.model();
        if group.size() == 1 {
            return Ok(Self::default());
        }
        let own: HashMap<_, _> = parts.iter().map(|part| (part.whole.name.clone(), part.clone())).collect();
        let named = parameters(store).into_iter().chain(buffers(store));
        let told: Vec<_> = named.map(|named| Told::of(&named, &own)).collect();
        let all = group.all_gather_object(&told)?;
        let mut tensors: BTreeMap<String, Known> = BTreeMap::new();
        for told in all.iter().flatten() {
            told.check()?;
            let known = tensors.entry(told.name.clone());
            let known = known.or_insert(Known {
                size: told.whole.clone(),
                kind: kind_of(&told.kind)?,
                parts: Vec::new(),
            });
            if known.size != told.whole {
                let (what, got) = (
                    format!("the size of `{}`", told.name),
                    format!("{:?} and {:?}", known.size, told.whole),
                );
                return Err(ParallelError::value(what, got, "the same on all ranks"));
            }
            if !known.parts.iter().any(|part| part.is_same(told)) {
                known.parts.push(told.clone());
            }
        }
        tensors.values().try_for_each(Known::check)?;
        let before: Vec<_> = all[..group.rank()].iter().flatten().collect();
        let of_others = told.iter().filter(|told| before.iter().any(|other| other.is_same(told)));
        let of_others = of_others.map(|told| told.name.clone()).collect();
        let own = told.into_iter().map(|told| (told.name, told.offsets)).collect();
        Ok(Self(Some(Parts { own, of_others, tensors })))
    }

    /// Whether ranks have different parts.
    pub fn is_cut(&self) -> bool {
        self.0.is_some()
    }

    /// An error if a step cannot be recorded as a CUDA graph.
    pub(crate) fn is_recordable(&self) -> std::result::Result<(), NotRecordable> {
        if self.is_cut() { Err(NotRecordable::ModelIsCut) } else { Ok(()) }
    }

    /// Ends the groups of ranks that wait for this one in forward and backward.
    pub(crate) fn abort(&self, mesh: &Mesh, cause: &str) {
        if self.is_cut() {
            for group in [mesh.axis(Axis::Pp), mesh.axis(Axis::Tp), mesh.model()] {
                group.abort(cause);
            }
        }
    }

    /// The places in the whole model of what an engine holds of this rank's part.
    pub(crate) fn placed(&self, state: Vec<Placed>) -> Vec<Placed> {
        let Some(parts) = &self.0 else { return state };
        let in_whole = |placed: Placed| {
            let is_saved_here = placed.is_saved_here && !parts.of_others.contains(&placed.name);
            let (Some(own), Some(known)) = (parts.own.get(&placed.name), parts.tensors.get(&placed.name))
            else {
                return Placed { is_saved_here, ..placed };
            };
            let offsets = placed.offsets.iter().zip(own).map(|(in_part, part)| in_part + part).collect();
            Placed { whole: known.size.clone(), offsets, is_saved_here, ..placed }
        };
        state.into_iter().map(in_whole).collect()
    }

    /// All tensors of the model; `own` are those of this rank's part.
    pub(crate) fn tensors(&self, own: impl FnOnce() -> Vec<Whole>) -> Vec<Whole> {
        let Some(parts) = &self.0 else { return own() };
        parts
            .tensors
            .iter()
            .map(|(name, known)| Whole { name: name.clone(), size: known.size.clone() })
            .collect()
    }

    /// Those of these parameters that no other part counts.
    pub(crate) fn counted(&self, parameters: &[Named]) -> Vec<Named> {
        let is_counted =
            |named: &&Named| self.0.as_ref().is_none_or(|parts| !parts.of_others.contains(&named.name));
        parameters.iter().filter(is_counted).cloned().collect()
    }

    /// The norm of all parts, of that of this rank's.
    #[track_caller]
    pub(crate) fn norm(&self, mesh: &Mesh, own: f64) -> Result<f64> {
        if !self.is_cut() {
            return Ok(own);
        }
        let mut all = vec![0.0; mesh.model().size()];
        mesh.model().all_gather(&[own], &mut all)?;
        Ok(all.iter().map(|norm| norm * norm).sum::<f64>().sqrt())
    }

    /// The same on the device.
    #[track_caller]
    pub(crate) fn norm_on_device(&self, mesh: &Mesh, own: Tensor) -> Result<Tensor> {
        if !self.is_cut() {
            return Ok(own);
        }
        let mut squares = own.f_square()?;
        mesh.model().all_reduce_tensor(&mut squares, ReduceOp::Sum)?;
        Ok(squares.f_sqrt()?)
    }

    /// The whole of a tensor, of this rank's part, which `part` returns.
    #[track_caller]
    pub(crate) fn full(
        &self,
        mesh: &Mesh,
        name: &str,
        part: impl FnOnce() -> Result<Tensor>,
    ) -> Result<Tensor> {
        let Some(parts) = &self.0 else { return part() };
        let Known { size, kind, .. } =
            parts.tensors.get(name).ok_or_else(|| ParallelError::no_tensor(name))?;
        let _no_grad = tch::no_grad_guard();
        let whole = Tensor::f_zeros(size, (*kind, Device::Cpu))?;
        let mut device = Device::Cpu;
        if let Some(offsets) = parts.own.get(name) {
            let own = part()?;
            device = own.device();
            copy_into(&whole, offsets, &own)?;
        }
        // As bytes, of which all ranks that have one have the same: a sum of floats would not keep a negative zero.
        let mut bytes = whole.f_view([-1])?.f_view_dtype(Kind::Uint8)?;
        mesh.model().all_reduce_tensor(&mut bytes, ReduceOp::Max)?;
        Ok(whole.f_to_device(device)?)
    }
}

/// Copies a part to its place in the whole tensor.
pub(crate) fn copy_into(whole: &Tensor, offsets: &[i64], part: &Tensor) -> Result {
    let mut place = whole.shallow_clone();
    for (dim, (offset, len)) in offsets.iter().zip(part.size()).enumerate() {
        place = place.f_narrow(dim as i64, *offset, len)?;
    }
    Ok(place.f_copy_(part)?)
}
