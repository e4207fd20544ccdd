//! Master weights: f32 copies of 16-bit parameters, in which steps add up that are too small for 16 bits.
//!
//! ```text
//!   parameter (bf16) ─ forward, backward ─▶ gradient (bf16) ─ copied ─▶ gradient (f32)
//!        ▲                                                                  ▼ step
//!        └────────────────────── rounded ──────────────────────── master weight (f32)
//! ```
//! Our own kernels do all that follows backward in one pass over memory, if they support the optimizer
//! ([`Optimizer::step_copies`]): on a GPU SGD and Adam, on a CPU all but SGD.
//!
//! [`MasterKind::Split`] keeps only what a bf16 parameter lacks of its f32 weight: 16 bits, from which both together give
//! the same bits as a copy. That takes 2 bytes less per parameter.
//!
//! A bf16 number has 8 bits of precision: near 1 it cannot grow by less than 1/128, and a step of 1e-3 changes nothing.

use std::collections::HashMap;
use std::sync::Arc;

use tch::{Device, Kind, Tensor, no_grad};

use super::groups::ParameterGroups;
use super::state::{OptimizerState, StateError};
use super::trained::gradient_of;
use super::{CopiedParameter, Division, Optimizer, OwnRows};
use crate::cuda::is_recorded;
use crate::error::TorchError;
use crate::foreach::foreach_copy;
use crate::fused::StepTensors;
use crate::grad::{grad, mark_written, set_grad};
use crate::kernels::floats::{elements, elements_mut};
use crate::kernels::{join_all, split_all};
use crate::memory_format::has_layout_of;
use crate::named::Named;
use crate::recordable::NotRecordable;

/// The slot of a master weight in a saved state.
const MASTER: &str = "master";

/// How master weights are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MasterKind {
    /// As f32 copies.
    #[default]
    Copy,
    /// As the 16 bits that a bf16 parameter lacks. A master weight in the middle between two bf16 numbers is rounded away
    /// from zero, and with copies to the even one; all else is the same to the bit. Only on a CPU, for parameters in
    /// bf16.
    Split,
}

/// Wraps an optimizer so that it steps f32 copies of parameters in `BFloat16` or `Half`. Parameters in f32 are stepped
/// directly.
///
/// ```
/// use drumline_torch::{MasterWeights, Named, Optimizer, Sgd, SgdOptions, set_grad};
/// use tch::{Device, Kind, Tensor};
///
/// let tensor = Tensor::ones([1], (Kind::BFloat16, Device::Cpu)).set_requires_grad(true);
/// let weight = Named { name: "weight".into(), tensor };
/// let options = SgdOptions { lr: 1e-3, ..Default::default() };
/// let mut optimizer = MasterWeights::new(vec![weight.clone()], |copies| Sgd::new(copies, options))?;
/// for _ in 0..100 {
///     set_grad(&weight.tensor, Some(&weight.tensor.ones_like()))?;
///     optimizer.step()?;
/// }
/// assert!((weight.tensor.double_value(&[0]) - 0.9).abs() < 0.01); // bf16 alone would still be at 1
/// # Ok::<(), drumline_torch::TorchError>(())
/// ```
#[derive(Debug)]
pub struct MasterWeights<O> {
    inner: O,
    kind: MasterKind,
    pairs: Vec<Pair>,
    /// The parameters in whose place others are stepped: backward may still leave gradients there.
    replaced: Vec<Tensor>,
    /// Whether all copies must be refreshed: before the first step the parameters may still be loaded or broadcast.
    are_stale: bool,
    /// The autograd version of each parameter after the last step.
    versions: Vec<i64>,
}

/// A parameter and its copy; the same tensor if it needs no copy, or is the high half of its master weight.
#[derive(Debug)]
struct Pair {
    parameter: Named,
    master: Tensor,
    low: Option<Tensor>,
    /// Master weights that were loaded and not split yet: the program may still load the parameter itself.
    loaded: Option<Tensor>,
}

