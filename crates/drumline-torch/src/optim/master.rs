//! Master weights: f32 copies of 16-bit parameters, in which steps add up that are too small for 16 bits.
//!
//! ```text
//!   parameter (bf16) ─ forward, backward ─▶ gradient (bf16) ─ copied ─▶ gradient (f32)
//!        ▲                                                                  ▼ step
//!        └────────────────────── rounded ──────────────────────── master weight (f32)
//! ```
//! Our own kernels do all that follows backward in one pass over memory, if they support the optimizer
//! ([`Optimizer::step_copies`]): on a GPU all but Adafactor, on a CPU all but SGD.
//!
//! [`MasterKind::Split`] keeps only what a bf16 parameter lacks of its f32 weight: 16 bits, from which both together give
//! the same bits as a copy. That takes 2 bytes less per parameter.
//!
//! A bf16 number has 8 bits of precision: near 1 it cannot grow by less than 1/128, and a step of 1e-3 changes nothing.

mod pair;

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
use crate::grad::set_grad;
use crate::named::Named;
use crate::recordable::NotRecordable;
use pair::Pair;

/// The slot of a master weight in a saved state.
const MASTER: &str = "master";

/// How master weights are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MasterKind {
    /// As f32 copies.
    #[default]
    Copy,
    /// As the 16 bits that a bf16 parameter lacks. A master weight in the middle between two bf16 numbers is rounded away
    /// from zero, and with copies to the even one; all else is the same to the bit. Only for parameters in bf16. While other weights are in the parameters, such as averages for an evaluation, a saved state has the masters
    /// of those: use copies then.
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
    /// Whether steps look at twins alone.
    only_twins: bool,
}

/// Where the rows of a pair are in the whole parameter.
struct Place {
    first: i64,
    whole: Vec<i64>,
}

/// The rows that take the place of a parameter's copy.
fn rows_of_copy(pairs: &[(Pair, Place)], copy: &Named) -> Option<OwnRows> {
    let (pair, Place { first, whole }) = pairs.iter().find(|(pair, _)| pair.parameter.name == copy.name)?;
    Some(OwnRows { tensor: pair.master.shallow_clone(), first: *first, whole: whole.clone() })
}

