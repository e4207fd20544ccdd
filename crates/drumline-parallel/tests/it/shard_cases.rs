//! Cases of the tests of FSDP2 and DeepSpeed (docs/fsdp-cases.md): each stage of ZeRO trains as DDP does.

use std::collections::BTreeSet;

use anyhow::Result;
use drumline_comm::{Mesh, ProcessGroup};
use drumline_parallel::{Clip, DdpOptions, Engine, EngineOptions, EngineSetup, GradSync, ShardOptions};
use drumline_plan::Stage;
use drumline_torch::{AdamOptions, AdamW, Named, Optimizer, parameters};
use rank_test::ranks_test;
use tch::nn::{ConvConfig, Init, Module, VarStore, conv2d, linear};
use tch::{Device, Kind, Tensor, no_grad};

use super::net::{Net, assert_close, loss, samples, values};

const STAGES: [Stage; 3] = [Stage::Zero1, Stage::Zero2, Stage::Zero3];
const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);
const STEPS: i64 = 10;

fn waves(size: &[i64], factor: f64, shift: f64) -> Tensor {
    let num: i64 = size.iter().product();
    ((Tensor::arange(num, FLOAT) * factor + shift).sin() * 0.3).view(size)
}

/// Gives all parameters values that depend on their names alone.
fn fill(vs: &VarStore) {
    tch::set_num_threads(1);
    let mut named = parameters(vs);
    named.sort_by(|one, other| one.name.cmp(&other.name));
    for (place, Named { tensor, .. }) in named.into_iter().enumerate() {
        no_grad(|| tensor.shallow_clone().copy_(&waves(&tensor.size(), 0.7, place as f64)));
    }
}

/// A model on its engine, with Adam.
struct Training {
    vs: VarStore,
    engine: Box<dyn Engine>,
    optimizer: AdamW,
}

impl Training {
    fn new(group: &ProcessGroup, vs: VarStore, options: Box<dyn EngineOptions>) -> Result<Self> {
        let mesh = Mesh::new(group, options.mesh_shape(group.size())?)?;
        let engine = options.engine(EngineSetup::new(&vs, &mesh))?;
        let mut optimizer = AdamW::new(parameters(&vs), AdamOptions { lr: 0.02, ..AdamOptions::default() })?;
        engine.adopt(&mut optimizer)?;
        Ok(Self { vs, engine, optimizer })
    }

    /// With an optimizer of `table` and `nothing` alone.
    fn new_without_tied(group: &ProcessGroup, vs: VarStore, options: Box<dyn EngineOptions>) -> Result<Self> {
        let mesh = Mesh::new(group, options.mesh_shape(group.size())?)?;
        let engine = options.engine(EngineSetup::new(&vs, &mesh))?;
        let mut trained = parameters(&vs);
        trained.retain(|named| named.name != "tied");
        let mut optimizer = AdamW::new(trained, AdamOptions::default())?;
        engine.adopt(&mut optimizer)?;
        Ok(Self { vs, engine, optimizer })
    }

    /// One step; returns the norm of the gradients.
    fn step(&mut self, loss: impl FnOnce() -> Tensor) -> Result<f64> {
        self.optimizer.zero_grad()?;
        let loss = self.engine.forward_with(GradSync::Reduce, loss)?;
        self.engine.backward(&loss, GradSync::Reduce)?;
        let norm = self.engine.clip(Clip::Norm(0.5), &self.optimizer.parameters())?;
        self.engine.step(&mut self.optimizer)?;
        Ok(norm.unwrap_or_default())
    }
}

/// Trains a model in each stage, and compares parameters and norms with those of DDP.
fn as_ddp<M>(build: impl Fn(&VarStore) -> M, loss: impl Fn(&M, usize, i64) -> Tensor) -> Result<()> {
    let group = ProcessGroup::from_env()?;
    let train = |options: Box<dyn EngineOptions>| -> Result<(Vec<f64>, Vec<Tensor>)> {
        let vs = VarStore::new(Device::Cpu);
        let model = build(&vs);
        fill(&vs);
        let mut training = Training::new(&group, vs, options)?;
        let norms = (0..STEPS).map(|step| training.step(|| loss(&model, group.rank(), step)));
        let norms = norms.collect::<Result<_>>()?;
        let mut values = values(&parameters(&training.vs));
        values.retain(|value| value.numel() > 0);
        Ok((norms, values))
    };
    let (norms, expected) = train(DdpOptions::default().into())?;
    for stage in STAGES {
        let (ours, found) = train(ShardOptions::new(stage).into())?;
        for (ours, norm) in ours.iter().zip(&norms) {
            assert!((ours - norm).abs() < 1e-6, "{stage}: a norm is {ours}, expected {norm}");
        }
        assert_close(&found, &expected, 2e-6);
    }
    Ok(())
}