impl Pair {
    fn new(parameter: &Named, kind: MasterKind) -> Result<Self, TorchError> {
        let tensor = &parameter.tensor;
        if kind == MasterKind::Split && matches!(tensor.kind(), Kind::BFloat16 | Kind::Half) {
            return Self::split(parameter);
        }
        let master = match tensor.kind() {
            Kind::BFloat16 | Kind::Half => {
                // Its values are those of the parameter at the first step.
                let (size, stride) = (tensor.size(), tensor.stride());
                tensor
                    .f_new_empty_strided(size, stride, (Kind::Float, tensor.device()))?
                    .set_requires_grad(true)
            }
            _ => tensor.shallow_clone(),
        };
        Ok(Self { parameter: parameter.clone(), master, low: None, loaded: None })
    }

    fn split(parameter: &Named) -> Result<Self, TorchError> {
        let tensor = &parameter.tensor;
        if tensor.kind() != Kind::BFloat16 || tensor.device() != Device::Cpu {
            let reason = "only parameters in bf16 on a CPU have split master weights; try MasterKind::Copy";
            let cause = TorchError::Unsupported { operation: "split a master weight", reason };
            return Err(TorchError::Parameter { name: parameter.name.clone(), cause: Box::new(cause) });
        }
        let options = (Kind::Int16, Device::Cpu);
        let low = tensor.f_new_empty_strided(tensor.size(), tensor.stride(), options)?.f_zero_()?;
        let master = tensor.shallow_clone();
        Ok(Self { parameter: parameter.clone(), master, low: Some(low), loaded: None })
    }

    /// The f32 master weight, as a new tensor if it is split.
    fn whole(&self) -> Result<Tensor, TorchError> {
        let Some(low) = &self.low else { return Ok(self.master.f_detach()?) };
        if let Some(loaded) = &self.loaded {
            return Ok(loaded.shallow_clone());
        }
        let tensor = &self.master;
        let options = (Kind::Float, Device::Cpu);
        let mut whole = tensor.f_new_empty_strided(tensor.size(), tensor.stride(), options)?;
        join_all(elements(tensor)?, elements(low)?, elements_mut(&mut whole)?);
        Ok(whole)
    }

    /// Splits the master weights that were loaded.
    fn split_loaded(&mut self) -> Result<(), TorchError> {
        if let (Some(loaded), Some(low)) = (self.loaded.take(), &mut self.low) {
            let mut high = self.master.f_detach()?;
            split_all(elements(&loaded)?, elements_mut(&mut high)?, elements_mut(low)?);
            mark_written(&self.master)?;
        }
        Ok(())
    }

    /// Refreshes the elements of the copy whose rounded value is not the parameter's: the program has changed those.
    fn refresh(&mut self) -> Result<(), TorchError> {
        let (parameter, master) = (self.parameter.tensor.f_detach()?, self.master.f_detach()?);
        let is_own = parameter.f_eq_tensor(&master.f_to_kind(parameter.kind())?)?;
        let taken = master.f_where_self(&is_own, &parameter.f_to_kind(master.kind())?)?;
        Ok(no_grad(|| self.master.f_copy_(&taken))?)
    }

    /// Frees the memory of a copy that is not stepped: the wrapped optimizer still has the tensor.
    fn free_copy(&mut self) -> Result<(), TorchError> {
        if self.master.kind() != self.parameter.tensor.kind() {
            self.master.f_set_data(&Tensor::f_empty([0], (self.master.kind(), self.master.device()))?)?;
        }
        Ok(())
    }

    fn is_copied(&self) -> bool {
        self.low.is_some() || self.parameter.tensor.kind() != self.master.kind()
    }

    /// A gradient, and the tensor for it in f32: the copy's gradient if it has one, so that a captured graph finds it
    /// again.
    fn place(&self, found: &Tensor) -> Result<(Tensor, Tensor), TorchError> {
        let place = match grad(&self.master)? {
            Some(place) => place,
            None => {
                let made = no_grad(|| self.master.f_empty_like())?;
                set_grad(&self.master, Some(&made))?;
                made
            }
        };
        let found = with_strides_of(found, &place)?;
        Ok((place, found))
    }
}

