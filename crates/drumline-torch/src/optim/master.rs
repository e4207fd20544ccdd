//! f32 copies of parameters that are kept in fewer bits: what is too small for those is not lost, but added up in the copies.
//!
//! ```text
//!   parameter (bf16) ─ forward, backward ─▶ gradient (bf16) ─ copied ─▶ gradient (f32)
//!        ▲                                                                  ▼ step
//!        └────────────────────── rounded ──────────────────────── master weight (f32)
//! ```
//! On a GPU kernels of our own do all that follows the backward pass in one pass over memory, where they fit ([`Optimizer::step_copies`]).
//!
//! A bf16 number has 8 bits: near 1 it cannot grow by less than 1/128, and a learning rate of 1e-3 would change nothing.

use tch::{Kind, Tensor, no_grad};

use super::groups::ParameterGroups;
use super::state::OptimizerState;
use super::trained::gradient_of;
use super::{CopiedParameter, Optimizer};
use crate::cuda::is_recorded;
use crate::error::TorchError;
use crate::foreach::foreach_copy;
use crate::fused::StepTensors;
use crate::grad::{grad, set_grad};
use crate::memory_format::lies_as;
use crate::named::Named;

/// The slot of a master weight in a saved state.
const MASTER: &str = "master";

/// An optimizer of any kind that steps f32 copies of parameters in `BFloat16` or `Half`. Parameters in f32 are stepped as they are.
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
    pairs: Vec<Pair>,
    /// Whether the copies are older than the parameters: before the first step these may still be loaded, or come from another rank.
    are_stale: bool,
    /// How often each parameter had been written to after the last step.
    versions: Vec<i64>,
}

/// A parameter and its copy; the same tensor where none is needed.
#[derive(Debug)]
struct Pair {
    parameter: Named,
    master: Tensor,
}

impl Pair {
    fn new(parameter: &Named) -> Result<Self, TorchError> {
        let tensor = &parameter.tensor;
        let master = match tensor.kind() {
            Kind::BFloat16 | Kind::Half => {
                no_grad(|| tensor.f_detach()?.f_to_kind(Kind::Float))?.set_requires_grad(true)
            }
            _ => tensor.shallow_clone(),
        };
        Ok(Self { parameter: parameter.clone(), master })
    }

    /// The copy becomes the parameter where that is not the copy rounded: somebody has changed it.
    fn take_in(&mut self) -> Result<(), TorchError> {
        let (parameter, master) = (self.parameter.tensor.f_detach()?, self.master.f_detach()?);
        let is_own = parameter.f_eq_tensor(&master.f_to_kind(parameter.kind())?)?;
        let taken = master.f_where_self(&is_own, &parameter.f_to_kind(master.kind())?)?;
        Ok(no_grad(|| self.master.f_copy_(&taken))?)
    }

    fn is_copied(&self) -> bool {
        self.parameter.tensor.kind() != self.master.kind()
    }