ranks_test!(a_tied_weight_is_reduced_and_counted_once, 2, {
    let table = |vs: &VarStore| vs.root().var("table", &[11, 5], Init::Const(0.0));
    as_ddp(table, |table, rank, step| {
        let tokens = (Tensor::arange(9, (Kind::Int64, Device::Cpu)) * (step + 2) + rank as i64).remainder(11);
        let states = Tensor::embedding(table, &tokens, -1, false, false).tanh();
        states.linear(table, None::<&Tensor>).cross_entropy_for_logits(&tokens)
    })?;
});

ranks_test!(scalars_single_rows_and_nothing_at_all, 3, {
    let build = |vs: &VarStore| {
        let sizes: [(&str, &[i64]); 4] =
            [("scalar", &[]), ("row", &[1, 4]), ("two", &[2, 4]), ("nothing", &[0, 4])];
        sizes.map(|(name, size)| vs.root().var(name, size, Init::Const(0.0)))
    };
    as_ddp(build, |[scalar, row, two, nothing], rank, step| {
        let x = waves(&[4], 0.3, (rank as i64 * 100 + step) as f64);
        let rows = Tensor::cat(&[row * &x, two * &x, nothing * &x], 0);
        (rows * scalar + 0.1).square().sum(Kind::Float)
    })?;
});

ranks_test!(a_hundred_small_parameters, 3, {
    let build = |vs: &VarStore| -> Vec<Tensor> {
        let path = |place: i64| vs.root() / "layers" / place;
        (0..100).map(|place| path(place).var("w", &[place % 5 + 1, 3], Init::Const(0.0))).collect()
    };
    as_ddp(build, |weights, rank, step| {
        let x = waves(&[3], 0.9, (rank as i64 * 10 + step) as f64);
        let sums = weights.iter().map(|weight| (weight * &x).sum(Kind::Float).square());
        sums.reduce(|one, other| one + other).unwrap()
    })?;
});

fn channels_last(x: &Tensor) -> Tensor {
    x.permute([0, 2, 3, 1]).contiguous().permute([0, 3, 1, 2])
}

ranks_test!(convolutions_in_channels_last, 2, {
    let build = |vs: &VarStore| {
        let conv = |name: &str, from, to| {
            conv2d(vs.root() / name, from, to, 3, ConvConfig { padding: 1, ..Default::default() })
        };
        let model =
            (conv("one", 3, 7), conv("two", 7, 5), linear(vs.root() / "last", 5, 3, Default::default()));
        for Named { mut tensor, .. } in parameters(vs).into_iter().filter(|named| named.tensor.dim() == 4) {
            let channels_last = channels_last(&tensor.detach());
            tensor.set_data(&channels_last);
        }
        model
    };
    as_ddp(build, |(one, two, last), rank, step| {
        let x = waves(&[2, 3, 6, 6], 0.13, (rank as i64 * 7 + step) as f64);
        let x = channels_last(&x);
        let states = two.forward(&one.forward(&x).relu()).mean_dim([2i64, 3].as_slice(), false, Kind::Float);
        last.forward(&states).square().mean(Kind::Float)
    })?;
});

// More elements than a slot for gradients has, so that it is reduced in chunks.
ranks_test!(a_large_convolution_in_channels_last, 2, {
    let build = |vs: &VarStore| {
        let conv = conv2d(vs.root() / "one", 128, 1024, 3, ConvConfig { bias: false, ..Default::default() });
        let in_order = channels_last(&conv.ws.detach());
        conv.ws.shallow_clone().set_data(&in_order);
        conv
    };
    as_ddp(build, |conv, rank, step| {
        let x = channels_last(&waves(&[1, 128, 4, 3], 0.13, (rank as i64 * 7 + step) as f64));
        (conv.forward(&x) * waves(&[1024, 1, 1], 0.3, 0.0)).tanh().square().mean(Kind::Float)
    })?;
});

ranks_test!(a_layer_that_is_used_twice_and_an_output_without_a_loss, 2, {
    let build = |vs: &VarStore| Net::new(vs, 0);
    as_ddp(build, |net, rank, step| {
        let first = step * 16 + rank as i64 * 8;
        let (x, y) = samples(first..first + 8);
        let output = net.forward(&x);
        let _unused = net.extra.forward(&output);
        loss(&(&output + net.forward(&(&x * 0.5))), &y)
    })?;
});

ranks_test!(a_step_that_was_given_up_leaves_no_trace, 2, {
    let group = ProcessGroup::from_env()?;
    let batch =
        |step: i64| samples(step * 16 + group.rank() as i64 * 8..step * 16 + group.rank() as i64 * 8 + 8);
    for stage in STAGES {
        let [mut given_up, mut plain] = [(); 2].map(|()| {
            let vs = VarStore::new(Device::Cpu);
            let net = Net::new(&vs, 0);
            (Training::new(&group, vs, ShardOptions::new(stage).into()).unwrap(), net)
        });
        for step in 0..4 {
            if step == 2 {
                // All ranks leave the step after forward, as after an error in the loss.
                let (training, net) = &mut given_up;
                let (x, _) = batch(100);
                let _output = training.engine.forward_with(GradSync::Reduce, || net.forward(&(x * 1e3)))?;
            }
            for (training, net) in [&mut given_up, &mut plain] {
                let (x, y) = batch(step);
                training.step(|| loss(&net.forward(&x), &y))?;
            }
        }
        assert_close(&values(&parameters(&given_up.0.vs)), &values(&parameters(&plain.0.vs)), 0.0);
    }
});

