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
use std::hash::{DefaultHasher, Hash, Hasher};

use drumline_comm::{Axis, Mesh, MeshShape, ReduceOp, ShapeError, call_site};
use drumline_torch::{Named, Optimizer, TensorCollectives, buffers, bytes, parameters};
use serde::{Deserialize, Serialize};
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};

use super::ending::Ending;
use super::placed::{PlacedBox, narrowed};
use super::{Cut, Engine, EngineOptions, EngineSetup, Placed, Result, Whole};
use crate::error::{NotRecordable, ParallelError};
use crate::kinds::{kind_name, kind_of};

/// A variable of this rank that is a part of a whole tensor of the model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// The whole tensor; the variable has its name.
    pub whole: Whole,
    /// The offset of the part along each dim.
    pub offsets: Vec<i64>,
    /// If the whole is several tensors one after the other: the variable has the same part of each.
    pub stack: Option<Stack>,
}

/// A tensor that is several tensors of equal size, one after the other along a dim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stack {
    /// The dim.
    pub dim: usize,
    /// The number of tensors.
    pub count: i64,
}

/// The boxes of a variable of this size that is this part.
fn boxes(size: &[i64], part: &Part) -> Vec<PlacedBox> {
    let one = PlacedBox { offsets: part.offsets.clone(), ..PlacedBox::whole(size) };
    let Some(Stack { dim, count }) = part.stack.filter(|stack| stack.count > 1) else { return vec![one] };
    let (whole, own) = (part.whole.size[dim] / count, size[dim] / count);
    let nth = |nth: i64| {
        let mut boxed = one.clone();
        boxed.at[dim] = nth * own;
        boxed.offsets[dim] += nth * whole;
        boxed.size[dim] = own;
        boxed
    };
    (0..count).map(nth).collect()
}