    /// A gradient, and its place in f32: the copy's own where that has one, so that a captured graph finds it again.
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

/// The copied parameters that have a gradient. The copy of another has none either: it may have had one in an earlier step.
fn with_gradients(pairs: &[Pair]) -> Result<(Vec<&Pair>, Vec<CopiedParameter<'_>>), TorchError> {
    let (mut found, mut copies) = (Vec::new(), Vec::new());
    for pair in pairs.iter().filter(|pair| pair.is_copied()) {
        let Named { name, tensor } = &pair.parameter;
        match gradient_of(&pair.parameter)? {
            Some(grad) => {
                found.push(pair);
                copies.push(CopiedParameter { name, parameter: tensor, grad });
            }
            None => set_grad(&pair.master, None)?,
        }
    }
    Ok((found, copies))
}

/// Gradients in f32, for the copies.
fn bring_gradients(pairs: &[&Pair], copies: &[CopiedParameter<'_>]) -> Result<(), TorchError> {
    let places = pairs.iter().zip(copies).map(|(pair, copied)| pair.place(&copied.grad));
    let (places, found): (Vec<_>, Vec<_>) = places.collect::<Result<Vec<_>, _>>()?.into_iter().unzip();
    foreach_copy(&places.iter().collect::<Vec<_>>(), &found.iter().collect::<Vec<_>>())
}

/// The same tensor; strides of extents of 1, which mean nothing, are made those of `like`: lists of tensors whose strides are equal are copied at once.
fn with_strides_of(tensor: &Tensor, like: &Tensor) -> Result<Tensor, TorchError> {
    let strides = like.stride();
    if !lies_as(tensor, like) || tensor.stride() == strides {
        return Ok(tensor.shallow_clone());
    }
    Ok(tensor.f_as_strided(tensor.size(), &strides[..], None)?)
}

impl<O: Optimizer> MasterWeights<O> {
    /// `make` makes the optimizer of the copies, which have the parameters' names.
    pub fn new(
        parameters: impl Into<ParameterGroups>,
        make: impl FnOnce(ParameterGroups) -> Result<O, TorchError>,
    ) -> Result<Self, TorchError> {
        let (mut groups, mut pairs) = (parameters.into(), Vec::new());
        for parameter in groups.0.iter_mut().flat_map(|group| &mut group.parameters) {
            let pair = Pair::new(parameter)?;
            parameter.tensor = pair.master.shallow_clone();
            pairs.push(pair);
        }
        Ok(Self { inner: make(groups)?, pairs, are_stale: true, versions: Vec::new() })
    }

    fn versions(&self) -> Vec<i64> {
        self.copied().map(|pair| pair.parameter.tensor.internal_version()).collect()
    }

    fn copied(&self) -> impl Iterator<Item = &Pair> {
        self.pairs.iter().filter(|pair| pair.is_copied())
    }

    /// A copy that is recorded would be made with each launch, and never before.
    fn check_not_recorded(&self) -> Result<(), TorchError> {
        for pair in self.copied() {
            if is_recorded(pair.parameter.tensor.device())? {
                return Err(TorchError::Unfit(format!(
                    "parameter `{}` has changed since its f32 copy was made, and this step is recorded for a graph; \
                     try take_in_changes, or a step, before the recording",
                    pair.parameter.name
                )));
            }
        }
        Ok(())
    }

    /// The parameters, and their copies.
    fn both(&self) -> (Vec<&Tensor>, Vec<&Tensor>) {
        self.copied().map(|pair| (&pair.parameter.tensor, &pair.master)).unzip()
    }
}

impl<O: Optimizer> Optimizer for MasterWeights<O> {
    fn step_with(&mut self, tensors: StepTensors<'_>) -> Result<(), TorchError> {
        self.take_in_changes()?;
        let (pairs, copies) = with_gradients(&self.pairs)?;
        if !self.inner.step_copies(&copies, tensors)? {
            bring_gradients(&pairs, &copies)?;
            self.inner.step_with(tensors)?;
            let (parameters, masters) = self.both();
            foreach_copy(&parameters, &masters)?;
        }
        self.versions = self.versions();
        Ok(())
    }

    fn take_in_changes(&mut self) -> Result<(), TorchError> {
        let now = self.versions();
        if self.are_stale || now != self.versions {
            self.check_not_recorded()?;
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
            changed.into_iter().try_for_each(|(pair, _)| pair.take_in())?;
        }
        self.versions = now;
        Ok(())
    }

    fn keep_lr_on_device(&mut self) -> Result<(), TorchError> {
        self.inner.keep_lr_on_device()
    }

    fn zero_grad(&mut self) -> Result<(), TorchError> {
        self.pairs.iter().try_for_each(|pair| set_grad(&pair.parameter.tensor, None))
    }

    fn lr(&self) -> f64 {
        self.inner.lr()
    }

    fn set_lr(&mut self, lr: f64) {
        self.inner.set_lr(lr);
    }

    fn parameters(&self) -> Vec<Named> {
        self.pairs.iter().map(|pair| pair.parameter.clone()).collect()
    }

    /// That of the optimizer, with the copies as `<parameter>.master`.
    fn state(&self) -> OptimizerState {
        let mut state = self.inner.state();
        if !self.are_stale {
            state.tensors.extend(self.copied().map(|pair| Named {
                name: format!("{}.{MASTER}", pair.parameter.name),
                tensor: pair.master.detach(),
            }));
        }
        state
    }

    fn load_state(&mut self, state: &OptimizerState) -> Result<(), TorchError> {
        let is_master = |named: &&Named| named.name.rsplit_once('.').is_some_and(|(_, slot)| slot == MASTER);
        let (saved, rest): (Vec<_>, Vec<_>) = state.tensors.iter().partition(is_master);
        // One that has made no step has no copies of its own.
        let masters = if rest.is_empty() && saved.is_empty() { Vec::new() } else { self.saved(&saved)? };
        let rest = rest.into_iter().cloned().collect();
        self.inner.load_state(&OptimizerState { tensors: rest, ..state.clone() })?;
        self.are_stale = masters.is_empty();
        let own: Vec<_> = self.copied().map(|pair| &pair.master).collect();
        if masters.is_empty() { Ok(()) } else { foreach_copy(&own, &masters) }
    }
}

impl<O: Optimizer> MasterWeights<O> {
    /// The saved copies of all that are copied here, in their order.
    fn saved<'a>(&self, saved: &[&'a Named]) -> Result<Vec<&'a Tensor>, TorchError> {
        let find = |pair: &Pair| {
            let name = format!("{}.{MASTER}", pair.parameter.name);
            let found = saved.iter().find(|named| named.name == name);
            let tensor =
                found.map(|named| &named.tensor).filter(|tensor| tensor.size() == pair.master.size());
            tensor.ok_or_else(|| {
                TorchError::Unfit(format!(
                    "cannot load the state of an optimizer: it has no `{name}` of shape {:?}, the f32 copy of a parameter in {:?}; \
                     try the precision it was saved with",
                    pair.master.size(),
                    pair.parameter.tensor.kind()
                ))
            })
        };
        self.copied().map(find).collect()
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
    fn parameters_in_f32_are_stepped_as_they_are() {
        let (short, long) = (leaf("short", Kind::BFloat16), leaf("long", Kind::Float));
        let mut optimizer = MasterWeights::new(vec![short, long.clone()], sgd).unwrap();
        small_steps(&mut optimizer, 1);
        assert_eq!(first(&long), f64::from(1.0 - 1e-4f32));
        let names: Vec<_> = optimizer.state().tensors.into_iter().map(|named| named.name).collect();
        assert_eq!(names, ["short.master"]);
    }

