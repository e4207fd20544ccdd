//! What surrounds a pipeline's step: replicas, ZeRO, clipping, loss scaling, frozen layers, evaluation, several devices.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::Result;
use drumline_comm::{Axis, ProcessGroup};
use drumline_parallel::pipeline::{
    LayerList, LayerSpec, Linear, MicroBatch, Order, Pipeline, PipelineOptions, Scale, VirtualClock, layer_fn,
};
use drumline_parallel::{Clip, DdpOptions, EngineOptions, ShardOptions};
use drumline_plan::Stage;
use drumline_plan::pipeline::{Schedule, StageTimes, Times};
use drumline_torch::{AdamOptions, AdamW, LossScaler, Named, Optimizer, ScalePolicy, grad, parameters};
use tch::{Device, Kind, Tensor};

use super::pipeline_model::{
    Oracle, Variant, agreed, batches, clear, gradients, layers, loss, mesh, options, step, values,
};
use super::tensor::on_ranks;

const STEPS: i64 = 4;

#[derive(Debug)]
struct Trained {
    losses: Vec<f64>,
    norms: Vec<f64>,
    values: HashMap<String, Tensor>,
}

/// Trains with clipping; replicas along `dp` have micro-batches in turn.
fn trained(group: &ProcessGroup, pp: usize, order: Order, within: Box<dyn EngineOptions>) -> Result<Trained> {
    tch::set_num_threads(1);
    let mesh = mesh_of(group, pp, &*within)?;
    let replicas = mesh.samples();
    let own = 6 / replicas.size();
    let options = PipelineOptions { within, ..options(order, own) };
    let masks = options.masks.clone().unwrap();
    let pipeline = Pipeline::new(&layers(Variant::ALL), &mesh, options)?;
    let engine = pipeline.engine();
    engine.change_parameters(&mut || fill(&pipeline))?;
    // A large epsilon: Adam makes much of the rounding of small gradients.
    let optimizer = AdamOptions { lr: 0.02, eps: 1e-2, ..Default::default() };
    let mut optimizer = AdamW::new(engine.parameters(), optimizer)?;
    engine.adopt(&mut optimizer)?;
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    for number in 0..STEPS {
        masks.set_step(number as u64)?;
        let all = batches(6, true, 0);
        let batches: Vec<MicroBatch> = all.into_iter().skip(own * replicas.rank()).take(own).collect();
        losses.push(step(&pipeline, &batches)?.mean());
        norms.extend(engine.clip(Clip::Norm(0.5), &engine.parameters())?);
        engine.step(&mut optimizer)?;
        optimizer.zero_grad()?;
    }
    Ok(Trained { losses, norms, values: values(&pipeline)? })
}

fn mesh_of(group: &ProcessGroup, pp: usize, within: &dyn EngineOptions) -> Result<drumline_comm::Mesh> {
    let rest = within.mesh_shape(group.size() / pp)?;
    Ok(drumline_comm::Mesh::new(group, rest.with(Axis::Pp, pp))?)
}

fn check(one: &Trained, other: &Trained, what: &str) {
    for (one, other) in one.losses.iter().zip(&other.losses).chain(one.norms.iter().zip(&other.norms)) {
        assert!((one - other).abs() <= 1e-5 * one.abs(), "{what}: {one} and {other}");
    }
    for (name, value) in &one.values {
        let distance = (value - &other.values[name]).abs().max().double_value(&[]);
        assert!(distance < 1e-5, "{what}: `{name}` is {distance:e} away");
    }
}

#[test]
fn replicas_and_zero_train_as_one_process_does() {
    let one =
        on_ranks(1, |group| trained(&group, 1, Schedule::GPipe.into(), Box::new(DdpOptions::default())));
    let one = &one[0];
    assert!(one.losses[3] < one.losses[0] && one.norms.len() == 4, "{:?}", one.losses);
    type Make = fn() -> Box<dyn EngineOptions>;
    let within: [(&str, Make); 3] = [
        ("ddp", || Box::new(DdpOptions::default())),
        ("stage 1", || Box::new(ShardOptions::new(Stage::Zero1))),
        ("stage 2", || Box::new(ShardOptions::new(Stage::Zero2))),
    ];
    for (what, make) in within {
        for schedule in [Schedule::OneFOneB, Schedule::ZeroBubble1P, Schedule::ZeroBubbleV] {
            for (ranks, pp) in [(2, 2), (4, 2)] {
                let all = on_ranks(ranks, |group| trained(&group, pp, schedule.into(), make()));
                all.iter().for_each(|other| check(one, other, &format!("{what} {schedule} {ranks}")));
            }
        }
    }
}

