//! Small steps, changed and loaded parameters, states, and both kinds of master weights.

use tch::Device;

use super::*;
use crate::grad::grad;
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

/// Steps of several sizes, with numbers that lie in the middle between two bf16 numbers among the masters.
fn trained_with(kind: MasterKind, begin: Option<&OptimizerState>) -> (Vec<Named>, OptimizerState) {
    let tensor = Tensor::arange(3000, (Kind::Float, Device::Cpu)).sin().to_kind(Kind::BFloat16);
    let parameter = Named { name: "a".into(), tensor: tensor.view([30, 100]).set_requires_grad(true) };
    let options = AdamOptions { lr: 1e-3, ..AdamOptions::default() };
    let all = vec![parameter, leaf("f32", Kind::Float)];
    let mut optimizer = MasterWeights::with_kind(kind, all, |copies| AdamW::new(copies, options)).unwrap();
    if let Some(state) = begin {
        optimizer.load_state(state).unwrap();
        // As a checkpoint restores the parameters: rounded from the masters.
        let master = state.tensors.iter().find(|named| named.name == "a.master").unwrap();
        let restored = master.tensor.to_kind(Kind::BFloat16);
        no_grad(|| optimizer.parameters()[0].tensor.shallow_clone().copy_(&restored));
    }
    small_steps(&mut optimizer, 20);
    (optimizer.parameters(), optimizer.state())
}

#[test]
fn both_kinds_have_the_same_state_and_load_each_others() {
    let assert_same = |one: &OptimizerState, other: &OptimizerState| {
        assert_eq!(one.tensors.len(), other.tensors.len());
        for a in &one.tensors {
            let b = other.tensors.iter().find(|b| b.name == a.name).unwrap();
            assert!(a.tensor.equal(&b.tensor), "{}", a.name);
        }
    };
    let kinds = [MasterKind::Copy, MasterKind::Split];
    let [copied, split] = kinds.map(|kind| trained_with(kind, None));
    assert_same(&copied.1, &split.1);
    assert!(copied.0[0].tensor.equal(&split.0[0].tensor));
    let mut middles = copied.1.clone();
    let master = middles.tensors.iter_mut().find(|named| named.name == "a.master").unwrap();
    let some = [0x3f80_8000u32, 0x3f81_8000, 0xbf80_8000].map(f32::from_bits);
    master.tensor = master.tensor.copy();
    no_grad(|| master.tensor.get(0).narrow(0, 0, 3).copy_(&Tensor::from_slice(&some)));
    let [copied, split] = kinds.map(|kind| trained_with(kind, Some(&middles)));
    assert_same(&copied.1, &split.1);
}

#[test]
fn what_cannot_be_split_is_an_error() {
    let of = |kind| {
        let options = AdamOptions::default();
        let all = vec![leaf("a", kind)];
        MasterWeights::with_kind(MasterKind::Split, all, |copies| AdamW::new(copies, options))
    };
    let error = of(Kind::Half).unwrap_err().to_string();
    assert!(error.contains("`a`") && error.ends_with("try MasterKind::Copy"), "{error}");
    let error =
        MasterWeights::with_kind(MasterKind::Split, vec![leaf("a", Kind::BFloat16)], sgd).unwrap_err();
    assert!(error.to_string().contains("this optimizer cannot step them"), "{error}");
    of(Kind::BFloat16).unwrap();
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

/// Copies gradients to twins and their values back, as an engine does.
fn step_twins(optimizer: &mut dyn Optimizer, twins: &[(Named, Tensor)]) {
    for (named, twin) in twins {
        set_grad(twin, grad(&named.tensor).unwrap().as_ref()).unwrap();
        set_grad(&named.tensor, None).unwrap();
    }
    optimizer.step().unwrap();
    for (named, twin) in twins {
        set_grad(twin, None).unwrap();
        no_grad(|| named.tensor.shallow_clone().copy_(twin));
    }
}

#[test]
fn twins_are_stepped_in_the_place_of_parameters() {
    let adam = |all: ParameterGroups| AdamW::new(all, AdamOptions { lr: 1e-2, ..AdamOptions::default() });
    let all = || vec![leaf("a", Kind::BFloat16), leaf("b", Kind::Float), leaf("c", Kind::BFloat16)];
    let (expected, trained) = (all(), all());
    let mut plain = MasterWeights::new(expected.clone(), adam).unwrap();
    let mut optimizer = MasterWeights::new(trained.clone(), adam).unwrap();
    let held = optimizer.held_bytes();
    let twin = |named: &Named| no_grad(|| named.tensor.copy()).set_requires_grad(true);
    let twins: Vec<_> = trained[..2].iter().map(|named| (named.clone(), twin(named))).collect();
    let of = |named: &Named| twins.iter().find(|(twin, _)| twin.name == named.name);
    optimizer.step_twins(&mut |named| of(named).map(|(_, twin)| twin.shallow_clone())).unwrap();
    assert_eq!(held, 24, "two copies of three elements");
    for (ours, known) in optimizer.parameters().iter().zip(&trained) {
        assert_eq!(ours.tensor.data_ptr(), known.tensor.data_ptr(), "the program sees the parameters");
    }
    for step in 0..4 {
        for params in [&expected, &trained] {
            for named in params {
                let value = no_grad(|| named.tensor.full_like(0.5 + f64::from(step)));
                set_grad(&named.tensor, Some(&value)).unwrap();
            }
        }
        plain.step().unwrap();
        step_twins(&mut optimizer, &twins);
        for (ours, theirs) in trained.iter().zip(&expected) {
            assert!(ours.tensor.equal(&theirs.tensor), "{} in step {step}", ours.name);
        }
        optimizer.zero_grad().unwrap();
        assert!(trained.iter().all(|named| grad(&named.tensor).unwrap().is_none()));
    }
    let states = [&plain as &dyn Optimizer, &optimizer].map(|optimizer| optimizer.state().tensors);
    assert!(states[0].iter().zip(&states[1]).all(|(one, other)| one.tensor.equal(&other.tensor)));
    let error = optimizer.step_twins(&mut |named| Some(twin(named))).unwrap_err().to_string();
    assert!(error.contains("it has made a step"), "{error}");
}

#[test]
fn a_limited_step_looks_at_twins_alone() {
    let (short, long) = (leaf("short", Kind::BFloat16), leaf("long", Kind::Float));
    let mut optimizer = MasterWeights::new(vec![short.clone(), long.clone()], sgd).unwrap();
    let twin = no_grad(|| short.tensor.copy()).set_requires_grad(true);
    optimizer.step_twins(&mut |named| (named.name == "short").then(|| twin.shallow_clone())).unwrap();
    optimizer.limit_to_twins(true).unwrap();
    small_steps(&mut optimizer, 1);
    assert_eq!(first(&long), 1.0);
    set_grad(&twin, Some(&no_grad(|| twin.full_like(1e4)))).unwrap();
    optimizer.step().unwrap();
    assert!(twin.double_value(&[0]) < 0.1);
    optimizer.limit_to_twins(false).unwrap();
    small_steps(&mut optimizer, 1);
    assert!(first(&long) < 1.0);
}