    #[test]
    fn a_parameter_without_a_gradient_stays_and_so_does_its_copy() {
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
            assert_eq!(masters, both.each_ref().map(first), "copies are their parameters");
            masters
        };
        assert_eq!(step_of(&[&trained, &frozen]), [0.0, 0.0]);
        assert_eq!(step_of(&[&trained]), [-1.0, 0.0]);
        assert_eq!(step_of(&[]), [-1.0, 0.0]);
        assert_eq!(step_of(&[&trained, &frozen]), [-2.0, -1.0]);
    }

    #[test]
    fn weights_that_are_loaded_before_the_first_step_count() {
        let parameter = leaf("a", Kind::BFloat16);
        let mut optimizer = MasterWeights::new(vec![parameter.clone()], sgd).unwrap();
        let _ = no_grad(|| parameter.tensor.shallow_clone().fill_(4.0));
        small_steps(&mut optimizer, 1);
        assert_eq!(first(&parameter), 4.0);
        assert_eq!(first(&optimizer.state().tensors[0]), f64::from(4.0 - 1e-4f32));
    }

    #[test]
    fn what_others_change_counts_and_what_they_leave_keeps_its_small_steps() {
        let (changed, left) = (leaf("changed", Kind::BFloat16), leaf("left", Kind::BFloat16));
        let mut optimizer = MasterWeights::new(vec![changed.clone(), left.clone()], sgd).unwrap();
        small_steps(&mut optimizer, 3);
        let master = |optimizer: &MasterWeights<Sgd>, place: usize| first(&optimizer.state().tensors[place]);
        let before = master(&optimizer, 1);
        assert!(before < 1.0 - 2e-4 && first(&left) == 1.0, "{before}");
        no_grad(|| {
            let _ = changed.tensor.shallow_clone().fill_(4.0);
            // Written to, as by weights that are exchanged for an evaluation and back.
            left.tensor.shallow_clone().copy_(&left.tensor.copy());
        });
        optimizer.take_in_changes().unwrap();
        assert_eq!((master(&optimizer, 0), master(&optimizer, 1)), (4.0, before));
        let _ = no_grad(|| changed.tensor.shallow_clone().fill_(8.0));
        small_steps(&mut optimizer, 1);
        assert_eq!((first(&changed), master(&optimizer, 0)), (8.0, f64::from(8.0 - 1e-4f32)));
    }

    #[test]
    fn a_saved_state_goes_on_with_the_same_bits_and_a_strange_one_is_refused() {
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
        let told = resumed.load_state(&strange).unwrap_err().to_string();
        assert!(told.contains("it has no `a.master` of shape [3]"), "{told}");
        let begun = new(vec![leaf("a", Kind::BFloat16)]).state();
        resumed.load_state(&begun).unwrap();
    }
}