/// The copied parameters that have a gradient. Copies of the others lose the gradient of an earlier step.
fn with_gradients(pairs: &[Pair]) -> Result<(Vec<&Pair>, Vec<CopiedParameter<'_>>), TorchError> {
    let (mut found, mut copies) = (Vec::new(), Vec::new());
    for pair in pairs.iter().filter(|pair| pair.is_copied()) {
        let Named { name, tensor } = &pair.parameter;
        match gradient_of(&pair.parameter)? {
            Some(grad) => {
                found.push(pair);
                copies.push(CopiedParameter { name, parameter: tensor, grad, low: pair.low.as_ref() });
            }
            None => set_grad(&pair.master, None)?,
        }
    }
    Ok((found, copies))
}

/// Casts gradients to f32, for the copies.
fn cast_gradients(pairs: &[&Pair], copies: &[CopiedParameter<'_>]) -> Result<(), TorchError> {
    let places = pairs.iter().zip(copies).map(|(pair, copied)| pair.place(&copied.grad));
    let (places, found): (Vec<_>, Vec<_>) = places.collect::<Result<Vec<_>, _>>()?.into_iter().unzip();
    foreach_copy(&places.iter().collect::<Vec<_>>(), &found.iter().collect::<Vec<_>>())
}

/// The same tensor, with the strides of `like` for dims of size 1, where strides do not matter: libtorch copies lists
/// of tensors with equal strides in one kernel.
fn with_strides_of(tensor: &Tensor, like: &Tensor) -> Result<Tensor, TorchError> {
    let strides = like.stride();
    if !has_layout_of(tensor, like) || tensor.stride() == strides {
        return Ok(tensor.shallow_clone());
    }
    Ok(tensor.f_as_strided(tensor.size(), &strides[..], None)?)
}

impl<O: Optimizer> MasterWeights<O> {
    /// `make` creates the optimizer of the copies, which have the parameters' names.
    pub fn new(
        parameters: impl Into<ParameterGroups>,
        make: impl FnOnce(ParameterGroups) -> Result<O, TorchError>,
    ) -> Result<Self, TorchError> {
        Self::with_kind(MasterKind::Copy, parameters, make)
    }

    /// Like [`new`](Self::new), with a choice of how master weights are kept.
    pub fn with_kind(
        kind: MasterKind,
        parameters: impl Into<ParameterGroups>,
        make: impl FnOnce(ParameterGroups) -> Result<O, TorchError>,
    ) -> Result<Self, TorchError> {
        let (mut groups, mut pairs) = (parameters.into(), Vec::new());
        for parameter in groups.0.iter_mut().flat_map(|group| &mut group.parameters) {
            let pair = Pair::new(parameter, kind)?;
            parameter.tensor = pair.master.shallow_clone();
            pairs.push(pair);
        }
        let mut inner = make(groups)?;
        if kind == MasterKind::Split {
            inner.split_master_weights()?;
        }
        Ok(Self { inner, kind, pairs, replaced: Vec::new(), are_stale: true, versions: Vec::new() })
    }

    fn versions(&self) -> Vec<i64> {
        self.copied().map(|pair| pair.parameter.tensor.internal_version()).collect()
    }

    fn copied(&self) -> impl Iterator<Item = &Pair> {
        self.pairs.iter().filter(|pair| pair.is_copied())
    }

    /// A refresh that is recorded would run again with each launch.
    fn check_not_recorded(&self) -> Result<(), TorchError> {
        for pair in self.copied() {
            if is_recorded(pair.parameter.tensor.device())? {
                let parameter = pair.parameter.name.clone();
                return Err(NotRecordable::StaleMasterWeight { parameter }.into());
            }
        }
        Ok(())
    }

    /// The copied parameters, and their copies.
    fn both(&self) -> (Vec<&Tensor>, Vec<&Tensor>) {
        self.copied().map(|pair| (&pair.parameter.tensor, &pair.master)).unzip()
    }
}

impl<O: Optimizer> Optimizer for MasterWeights<O> {
    fn step_with(&mut self, tensors: StepTensors<'_>) -> Result<(), TorchError> {
        self.refresh_master_weights()?;
        let (pairs, copies) = with_gradients(&self.pairs)?;
        if !copies.is_empty() && self.kind == MasterKind::Split {
            if !self.inner.step_copies(&copies, tensors)? {
                return Err(TorchError::Unsupported {
                    operation: "step split master weights",
                    reason: "gradients are not in bf16 like their parameters, or others are not in f32; try MasterKind::Copy",
                });
            }
        } else if !self.inner.step_copies(&copies, tensors)? {
            cast_gradients(&pairs, &copies)?;
            self.inner.step_with(tensors)?;
            let (parameters, masters): (Vec<_>, Vec<_>) =
                pairs.iter().map(|pair| (&pair.parameter.tensor, &pair.master)).unzip();
            foreach_copy(&parameters, &masters)?;
        }
        self.versions = self.versions();
        Ok(())
    }

    fn refresh_master_weights(&mut self) -> Result<(), TorchError> {
        let now = self.versions();
        if self.are_stale || now != self.versions {
            self.check_not_recorded()?;
        }
        if self.kind == MasterKind::Split {
            // The parameters are the high halves themselves.
            self.are_stale = false;
            self.pairs.iter_mut().try_for_each(Pair::split_loaded)?;
            self.versions = self.versions();
            return Ok(());
        }
        if self.are_stale {
            let (parameters, masters) = self.both();
            foreach_copy(&masters, &parameters)?;
            self.are_stale = false;
        } else if now != self.versions {
            let before = self.versions.iter().map(Some).chain(std::iter::repeat(None));
            let copied = self.pairs.iter_mut().filter(|pair| pair.is_copied());
            let changed =
                copied.zip(now.iter().zip(before)).filter(|(_, (now, before))| Some(*now) != *before);
            changed.into_iter().try_for_each(|(pair, _)| pair.refresh())?;
        }
        self.versions = now;
        Ok(())
    }

    fn keep_lr_on_device(&mut self) -> Result<(), TorchError> {
        self.inner.keep_lr_on_device()
    }

    fn zero_grad(&mut self) -> Result<(), TorchError> {
        let stepped = self.pairs.iter().map(|pair| &pair.parameter.tensor);
        stepped.chain(&self.replaced).try_for_each(|tensor| set_grad(tensor, None))
    }

    fn lr(&self) -> f64 {
        self.inner.lr()
    }

    fn set_lr(&mut self, lr: f64) {
        self.inner.set_lr(lr);
    }

    fn replace_parameters(
        &mut self,
        replaced: &mut dyn FnMut(&Named) -> Option<Tensor>,
    ) -> Result<(), TorchError> {
        self.replace(&mut |parameter| {
            let tensor = replaced(parameter)?;
            Some(OwnRows { whole: tensor.size(), tensor, first: 0 })
        })?;
        let masters = self.masters();
        self.inner.replace_parameters(&mut |copy| Some(masters.get(&copy.name)?.shallow_clone()))
    }

    fn divide(&mut self, division: &Division<'_>) -> Result<(), TorchError> {
        let found = self.replace(&mut |parameter| (division.rows)(parameter))?;
        let masters = self.masters();
        let rows = |copy: &Named| {
            let (first, whole) = found.get(&copy.name)?.clone();
            Some(OwnRows { tensor: masters.get(&copy.name)?.shallow_clone(), first, whole })
        };
        self.inner.divide(&Division { group: Arc::clone(&division.group), rows: &rows })
    }

    fn split_master_weights(&mut self) -> Result<(), TorchError> {
        self.inner.split_master_weights()
    }

    fn parameters(&self) -> Vec<Named> {
        self.pairs.iter().map(|pair| pair.parameter.clone()).collect()
    }

    /// The state of the wrapped optimizer, with the copies as `<parameter>.master`.
    fn state(&self) -> OptimizerState {
        let mut state = self.inner.state();
        if !self.are_stale {
            state.tensors.extend(self.copied().map(|pair| Named {
                name: format!("{}.{MASTER}", pair.parameter.name),
                tensor: pair.whole().expect("there is host memory for a copy of the master weights"),
            }));
        }
        state
    }

    fn load_state(&mut self, state: &OptimizerState) -> Result<(), TorchError> {
        self.load_state_of(state, &|_| true)
    }

    fn load_state_of(
        &mut self,
        state: &OptimizerState,
        wanted: &dyn Fn(&str) -> bool,
    ) -> Result<(), TorchError> {
        let is_master = |named: &&Named| named.name.rsplit_once('.').is_some_and(|(_, slot)| slot == MASTER);
        let (saved, rest): (Vec<_>, Vec<_>) = state.tensors.iter().partition(is_master);
        // A state from before the first step has no copies.
        let is_wanted = |pair: &&Pair| wanted(&pair.parameter.name);
        let is_begun = !(rest.is_empty() && saved.is_empty());
        let masters = if is_begun { self.saved(&saved, is_wanted)? } else { Vec::new() };
        let rest = rest.into_iter().cloned().collect();
        self.inner.load_state_of(&OptimizerState { tensors: rest, ..state.clone() }, wanted)?;
        if is_begun || self.copied().any(|pair| is_wanted(&pair)) {
            self.are_stale = !is_begun;
        }
        if self.kind == MasterKind::Split {
            let pairs = self.pairs.iter_mut().filter(|pair| pair.is_copied() && wanted(&pair.parameter.name));
            for (pair, master) in pairs.zip(masters) {
                let (tensor, options) = (&pair.master, (Kind::Float, Device::Cpu));
                let mut loaded = tensor.f_new_empty_strided(tensor.size(), tensor.stride(), options)?;
                no_grad(|| loaded.f_copy_(master))?;
                pair.loaded = Some(loaded);
            }
            return Ok(());
        }
        let own: Vec<_> = self.copied().filter(is_wanted).map(|pair| &pair.master).collect();
        if masters.is_empty() { Ok(()) } else { foreach_copy(&own, &masters) }
    }

    fn state_bytes(&self, parameter: &Named) -> Option<usize> {
        let pair = self.pairs.iter().find(|pair| pair.parameter.name == parameter.name)?;
        if pair.low.is_some() {
            // A saved state has whole master weights, which are not the memory that they are kept in.
            return None;
        }
        let copy = Named { name: parameter.name.clone(), tensor: pair.master.shallow_clone() };
        let bytes = pair.master.numel() * pair.master.kind().elt_size_in_bytes();
        Some(self.inner.state_bytes(&copy)? + if pair.is_copied() { bytes } else { 0 })
    }
}

impl<O: Optimizer> MasterWeights<O> {
    /// Replaces the parameters. Returns the first row and the whole shape of each.
    fn replace(
        &mut self,
        rows: &mut dyn FnMut(&Named) -> Option<OwnRows>,
    ) -> Result<HashMap<String, (i64, Vec<i64>)>, TorchError> {
        let (mut pairs, mut found) = (Vec::new(), HashMap::new());
        for Pair { parameter, .. } in &self.pairs {
            let Some(OwnRows { tensor, first, whole }) = rows(parameter) else { continue };
            let name = parameter.name.clone();
            pairs.push(Pair::new(&Named { name: name.clone(), tensor }, self.kind)?);
            found.insert(name, (first, whole));
        }
        self.pairs.iter_mut().try_for_each(Pair::free_copy)?;
        self.replaced = self.pairs.iter().map(|pair| pair.parameter.tensor.shallow_clone()).collect();
        (self.pairs, self.are_stale, self.versions) = (pairs, true, Vec::new());
        Ok(found)
    }

    /// What the wrapped optimizer steps, by name.
    fn masters(&self) -> HashMap<String, Tensor> {
        let master = |pair: &Pair| (pair.parameter.name.clone(), pair.master.shallow_clone());
        self.pairs.iter().map(master).collect()
    }

    /// The saved copies of the copied parameters that are wanted, in their order.
    fn saved<'a>(
        &self,
        saved: &[&'a Named],
        is_wanted: impl Fn(&&Pair) -> bool,
    ) -> Result<Vec<&'a Tensor>, TorchError> {
        let find = |pair: &Pair| {
            let name = format!("{}.{MASTER}", pair.parameter.name);
            let found = saved.iter().find(|named| named.name == name);
            let tensor =
                found.map(|named| &named.tensor).filter(|tensor| tensor.size() == pair.master.size());
            tensor.ok_or_else(|| {
                let (shape, kind) = (pair.master.size(), pair.parameter.tensor.kind());
                StateError::NoMasterWeight { name, shape, kind }.into()
            })
        };
        self.copied().filter(is_wanted).map(find).collect()
    }
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;
    use crate::optim::{AdamOptions, AdamW, Sgd, SgdOptions};

    fn leaf(name: &str, kind: Kind) -> Named {
        let tensor = Tensor::ones([3], (kind, Device::Cpu)).set_requires_grad(true);
        Named { name: name.into(), tensor }
    }

    fn small_steps(optimizer: &mut dyn Optimizer, num: usize) {
        for _ in 0..num {
            optimizer.zero_grad().unwrap();
            for Named { tensor, .. } in optimizer.parameters() {
                set_grad(&tensor, Some(&no_grad(|| tensor.ones_like()))).unwrap();
            }
            optimizer.step().unwrap();
        }
    }

    fn sgd(parameters: impl Into<ParameterGroups>) -> Result<Sgd, TorchError> {
        Sgd::new(parameters, SgdOptions { lr: 1e-4, ..SgdOptions::default() })
    }

    fn first(named: &Named) -> f64 {
        named.tensor.double_value(&[0])
    }

    #[test]
    fn steps_below_the_resolution_add_up() {
        for kind in [Kind::BFloat16, Kind::Half] {
            let (with, without) = (leaf("a", kind), leaf("a", kind));
            small_steps(&mut MasterWeights::new(vec![with.clone()], sgd).unwrap(), 1000);
            small_steps(&mut sgd(vec![without.clone()]).unwrap(), 1000);
            assert!((first(&with) - 0.9).abs() < 0.004, "{kind:?}: {}", first(&with));
            assert_eq!(first(&without), 1.0, "the control loses them: {kind:?}");
        }
    }

    #[test]
    fn parameters_in_f32_are_stepped_directly() {
        let (short, long) = (leaf("short", Kind::BFloat16), leaf("long", Kind::Float));
        let mut optimizer = MasterWeights::new(vec![short, long.clone()], sgd).unwrap();
        small_steps(&mut optimizer, 1);
        assert_eq!(first(&long), f64::from(1.0 - 1e-4f32));
        let names: Vec<_> = optimizer.state().tensors.into_iter().map(|named| named.name).collect();
        assert_eq!(names, ["short.master"]);
    }

    #[test]
    fn without_a_gradient_neither_parameter_nor_copy_changes() {
        let (trained, frozen) = (leaf("trained", Kind::BFloat16), leaf("frozen", Kind::BFloat16));
        let both = [trained.clone(), frozen.clone()];
        let options = SgdOptions { lr: 1.0, ..SgdOptions::default() };
        let mut optimizer = MasterWeights::new(both.to_vec(), |copies| Sgd::new(copies, options)).unwrap();
        let mut step_of = |with: &[&Named]| {
            optimizer.zero_grad().unwrap();
            for Named { tensor, .. } in with {
                set_grad(tensor, Some(&no_grad(|| tensor.ones_like()))).unwrap();
            }
            optimizer.step().unwrap();
            let masters: Vec<_> = optimizer.state().tensors.iter().map(first).collect();
            assert_eq!(masters, both.each_ref().map(first), "copies equal their parameters");
            masters
        };
        assert_eq!(step_of(&[&trained, &frozen]), [0.0, 0.0]);
        assert_eq!(step_of(&[&trained]), [-1.0, 0.0]);
        assert_eq!(step_of(&[]), [-1.0, 0.0]);
        assert_eq!(step_of(&[&trained, &frozen]), [-2.0, -1.0]);
    }

    #[test]
    fn weights_loaded_before_the_first_step_reach_the_copies() {
        let parameter = leaf("a", Kind::BFloat16);
        let mut optimizer = MasterWeights::new(vec![parameter.clone()], sgd).unwrap();
        let _ = no_grad(|| parameter.tensor.shallow_clone().fill_(4.0));
        small_steps(&mut optimizer, 1);
        assert_eq!(first(&parameter), 4.0);
        assert_eq!(first(&optimizer.state().tensors[0]), f64::from(4.0 - 1e-4f32));
    }

    #[test]
    fn changed_parameters_refresh_their_copies_and_others_keep_small_steps() {
        let (changed, left) = (leaf("changed", Kind::BFloat16), leaf("left", Kind::BFloat16));
        let mut optimizer = MasterWeights::new(vec![changed.clone(), left.clone()], sgd).unwrap();
        small_steps(&mut optimizer, 3);
        let master = |optimizer: &MasterWeights<Sgd>, place: usize| first(&optimizer.state().tensors[place]);
        let before = master(&optimizer, 1);
        assert!(before < 1.0 - 2e-4 && first(&left) == 1.0, "{before}");
        no_grad(|| {
            let _ = changed.tensor.shallow_clone().fill_(4.0);
            // Written with the same values, as when weights are swapped for an evaluation and back.
            left.tensor.shallow_clone().copy_(&left.tensor.copy());
        });
        optimizer.refresh_master_weights().unwrap();
        assert_eq!((master(&optimizer, 0), master(&optimizer, 1)), (4.0, before));
        let _ = no_grad(|| changed.tensor.shallow_clone().fill_(8.0));
        small_steps(&mut optimizer, 1);
        assert_eq!((first(&changed), master(&optimizer, 0)), (8.0, f64::from(8.0 - 1e-4f32)));
    }

    #[test]
    fn gradients_of_replaced_parameters_are_cleared_and_their_copies_need_no_memory() {
        let (whole, dropped) = (leaf("whole", Kind::BFloat16), leaf("dropped", Kind::BFloat16));
        let both = [whole.clone(), dropped.clone()];
        let mut optimizer = MasterWeights::new(both.to_vec(), sgd).unwrap();
        let copies: Vec<_> = optimizer.pairs.iter().map(|pair| pair.master.shallow_clone()).collect();
        let rows = whole.tensor.detach().narrow(0, 0, 2).set_requires_grad(true);
        let replaced = |named: &Named| (named.name == "whole").then(|| rows.shallow_clone());
        optimizer.replace_parameters(&mut { replaced }).unwrap();
        assert!(copies.iter().all(|copy| copy.numel() == 0));
        for Named { tensor, .. } in &both {
            set_grad(tensor, Some(&no_grad(|| tensor.ones_like()))).unwrap();
        }
        optimizer.zero_grad().unwrap();
        assert!(both.iter().all(|named| grad(&named.tensor).unwrap().is_none()));
        small_steps(&mut optimizer, 1);
        assert_eq!(optimizer.state().tensors[0].tensor.size(), [2], "rows are stepped");
    }

    #[test]
    fn a_saved_state_resumes_to_the_same_bits_and_a_wrong_one_is_an_error() {
        let new = |parameters: Vec<Named>| {
            let options = AdamOptions { lr: 1e-4, ..AdamOptions::default() };
            MasterWeights::new(parameters, |copies| AdamW::new(copies, options)).unwrap()
        };
        let mut whole = new(vec![leaf("a", Kind::BFloat16)]);
        small_steps(&mut whole, 30);
        let copy = whole.parameters()[0].tensor.detach().copy().set_requires_grad(true);
        let mut resumed = new(vec![Named { name: "a".into(), tensor: copy }]);
        resumed.load_state(&whole.state()).unwrap();
        small_steps(&mut whole, 30);
        small_steps(&mut resumed, 30);
        for (a, b) in whole.state().tensors.iter().zip(resumed.state().tensors) {
            assert!(a.name == b.name && a.tensor.equal(&b.tensor), "{}", a.name);
        }
        let mut strange = whole.state();
        strange.tensors.retain(|named| named.name != "a.master");
        let error = resumed.load_state(&strange).unwrap_err().to_string();
        assert!(error.contains("it has no `a.master` of shape [3]"), "{error}");
        let begun = new(vec![leaf("a", Kind::BFloat16)]).state();
        resumed.load_state(&begun).unwrap();
    }
}