/// The copied parameters that have a gradient. Copies of the others lose the gradient of an earlier step.
fn with_gradients<'a>(
    pairs: impl Iterator<Item = &'a Pair>,
) -> Result<(Vec<&'a Pair>, Vec<CopiedParameter<'a>>), TorchError> {
    let (mut found, mut copies) = (Vec::new(), Vec::new());
    for pair in pairs {
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
        Ok(Self {
            inner,
            kind,
            pairs,
            replaced: Vec::new(),
            are_stale: true,
            versions: Vec::new(),
            only_twins: false,
        })
    }

    fn versions(&self) -> Vec<i64> {
        self.copied().map(|pair| pair.parameter.tensor.internal_version()).collect()
    }

    fn copied(&self) -> impl Iterator<Item = &Pair> {
        self.pairs.iter().filter(|pair| pair.is_copied())
    }

    /// Whether the optimizer may have a pass for this step. On a CPU none has one for fp16, and then it steps all parameters by
    /// other kernels: those of a unit without copies are stepped by the same ones.
    fn has_one_pass(&self, copies: &[CopiedParameter<'_>]) -> bool {
        let is_in_fp16 = |pair: &Pair| {
            pair.parameter.tensor.kind() == Kind::Half && pair.parameter.tensor.device() == Device::Cpu
        };
        !copies.is_empty() || !self.copied().any(is_in_fp16)
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
        let only_twins = self.only_twins;
        let seen =
            self.pairs.iter().filter(|pair| pair.is_copied() && (!only_twins || pair.of_twin.is_some()));
        let (pairs, copies) = with_gradients(seen)?;
        if !copies.is_empty() && self.kind == MasterKind::Split {
            if !self.inner.step_copies(&copies, tensors)? {
                return Err(TorchError::Unsupported {
                    operation: "step split master weights",
                    reason: "gradients are not in bf16 like their parameters, or others are not in f32, or Adafactor has \
                             weights in channels last on a CPU; try MasterKind::Copy",
                });
            }
        } else if !self.has_one_pass(&copies) || !self.inner.step_copies(&copies, tensors)? {
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
        let of_twins = self.pairs.iter().filter_map(|pair| pair.of_twin.as_ref());
        let stepped = self.pairs.iter().map(|pair| &pair.parameter.tensor).chain(of_twins);
        stepped.chain(&self.replaced).try_for_each(|tensor| set_grad(tensor, None))
    }

    fn lr(&self) -> f64 {
        self.inner.lr()
    }

    fn set_lr(&mut self, lr: f64) {
        self.inner.set_lr(lr);
    }

    fn set_betas(&mut self, beta1: f64, beta2: f64) -> Result<bool, TorchError> {
        self.inner.set_betas(beta1, beta2)
    }

    fn needs_whole_tensors(&self) -> Option<&'static str> {
        self.inner.needs_whole_tensors()
    }

    fn replace_parameters(
        &mut self,
        replaced: &mut dyn FnMut(&Named) -> Option<Tensor>,
    ) -> Result<(), TorchError> {
        let pairs = self.pairs_of(&mut |parameter| {
            let tensor = replaced(parameter)?;
            Some(OwnRows { whole: tensor.size(), tensor, first: 0 })
        })?;
        self.inner.replace_parameters(&mut |copy| Some(rows_of_copy(&pairs, copy)?.tensor))?;
        self.set_pairs(pairs)
    }

    fn divide(&mut self, division: &Division<'_>) -> Result<(), TorchError> {
        let pairs = self.pairs_of(&mut |parameter| (division.rows)(parameter))?;
        let rows = |copy: &Named| rows_of_copy(&pairs, copy);
        self.inner.divide(&Division { group: Arc::clone(&division.group), rows: &rows })?;
        self.set_pairs(pairs)
    }

    /// The copies of twins are beside them.
    fn step_twins(&mut self, twins: &mut dyn FnMut(&Named) -> Option<Tensor>) -> Result<(), TorchError> {
        let mut made = HashMap::new();
        for Pair { parameter, .. } in &self.pairs {
            if let Some(tensor) = twins(parameter) {
                let name = parameter.name.clone();
                let twin = Pair::new(&Named { name: name.clone(), tensor }, self.kind)?;
                made.insert(name, twin);
            }
        }
        self.inner.step_twins(&mut |copy| made.get(&copy.name).map(|twin| twin.master.shallow_clone()))?;
        for pair in &mut self.pairs {
            let Some(twin) = made.remove(&pair.parameter.name) else { continue };
            pair.free_copy()?;
            let replaced = std::mem::replace(pair, twin);
            pair.of_twin = Some(replaced.parameter.tensor);
        }
        (self.are_stale, self.versions) = (true, Vec::new());
        Ok(())
    }

    fn limit_to_twins(&mut self, is_on: bool) -> Result<(), TorchError> {
        self.inner.limit_to_twins(is_on)?;
        self.only_twins = is_on;
        Ok(())
    }

    fn held_bytes(&self) -> usize {
        let bytes = |pair: &Pair| pair.master.numel() * pair.master.kind().elt_size_in_bytes();
        self.copied().filter(|pair| pair.low.is_none()).map(bytes).sum::<usize>() + self.inner.held_bytes()
    }

    fn split_master_weights(&mut self) -> Result<(), TorchError> {
        self.inner.split_master_weights()
    }

    fn parameters(&self) -> Vec<Named> {
        self.pairs.iter().map(Pair::of_program).collect()
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
                let (tensor, options) = (&pair.master, (Kind::Float, pair.master.device()));
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
    /// Pairs of what takes the place of parameters, and of each the first row and the whole shape.
    fn pairs_of(
        &self,
        rows: &mut dyn FnMut(&Named) -> Option<OwnRows>,
    ) -> Result<Vec<(Pair, Place)>, TorchError> {
        let mut pairs = Vec::new();
        for Pair { parameter, .. } in &self.pairs {
            let Some(OwnRows { tensor, first, whole }) = rows(parameter) else { continue };
            let pair = Pair::new(&Named { name: parameter.name.clone(), tensor }, self.kind)?;
            pairs.push((pair, Place { first, whole }));
        }
        Ok(pairs)
    }

    /// Replaces the pairs, after the wrapped optimizer has replaced its parameters.
    fn set_pairs(&mut self, pairs: Vec<(Pair, Place)>) -> Result<(), TorchError> {
        self.pairs.iter_mut().try_for_each(Pair::free_copy)?;
        self.replaced = self.pairs.iter().map(|pair| pair.parameter.tensor.shallow_clone()).collect();
        let pairs = pairs.into_iter().map(|(pair, _)| pair).collect();
        (self.pairs, self.are_stale, self.versions) = (pairs, true, Vec::new());
        Ok(())
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
mod tests;
