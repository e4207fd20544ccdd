//! `Accelerator` with a model that is cut into stages: the losses and weights of one rank, with windows, replicas, clipping,
//! fp16 and evaluation.

use std::rc::Rc;

use drumline::ProcessGroup;
use drumline::engine::ModelParallel;
use drumline::engine::pipeline::{
    FirstValues, LayerList, LayerSpec, Linear, PipelineOptions, Schedule, Stages, layer_fn,
};
use drumline::optim::{Optimizer, SgdOptions, clip_grad_norm, parameters};
use drumline::trainer::{Precision, StagedModel};
use rank_test::ranks_test;
use tch::Reduction;

use super::*;

const EPOCHS: u64 = 2;
const MAX_NORM: f64 = 0.2;
/// Turns in a window.
const TURNS: usize = 4;

fn layers(features: i64, classes: i64) -> LayerList {
    let mut layers = LayerList::default();
    for (name, inputs, outputs) in [("fc1", features, 8), ("fc2", 8, 8), ("fc3", 8, classes)] {
        layers.push(LayerSpec::new(name, move |layer| {
            let linear = Linear::new(&layer.path(), inputs, outputs)?;
            Ok(layer_fn(move |xs, _| Ok(vec![linear.apply(&xs[0].f_tanh()?)?])))
        }));
    }
    layers
}

/// The sizes of a sample: features, and classes.
fn sizes() -> (i64, i64) {
    let (x, y) = collate((0..SAMPLES).map(sample).collect()).unwrap();
    (x.size()[1], y.max().int64_value(&[]) + 1)
}

fn loss_of(outputs: &[Tensor], y: &Tensor) -> Tensor {
    outputs[0].cross_entropy_loss::<Tensor>(y, None, Reduction::Mean, -100, 0.0)
}

/// The losses of all steps, and the weights after the last by name.
type Outcome = (Vec<f64>, Vec<(String, Tensor)>);

/// One process, one batch a step, nothing prepared.
fn alone() -> anyhow::Result<Outcome> {
    let (features, classes) = sizes();
    let group = ProcessGroup::from_env()?;
    let own = group.split(Some(group.rank() as u32), 0)?.unwrap();
    let mesh = drumline::comm::Mesh::along(&own, drumline::comm::Axis::Pp)?;
    let store = VarStore::new(Device::Cpu);
    let options = PipelineOptions { first_values: FirstValues::OfModel(3), ..Default::default() };
    Stages::build(&layers(features, classes), &store, &mesh, &options)?;
    let variables = store.variables();
    let forward = |x: &Tensor| {
        ["fc1", "fc2", "fc3"].iter().fold(x.shallow_clone(), |x, name| {
            let of = |part: &str| &variables[&format!("{name}.{part}")];
            x.tanh().linear(of("weight"), Some(of("bias")))
        })
    };
    let mut optimizer = Sgd::new(parameters(&store), SgdOptions { lr: 0.1, ..Default::default() })?;
    let mut losses = Vec::new();
    for epoch in 0..EPOCHS {
        for indices in order(SAMPLES, epoch).chunks(BIG_BATCH) {
            let (x, y) = collate(indices.iter().map(|index| sample(*index)).collect()).unwrap();
            optimizer.zero_grad()?;
            let loss = loss_of(&[forward(&x)], &y);
            loss.backward();
            clip_grad_norm(&parameters(&store), MAX_NORM)?;
            Optimizer::step(&mut optimizer)?;
            losses.push(loss.double_value(&[]));
        }
    }
    Ok((losses, named(&store)))
}

fn named(store: &VarStore) -> Vec<(String, Tensor)> {
    let mut all: Vec<_> = store.variables().into_iter().collect();
    all.sort_by(|(one, _), (other, _)| one.cmp(other));
    all
}

/// The same on all ranks, with so many along `pp`.
fn staged(pp: usize, schedule: Schedule, precision: Precision) -> anyhow::Result<Outcome> {
    let (features, classes) = sizes();
    let builder = Accelerator::builder().gradient_accumulation_steps(TURNS).precision(precision).cpu();
    let accelerator = builder.engine(move || ModelParallel { pp, ..Default::default() }).build()?;
    let replicas = accelerator.mesh().samples().size();
    let store = VarStore::new(Device::Cpu);
    let first_values = FirstValues::OfModel(3);
    let options =
        PipelineOptions { order: schedule.into(), micro_batches: TURNS, first_values, ..Default::default() };
    let stages = Stages::build(&layers(features, classes), &store, accelerator.mesh(), &options)?;
    let optimizer = Sgd::new(parameters(&store), SgdOptions { lr: 0.1, ..Default::default() })?;
    let loader = whole(data(SAMPLES), BIG_BATCH / TURNS / replicas)?;
    let model = StagedModel(Rc::new(stages));
    let (model, mut optimizer, loader) = accelerator.prepare(model, &store, optimizer, loader)?;
    let mut losses = Vec::new();
    for epoch in 0..EPOCHS {
        for batch in loader.epoch(epoch) {
            let (x, y) = batch?;
            let loss = model.train_batch(vec![x], move |outputs| Ok(loss_of(outputs, &y)))?;
            accelerator.clip_grad_norm(&optimizer.parameters(), MAX_NORM)?;
            optimizer.step()?;
            optimizer.zero_grad()?;
            losses.extend(loss);
        }
    }
    // An evaluation, whose outputs the last stage has.
    let (x, y) = collate((0..4).map(sample).collect()).unwrap();
    let seen = model.evaluate_batch(vec![x], |outputs| loss_of(outputs, &y).double_value(&[]))?;
    assert_eq!(seen.is_some(), model.unwrap().0.has_last_stage());
    assert!(seen.is_none_or(f64::is_finite));
    Ok((losses, named(&store)))
}

fn compare(pp: usize, schedule: Schedule) -> anyhow::Result<()> {
    let (losses, weights) = alone()?;
    let (cut, own) = staged(pp, schedule, Precision::F32)?;
    assert_eq!(losses.len(), cut.len());
    let furthest = losses.iter().zip(&cut).map(|(one, other)| (one - other).abs()).fold(0.0, f64::max);
    assert!(furthest < 2e-6, "{losses:?} {cut:?}");
    assert!(own.len() < weights.len(), "a rank has only its stages");
    for (name, weight) in &own {
        let (_, expected) = weights.iter().find(|(other, _)| other == name).unwrap();
        assert!(weight.allclose(expected, 1e-5, 2e-6, false), "`{name}`");
    }
    Ok(())
}

ranks_test!(two_stages_make_the_steps_of_one_rank, 2, {
    compare(2, Schedule::OneFOneB)?;
});

ranks_test!(stages_and_replicas_make_the_steps_of_one_rank, 4, {
    compare(2, Schedule::GPipe)?;
});

ranks_test!(stages_train_in_fewer_bits, 2, {
    let (losses, _) = alone()?;
    for precision in [Precision::Bf16, Precision::Fp16] {
        let (cut, _) = staged(2, Schedule::ZeroBubble1P, precision)?;
        assert!(
            cut.iter().zip(&losses).all(|(cut, one)| (cut - one).abs() < 0.05 * one),
            "{precision:?}: {cut:?}"
        );
    }
});
