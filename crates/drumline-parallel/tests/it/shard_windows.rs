//! Optimizers of sharded models: windows that are dropped, several optimizers over one model, rows of master weights.

use std::collections::HashMap;

use anyhow::Result;
use drumline_comm::ProcessGroup;
use drumline_parallel::{Accumulation, Clip, DdpOptions, Engine, EngineOptions, GradSync, ShardOptions};
use drumline_plan::Stage;
use drumline_torch::{
    AdamOptions, AdamW, Autocast, MasterWeights, Named, Optimizer, ParameterGroup, ParameterGroups, Sgd,
    SgdOptions, TorchError, clip_grad_norm, no_decay_on_norms, parameters, weights_in,
};
use rank_test::ranks_test;
use tch::nn::{Module, VarStore};
use tch::{Device, Kind, Tensor};

use super::net::{Net, assert_close, loss, samples, values};
use super::shard::{BATCH, MakeOptimizer, STEPS, Training, adam, engine};

/// Stage 3 with parameters that are gathered when they are used.
fn gathered() -> ShardOptions {
    ShardOptions { gather_parameters: Some(true), keep_gathered: 20, ..ShardOptions::new(Stage::Zero3) }
}

/// Every way to divide a training; the last one gathers parameters when they are used.
pub(super) const WAYS: [fn() -> ShardOptions; 4] = [
    || ShardOptions::new(Stage::Zero1),
    || ShardOptions::new(Stage::Zero2),
    || ShardOptions::new(Stage::Zero3),
    gathered,
];

/// What a program does with a window that it does not finish.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Window {
    None,
    Dropped,
    /// The control: its gradients stay.
    Kept,
}

/// Parameters after two steps; before each of them a window is begun.
fn after_windows(
    group: &ProcessGroup,
    options: ShardOptions,
    window: Window,
    make: MakeOptimizer,
) -> Result<Vec<Tensor>> {
    let mut training = Training::new(group, options, make)?;
    let Training { net, engine, optimizer, .. } = &mut training;
    for step in 0..2 {
        optimizer.zero_grad()?;
        if window != Window::None {
            let (x, y) = samples(1000 + group.rank() as i64 * 8..1008 + group.rank() as i64 * 8);
            let output = engine.forward_with(GradSync::Accumulate, || net.forward(&x))?;
            engine.backward(&(loss(&output, &y) * 100.0), GradSync::Accumulate)?;
        }
        if window == Window::Dropped {
            optimizer.zero_grad()?;
        }
        let first = (step * 2 + group.rank() as i64) * 8;
        let (x, y) = samples(first..first + 8);
        let output = engine.forward_with(GradSync::Reduce, || net.forward(&x))?;
        engine.backward(&loss(&output, &y), GradSync::Reduce)?;
        engine.step(&mut **optimizer)?;
    }
    parameters(&training.vs).iter().map(|named| Ok(training.engine.full(&named.name)?)).collect()
}

fn adam_with_masters(params: Vec<Named>) -> Result<Box<dyn Optimizer>> {
    let make = |copies| AdamW::new(copies, AdamOptions { lr: 0.05, ..AdamOptions::default() });
    Ok(Box::new(MasterWeights::new(params, make)?))
}

ranks_test!(a_window_that_was_dropped_leaves_no_trace, 2, {
    let group = ProcessGroup::from_env()?;
    for accumulation in [Accumulation::All, Accumulation::OwnRows] {
        for options in WAYS {
            for make in [adam, adam_with_masters] {
                let after = |window| {
                    let options = ShardOptions { accumulation: Some(accumulation), ..options() };
                    after_windows(&group, options, window, make)
                };
                let plain = after(Window::None)?;
                assert_close(&after(Window::Dropped)?, &plain, 0.0);
                let kept = after(Window::Kept)?;
                assert!(!kept[0].equal(&plain[0]), "the control: {accumulation:?}");
            }
        }
    }
});