ranks_test!(ranks_evaluate_as_often_as_they_like_between_steps, 3, {
    let group = ProcessGroup::from_env()?;
    for stage in STAGES {
        let train = |evaluates: bool| -> Result<Vec<Tensor>> {
            let vs = VarStore::new(Device::Cpu);
            let net = Net::new(&vs, 0);
            let mut training = Training::new(&group, vs, ShardOptions::new(stage).into())?;
            for step in 0..5 {
                let first = step * 24 + group.rank() as i64 * 8;
                let (x, y) = samples(first..first + 8);
                training.step(|| loss(&net.forward(&x), &y))?;
                for _ in 0..if evaluates { group.rank() } else { 0 } {
                    let output = no_grad(|| net.forward(&x));
                    assert!(f64::try_from(output.sum(Kind::Double))?.is_finite());
                }
            }
            Ok(values(&parameters(&training.vs)))
        };
        assert_close(&train(true)?, &train(false)?, 0.0);
    }
});

ranks_test!(what_is_ignored_stays_a_ranks_own, 2, {
    let group = ProcessGroup::from_env()?;
    for stage in STAGES {
        let vs = VarStore::new(Device::Cpu);
        let net = Net::new(&vs, group.rank() as i64);
        let of = |name: &str| parameters(&vs).into_iter().find(|named| named.name == name).unwrap().tensor;
        let before = of("extra.weight").detach().copy();
        let ignored = vec!["extra.weight".to_owned(), "extra.bias".to_owned()];
        let options = ShardOptions { ignored, ..ShardOptions::new(stage) };
        let mesh = Mesh::new(&group, options.mesh_shape(group.size())?)?;
        let engine = Box::new(options).engine(EngineSetup::new(&vs, &mesh))?;
        assert_close(&[of("extra.weight").detach()], &[before], 0.0);
        let mut optimizer = AdamW::new(parameters(&vs), AdamOptions::default())?;
        engine.adopt(&mut optimizer)?;
        let (x, y) = samples(group.rank() as i64 * 8..group.rank() as i64 * 8 + 8);
        let output = engine.forward_with(GradSync::Reduce, || net.extra.forward(&net.forward(&x)))?;
        engine.backward(&loss(&output, &y), GradSync::Reduce)?;
        let own = f64::try_from(of("extra.weight").grad().sum(Kind::Double))?;
        let all: Vec<f64> = group.all_gather_object(&own)?;
        assert_ne!(all[0], all[1], "{stage}: each rank has its own gradient");
        let norm = engine.clip(Clip::Norm(1e3), &engine.parameters())?;
        let all: Vec<f64> = group.all_gather_object(&norm.unwrap())?;
        assert_eq!(all[0], all[1], "{stage}: the norm is of what ranks share");
        let before = of("extra.weight").detach().copy();
        engine.step(&mut optimizer)?;
        assert!(!of("extra.weight").detach().equal(&before), "{stage}: each rank steps its own");
        optimizer.zero_grad()?;
        assert!(!of("extra.weight").grad().defined());
        assert_eq!(names_of(&*engine, &group)?, all_names(&vs), "{stage}: all of it is saved");
    }
});

fn all_names(vs: &VarStore) -> BTreeSet<String> {
    vs.variables().into_keys().collect()
}

/// What some rank saves.
fn names_of(engine: &dyn Engine, group: &ProcessGroup) -> Result<BTreeSet<String>> {
    let saved = engine.state().into_iter().filter(|placed| placed.is_saved_here).map(|placed| placed.name);
    let all: Vec<Vec<String>> = group.all_gather_object(&saved.collect::<Vec<_>>())?;
    Ok(all.into_iter().flatten().collect())
}

ranks_test!(second_names_and_parameters_without_elements_are_saved, 3, {
    let group = ProcessGroup::from_env()?;
    for gathers in [false, true] {
        for stage in STAGES {
            let vs = VarStore::new(Device::Cpu);
            let table = vs.root().var("table", &[11, 5], Init::Const(0.5));
            let _ = vs.root().add("tied", table.shallow_clone(), true);
            let nothing = vs.root().var("nothing", &[0, 4], Init::Const(0.0));
            let options = ShardOptions {
                gather_parameters: Some(gathers),
                keep_gathered: 0,
                ..ShardOptions::new(stage)
            };
            let mut training = Training::new_without_tied(&group, vs, options.into())?;
            assert_eq!(names_of(&*training.engine, &group)?, all_names(&training.vs), "{stage}");
            training.step(|| table.square().sum(Kind::Float) + nothing.sum(Kind::Float))?;
            let [one, other] = ["table", "tied"].map(|name| training.engine.full(name).unwrap());
            assert!(one.equal(&other), "{stage}");
            assert_eq!(one.size(), [11, 5]);
        }
    }
});