impl Part {
    /// This part of the whole tensor, for a variable of this size.
    pub fn of(&self, whole: &Tensor, size: &[i64]) -> Result<Tensor> {
        let boxes = boxes(size, self);
        let narrowed = boxes.iter().map(|boxed| narrowed(whole, &boxed.offsets, &boxed.size));
        let narrowed = narrowed.collect::<Result<Vec<_>>>()?;
        match (&narrowed[..], self.stack) {
            ([one], _) | ([one, ..], None) => Ok(one.shallow_clone()),
            (all, Some(stack)) => Ok(Tensor::f_cat(all, stack.dim as i64)?),
            ([], None) => Err(ParallelError::Internal { what: "a part has no box" }),
        }
    }
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
pub struct ModelParts {
    parts: Option<Parts>,
    ending: Ending,
}

#[derive(Debug, Clone)]
struct Parts {
    /// The boxes of this rank's variables.
    own: HashMap<String, Vec<PlacedBox>>,
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
                    "the same as another, or none of its elements; try `TensorParallel::parts` as \
                     ModelParallel::parts",
                ));
            }
        }
        let covered: i64 = parts.iter().map(Told::numel).sum();
        match parts.first().filter(|_| covered != size.iter().product::<i64>()) {
            Some(first) => {
                let got = parts.iter().map(Told::to_string).collect::<Vec<_>>().join(", ");
                let expected = format!(
                    "parts that cover the whole, which has size {size:?}; try `TensorParallel::parts` as \
                     ModelParallel::parts"
                );
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
    boxes: Vec<PlacedBox>,
    kind: String,
    /// A hash of the values; `None` if they come from another rank later.
    values: Option<u64>,
}

impl Told {
    fn of(named: &Named, parts: &HashMap<String, Part>, has_values: bool) -> Result<Self> {
        let (name, size) = (named.name.clone(), named.tensor.size());
        let (whole, boxes) = match parts.get(&name) {
            Some(part) => (part.whole.size.clone(), boxes(&size, part)),
            None => (size.clone(), vec![PlacedBox::whole(&size)]),
        };
        let values = has_values.then(|| hash(&named.tensor)).transpose()?;
        Ok(Self { name, whole, boxes, kind: kind_name(named.tensor.kind()), values })
    }

    /// An error if two ranks that have the same part have other values of it: then these are parts, too.
    fn check_alike(&self, other: &Self) -> Result {
        if self.values == other.values {
            return Ok(());
        }
        let what = format!("`{}` on two ranks along pp or tp", self.name);
        let expected = "the same values, or parts; try the same seed on all ranks, and ModelParallel::parts";
        Err(ParallelError::value(what, format!("{self}, with different values"), expected))
    }

    fn is_same(&self, other: &Self) -> bool {
        self.name == other.name && self.boxes == other.boxes
    }

    /// An error if this is no part of the whole tensor.
    fn check(&self) -> Result {
        let Self { name, whole, boxes, .. } = self;
        if boxes.iter().all(|boxed| boxed.is_of(whole)) {
            return Ok(());
        }
        let expected =
            format!("inside of the whole, which has size {whole:?}; try other offsets of this part");
        Err(ParallelError::value(format!("a part of `{name}`"), self, expected))
    }

    fn numel(&self) -> i64 {
        self.boxes.iter().map(|boxed| boxed.size.iter().product::<i64>()).sum()
    }

    /// The number of elements that two parts share.
    fn shared(&self, other: &Self) -> i64 {
        let pairs = self.boxes.iter().flat_map(|own| other.boxes.iter().map(move |other| own.shared(other)));
        pairs.sum()
    }
}

impl fmt::Display for Told {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let boxes = self.boxes.iter().map(|boxed| format!("{:?} at {:?}", boxed.size, boxed.offsets));
        f.write_str(&boxes.collect::<Vec<_>>().join(" and "))
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
        // Engines give all replicas the values of the first.
        let has_values = mesh.losses().rank() == 0;
        let told = named.map(|named| Told::of(&named, &own, has_values)).collect::<Result<Vec<_>>>()?;
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
                let expected = "the same on all ranks; try the same configuration on all ranks, and the whole size in \
                                each part";
                return Err(ParallelError::value(what, got, expected));
            }
            match known.parts.iter().find(|part| part.is_same(told)) {
                Some(part) => part.check_alike(told)?,
                None => known.parts.push(told.clone()),
            }
        }
        tensors.values().try_for_each(Known::check)?;
        let before: Vec<_> = all[..group.rank()].iter().flatten().collect();
        let of_others = told.iter().filter(|told| before.iter().any(|other| other.is_same(told)));
        let of_others = of_others.map(|told| told.name.clone()).collect();
        let own = told.into_iter().map(|told| (told.name, told.boxes)).collect();
        Ok(Self { parts: Some(Parts { own, of_others, tensors }), ending: Ending::default() })
    }

    /// Whether ranks have different parts.
    pub fn is_cut(&self) -> bool {
        self.parts.is_some()
    }

    /// An error, the same on all ranks, for an optimizer whose steps need the whole of a tensor, if any is cut. Ranks along
    /// `pp` have different tensors, which are whole.
    pub(crate) fn check_optimizer(&self, optimizer: &dyn Optimizer) -> Result {
        let is_cut = |parts: &Parts| parts.tensors.values().any(|known| known.parts.len() > 1);
        match optimizer.needs_whole_tensors().filter(|_| self.parts.as_ref().is_some_and(is_cut)) {
            Some(what) => Err(ParallelError::WholeTensors { what }),
            None => Ok(()),
        }
    }

    /// Whether ranks wait for one another in forward and backward: they have different parts of the model, or of texts.
    pub(crate) fn waits(&self, mesh: &Mesh) -> bool {
        self.is_cut() || mesh.axis(Axis::Cp).size() > 1
    }

    /// An error if a step cannot be recorded as a CUDA graph.
    pub(crate) fn is_recordable(&self, mesh: &Mesh) -> std::result::Result<(), NotRecordable> {
        if self.waits(mesh) { Err(NotRecordable::ModelIsCut) } else { Ok(()) }
    }

    /// Ends the groups of ranks that wait for this one in forward and backward.
    pub(crate) fn abort(&self, mesh: &Mesh, cause: &str) {
        if !self.waits(mesh) {
            return;
        }
        for group in [mesh.axis(Axis::Pp), mesh.axis(Axis::Cp), mesh.axis(Axis::Tp), mesh.model()] {
            group.abort(cause);
        }
    }

    /// Begins an evaluation, whose end no rank has asked for.
    pub(crate) fn begin_evaluation(&self) {
        self.ending.clear();
    }

    /// Asks for the end of an evaluation. Ranks that wait for one another end together, before their next forward.
    pub(crate) fn cut_evaluation(&self, mesh: &Mesh) -> Cut {
        if !self.waits(mesh) {
            return Cut::Now;
        }
        self.ending.ask();
        Cut::AfterForward
    }

    /// Whether one of the ranks that wait for one another asks for the end. They all call it before each forward.
    #[track_caller]
    pub(crate) fn ends_evaluation(&self, mesh: &Mesh) -> Result<bool> {
        if !self.waits(mesh) {
            return Ok(false);
        }
        let groups = [mesh.axis(Axis::Cp), mesh.model()];
        self.ending.agree(groups.into_iter().filter(|group| group.size() > 1), call_site())
    }

    /// The places in the whole model of what an engine holds of this rank's part.
    pub(crate) fn placed(&self, state: Vec<Placed>) -> Vec<Placed> {
        let Some(parts) = &self.parts else { return state };
        let in_whole = |placed: Placed| {
            let is_saved_here = placed.is_saved_here && !parts.of_others.contains(&placed.name);
            let (Some(own), Some(known)) = (parts.own.get(&placed.name), parts.tensors.get(&placed.name))
            else {
                return Placed { is_saved_here, ..placed };
            };
            let mut held: Vec<_> = own.iter().filter_map(|boxed| boxed.within(&placed)).collect();
            let offsets = match &held[..] {
                [one] => one.offsets.clone(),
                _ => {
                    placed.offsets.iter().zip(&own[0].offsets).map(|(in_part, part)| in_part + part).collect()
                }
            };
            if held.len() < 2 {
                held.clear();
            }
            Placed { whole: known.size.clone(), offsets, is_saved_here, boxes: held, ..placed }
        };
        state.into_iter().map(in_whole).collect()
    }

    /// All tensors of the model; `own` are those of this rank's part.
    pub(crate) fn tensors(&self, own: impl FnOnce() -> Vec<Whole>) -> Vec<Whole> {
        let Some(parts) = &self.parts else { return own() };
        parts
            .tensors
            .iter()
            .map(|(name, known)| Whole { name: name.clone(), size: known.size.clone() })
            .collect()
    }

    /// Those of these parameters that no other part counts.
    pub(crate) fn counted(&self, parameters: &[Named]) -> Vec<Named> {
        let is_counted =
            |named: &&Named| self.parts.as_ref().is_none_or(|parts| !parts.of_others.contains(&named.name));
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
        let Some(parts) = &self.parts else { return part() };
        let Known { size, kind, .. } =
            parts.tensors.get(name).ok_or_else(|| ParallelError::no_tensor(name))?;
        let _no_grad = tch::no_grad_guard();
        let whole = Tensor::f_zeros(size, (*kind, Device::Cpu))?;
        let mut device = Device::Cpu;
        if let Some(boxes) = parts.own.get(name) {
            let own = part()?;
            device = own.device();
            for PlacedBox { at, offsets, size } in boxes {
                copy_into(&whole, offsets, &narrowed(&own, at, size)?)?;
            }
        }
        // As bytes, of which all ranks that have one have the same: a sum of floats would not keep a negative zero.
        let mut bytes = whole.f_view([-1])?.f_view_dtype(Kind::Uint8)?;
        mesh.model().all_reduce_tensor(&mut bytes, ReduceOp::Max)?;
        Ok(whole.f_to_device(device)?)
    }
}

/// A hash of a tensor's values.
fn hash(tensor: &Tensor) -> Result<u64> {
    let host = tensor.f_detach()?.f_to_device(Device::Cpu)?.f_contiguous()?;
    let mut hasher = DefaultHasher::new();
    bytes(&host)?.hash(&mut hasher);
    Ok(hasher.finish())
}

/// Copies a part to its place in the whole tensor.
pub(crate) fn copy_into(whole: &Tensor, offsets: &[i64], part: &Tensor) -> Result {
    Ok(narrowed(whole, offsets, &part.size())?.f_copy_(part)?)
}

#[cfg(test)]
mod tests;