/// Adam with two parameter groups for the first layer, and SGD for the others.
fn two_optimizers(params: Vec<Named>) -> Result<(AdamW, Sgd)> {
    let (first, others): (Vec<_>, Vec<_>) =
        params.into_iter().partition(|named| named.name.starts_with("first"));
    let [decaying, kept] = no_decay_on_norms(first);
    let groups = [decaying, ParameterGroup { lr_factor: 3.0, ..kept }];
    let options = AdamOptions { lr: 0.02, weight_decay: Some(0.5), ..AdamOptions::default() };
    let momentum = SgdOptions { lr: 0.1, momentum: 0.9, ..SgdOptions::default() };
    Ok((AdamW::new(groups, options)?, Sgd::new(others, momentum)?))
}

const MAX_NORM: f64 = 0.05;

/// Parameters after steps of one process with the whole batch, and the norms of gradients.
fn two_optimizers_alone() -> Result<(Vec<Tensor>, Vec<f64>)> {
    let vs = VarStore::new(Device::Cpu);
    let net = Net::new(&vs, 0);
    let (mut adam, mut sgd) = two_optimizers(parameters(&vs))?;
    let mut norms = Vec::new();
    for step in 0..STEPS {
        adam.zero_grad()?;
        sgd.zero_grad()?;
        let (x, y) = samples(step * BATCH..(step + 1) * BATCH);
        loss(&net.forward(&x), &y).backward();
        norms.push(clip_grad_norm(&parameters(&vs), MAX_NORM)?);
        adam.step()?;
        sgd.step()?;
    }
    Ok((values(&parameters(&vs)), norms))
}

/// The same steps of all ranks. Also returns whether this rank holds nothing of what the second optimizer trains.
fn two_optimizers_divided(
    group: &ProcessGroup,
    options: ShardOptions,
) -> Result<(Vec<Tensor>, Vec<f64>, bool)> {
    let vs = VarStore::new(Device::Cpu);
    let net = Net::new(&vs, group.rank() as i64);
    let (mut adam, mut sgd) = two_optimizers(parameters(&vs))?;
    let engine = engine(group, &vs, options)?;
    engine.adopt(&mut adam)?;
    engine.adopt(&mut sgd)?;
    let (each, mut norms) = (BATCH / group.size() as i64, Vec::new());
    for step in 0..STEPS {
        adam.zero_grad()?;
        sgd.zero_grad()?;
        let first = step * BATCH + group.rank() as i64 * each;
        let (x, y) = samples(first..first + each);
        let output = engine.forward_with(GradSync::Reduce, || net.forward(&x))?;
        engine.backward(&loss(&output, &y), GradSync::Reduce)?;
        let both = [adam.parameters(), sgd.parameters()].concat();
        norms.extend(engine.clip(Clip::Norm(MAX_NORM), &both)?);
        engine.step(&mut adam)?;
        engine.step(&mut sgd)?;
    }
    let whole = parameters(&vs).iter().map(|named| Ok(engine.full(&named.name)?)).collect::<Result<_>>()?;
    Ok((whole, norms, sgd.parameters().is_empty()))
}

fn two_optimizers_train_as_alone() -> Result<()> {
    let group = ProcessGroup::from_env()?;
    let (expected, norms) = two_optimizers_alone()?;
    assert!(norms.iter().all(|norm| *norm > MAX_NORM), "all steps are clipped: {norms:?}");
    for options in WAYS {
        let (found, ours, _) = two_optimizers_divided(&group, options())?;
        assert_close(&found, &expected, 2e-6);
        let furthest = ours.iter().zip(&norms).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(furthest < 1e-6, "{ours:?}, expected {norms:?}");
    }
    Ok(())
}

ranks_test!(several_optimizers_step_one_model_on_two_ranks, 2, { two_optimizers_train_as_alone()? });
ranks_test!(several_optimizers_step_one_model_on_four_ranks, 4, {
    two_optimizers_train_as_alone()?;
    let group = ProcessGroup::from_env()?;
    let (_, _, has_nothing) = two_optimizers_divided(&group, ShardOptions::new(Stage::Zero3))?;
    assert!(
        group.all_gather_object(&has_nothing)?.contains(&true),
        "a rank steps nothing with the second one"
    );
});