#[test]
fn scaled_losses_have_the_gradients_of_losses_and_all_ranks_learn_of_an_overflow() {
    on_ranks(2, |group| {
        let pipeline = Pipeline::new(
            &layers(Variant::ALL),
            &mesh(&group, 2)?,
            options(Schedule::ZeroBubble1P.into(), 3),
        )?;
        let (engine, batches) = (pipeline.engine(), batches(3, false, 0));
        let agreed = agreed(engine.mesh(), &batches)?;
        pipeline.step(&agreed, &batches, Scale::No, loss)?;
        let plain = gradients(&engine.parameters());
        for (scale, factor, overflows) in [(1024.0, 1.0, false), (1e38, 1e6, true)] {
            clear(&engine.parameters());
            let scaler = LossScaler::new(ScalePolicy::Static(scale), Device::Cpu)?;
            pipeline.step(&agreed, &batches, Scale::By(&scaler), |outputs, batch| {
                Ok(loss(outputs, batch)? * factor)
            })?;
            let unscaled = engine.unscale(&scaler, engine.parameters())?;
            assert_eq!(unscaled.has_overflowed()?, overflows);
            if !overflows {
                for (name, found) in gradients(&engine.parameters()) {
                    assert_eq!(found, plain[&name], "`{name}`");
                }
            }
        }
        Ok(())
    });
}

/// Linear layers, of which those before `frozen` do not learn.
fn partly_frozen(frozen: usize) -> LayerList {
    let mut list = LayerList::default();
    for place in 0..6 {
        list.push(LayerSpec::new(format!("fc{place}"), move |layer| {
            let linear = Linear::new(&layer.path(), 5, 5)?;
            if place < frozen {
                for tensor in [Some(&linear.weight), linear.bias.as_ref()].into_iter().flatten() {
                    let _ = tensor.shallow_clone().f_requires_grad_(false)?;
                }
            }
            Ok(Box::new(linear))
        }));
    }
    list
}

#[test]
fn frozen_layers_get_no_gradients_and_send_none() {
    on_ranks(3, |group| {
        for frozen in [0, 1, 2, 3, 5] {
            for schedule in [Schedule::OneFOneB, Schedule::ZeroBubble1P, Schedule::ZeroBubbleV] {
                let options =
                    PipelineOptions { order: schedule.into(), micro_batches: 4, ..Default::default() };
                let pipeline = Pipeline::new(&partly_frozen(frozen), &mesh(&group, 3)?, options)?;
                let batch = |place: i64| {
                    let x = (Tensor::arange(10, (Kind::Float, Device::Cpu)) + place).sin().view([2, 5]);
                    MicroBatch::new(vec![x], vec![Tensor::zeros([2], (Kind::Float, Device::Cpu))], 0)
                };
                let batches: Vec<_> = (0..4).map(batch).collect();
                let agreed = agreed(pipeline.engine().mesh(), &batches)?;
                pipeline.step(&agreed, &batches, Scale::No, |outputs, _| {
                    Ok(outputs[0].f_square()?.f_sum(Kind::Float)?)
                })?;
                for (name, tensor) in pipeline.store().variables() {
                    let place: usize = name[2..3].parse()?;
                    assert_eq!(grad(&tensor)?.is_some(), place >= frozen, "`{name}`, {frozen} frozen");
                }
                assert!(parameters(pipeline.store()).len() <= 4);
            }
        }
        Ok(())
    });
}

#[test]
fn an_evaluation_has_no_dropout_and_no_gradients() {
    let sums = [1usize, 2, 3].map(|ranks| {
        on_ranks(ranks, |group| {
            let schedule = if ranks == 3 { Schedule::ZeroBubbleV } else { Schedule::OneFOneB };
            let variant = Variant { blocks: 9, ..Variant::ALL };
            let pipeline =
                Pipeline::new(&layers(variant), &mesh(&group, ranks)?, options(schedule.into(), 2))?;
            fill(&pipeline);
            let mut seen = 0;
            let sum = pipeline.evaluate(&batches(5, true, 1), |outputs, batch| {
                seen += 1;
                assert!(!outputs[0].requires_grad());
                loss(outputs, batch)
            })?;
            assert_eq!(seen, if pipeline.has_last_stage() { 5 } else { 0 });
            assert!(gradients(&pipeline.engine().parameters()).is_empty());
            // Training continues.
            assert!(step(&pipeline, &batches(2, false, 1))?.sum > 0.0);
            Ok(sum)
        })
    });
    assert!(sums.iter().flatten().all(|sum| *sum == sums[0][0]), "{sums:?}");
}