/// libtorch's optimizers round the ends of a tensor otherwise than its middle: to the last bit of f32.
const MASTERS_DIFFER_BY: f64 = 1e-7;

type Begun = (VarStore, Box<dyn Engine>, Box<dyn Optimizer>);

/// A training in bf16: the engine, and the optimizer after some steps.
fn in_bf16(
    group: &ProcessGroup,
    options: impl EngineOptions + 'static,
    make: MakeOptimizer,
) -> Result<Begun> {
    let vs = VarStore::new(Device::Cpu);
    let net = Net::new(&vs, 0);
    weights_in(&parameters(&vs), Kind::BFloat16)?;
    let mut optimizer = make(parameters(&vs))?;
    let engine = engine(group, &vs, options)?;
    engine.adopt(&mut *optimizer)?;
    for step in 0..STEPS {
        let start = (step * 2 + group.rank() as i64) * 8;
        let (x, y) = samples(start..start + 8);
        optimizer.zero_grad()?;
        let output = engine.forward_with(GradSync::Reduce, || {
            let _autocast = Autocast::new(Device::Cpu, Kind::BFloat16);
            net.forward(&x)
        })?;
        engine.backward(&loss(&output.to_kind(Kind::Float), &y), GradSync::Reduce)?;
        engine.step(&mut *optimizer)?;
    }
    Ok((vs, engine, optimizer))
}

fn adamw(params: impl Into<ParameterGroups>) -> std::result::Result<AdamW, TorchError> {
    AdamW::new(params, AdamOptions { lr: 1e-3, ..AdamOptions::default() })
}

fn small_steps_of_masters(params: Vec<Named>) -> Result<Box<dyn Optimizer>> {
    Ok(Box::new(MasterWeights::new(params, adamw)?))
}

fn small_steps(params: Vec<Named>) -> Result<Box<dyn Optimizer>> {
    Ok(Box::new(adamw(params)?))
}

ranks_test!(bf16_parameters_have_master_rows, 2, {
    let group = ProcessGroup::from_env()?;
    let (_, _, ddp) = in_bf16(&group, DdpOptions::default(), small_steps_of_masters)?;
    let whole: HashMap<String, Tensor> =
        ddp.state().tensors.into_iter().map(|named| (named.name, named.tensor)).collect();
    for options in WAYS {
        let (_, engine, optimizer) = in_bf16(&group, options(), small_steps_of_masters)?;
        let rows: HashMap<String, Tensor> =
            optimizer.state().tensors.into_iter().map(|named| (named.name, named.tensor)).collect();
        let mut num_masters = 0;
        for placed in engine.state() {
            for slot in ["master", "exp_avg", "exp_avg_sq"] {
                let Some(rows) = rows.get(&format!("{}.{slot}", placed.name)) else { continue };
                let theirs = &whole[&format!("{}.{slot}", placed.name)];
                let theirs = theirs.narrow(0, placed.offsets[0], rows.size()[0]);
                assert_close(&[rows.detach()], &[theirs.detach()], MASTERS_DIFFER_BY);
                num_masters += usize::from(slot == "master");
            }
        }
        assert!(num_masters > 0, "this rank has rows of them");
    }
    // The control: without master weights, steps of this size are rounded away.
    let (vs, ..) = in_bf16(&group, DdpOptions::default(), small_steps)?;
    let lost = parameters(&vs).into_iter().filter_map(|Named { name, tensor }| {
        let master = whole.get(&format!("{name}.master"))?;
        Some(f64::try_from((tensor.to_kind(Kind::Float) - master).abs().max()).unwrap())
    });
    assert!(lost.fold(0.0, f64::max) > 1000.0 * MASTERS_DIFFER_BY);
});