/// The same values however other tests use libtorch's generators.
fn fill(pipeline: &Pipeline) {
    let _no_grad = tch::no_grad_guard();
    for (name, mut tensor) in pipeline.store().variables() {
        let shift = name.bytes().map(f64::from).sum::<f64>();
        let values = (Tensor::arange(tensor.numel() as i64, (Kind::Float, Device::Cpu)) + shift).sin() * 0.3;
        tensor.copy_(&values.view(&tensor.size()[..]));
    }
}

#[test]
fn naive_model_parallelism_and_gpipe_run_in_one_process() {
    on_ranks(1, |group| {
        let variant = Variant { is_tied: false, ..Variant::ALL };
        for micro_batches in [1, 4] {
            let options = PipelineOptions {
                ranks: Some(3),
                // Stages on devices of their own; here they are the same one.
                devices: vec![Device::Cpu; 3],
                ..options(Schedule::GPipe.into(), micro_batches)
            };
            let pipeline = Pipeline::new(&layers(variant), &mesh(&group, 1)?, options)?;
            let (values, batches) = (values(&pipeline)?, batches(micro_batches, false, 0));
            let oracle = Oracle::new(variant, &values, &batches, 0);
            assert_eq!(step(&pipeline, &batches)?.sum, oracle.loss());
            assert_eq!(pipeline.peak_received(), 0);
        }
        Ok(())
    });
}

#[test]
fn costs_are_measured_layer_by_layer() -> Result<()> {
    const SLEEP: Duration = Duration::from_millis(20);
    let forwards: Arc<[AtomicUsize; 2]> = Arc::default();
    let mut list = LayerList::default();
    for (place, name) in ["quick", "slow"].into_iter().enumerate() {
        let forwards = forwards.clone();
        list.push(LayerSpec::new(name, move |layer| {
            let (linear, forwards) = (Linear::new(&layer.path(), 4, 4)?, forwards.clone());
            Ok(layer_fn(move |xs, _| {
                forwards[place].fetch_add(1, Ordering::Relaxed);
                std::thread::sleep(SLEEP * place as u32);
                Ok(vec![linear.apply(&xs[0])?])
            }))
        }));
    }
    let x = Tensor::ones([2, 4], (Kind::Float, Device::Cpu));
    let costs = list.measure(&[x], Device::Cpu, 5)?;
    assert!(costs[0] > 0.0 && costs[1] >= SLEEP.as_secs_f64(), "{costs:?}");
    // Each is measured so many times, and computes the inputs of the next one.
    assert_eq!(forwards.each_ref().map(|count| count.load(Ordering::Relaxed)), [6, 6]);
    Ok(())
}

#[test]
fn a_step_may_have_another_number_of_micro_batches() {
    on_ranks(2, |group| {
        let order = Order::from(Schedule::OneFOneB);
        let pipeline = Pipeline::new(&layers(Variant::ALL), &mesh(&group, 2)?, options(order, 4))?;
        let values = values(&pipeline)?;
        for micro_batches in [4, 1, 7, 4] {
            let batches = batches(micro_batches, true, 3);
            let oracle = Oracle::new(Variant::ALL, &values, &batches, 0);
            assert_eq!(step(&pipeline, &batches)?.sum, oracle.loss());
            let plan = pipeline.plan(micro_batches)?;
            let expected = oracle.in_order_of(plan.program(), pipeline.layers());
            let parameters: Vec<Named> = pipeline.engine().parameters();
            for (name, found) in gradients(&parameters) {
                assert_eq!(found, expected[&name], "`{name}`");
            }
            clear(&parameters);
        }
        Ok(())
    });
}

#[test]
fn a_virtual_clock_carries_out_what_training_does() -> Result<()> {
    let plan = Order::from(Schedule::ZeroBubbleV).plan(4, 8)?;
    let unit = StageTimes { forward: 1.0, input: 1.0, weight: 1.0 };
    let timeline = VirtualClock::timeline(&plan, &Times::equal(unit, &plan.program().stages, 0.0));
    assert_eq!(timeline.makespan, 25.5);
    Ok(())
}
