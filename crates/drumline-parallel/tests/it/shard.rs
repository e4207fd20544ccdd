//! ZeRO: ranks that divide the states of a training among them train as replicas do.

use std::collections::HashMap;

use anyhow::Result;
use drumline_comm::{Mesh, ProcessGroup};
use drumline_parallel::{
    Accumulation, Agreed, Brought, Clip, DdpOptions, Engine, EngineOptions, EngineSetup, GradSync,
    ShardOptions, SyncBatchNorm, SyncGroup,
};
use drumline_plan::Stage;
use drumline_torch::{
    AdamOptions, AdamW, LossScaler, Named, Optimizer, ScalePolicy, Sgd, SgdOptions, StepMade, grad,
    parameters,
};
use rank_test::ranks_test;
use tch::nn::{Module, ModuleT, VarStore};
use tch::{Device, Kind, Tensor};

use super::net::{Net, assert_close, loss, samples, values};

pub(super) const STEPS: i64 = 6;
pub(super) const BATCH: i64 = 24;
pub(super) const STAGES: [Stage; 3] = [Stage::Zero1, Stage::Zero2, Stage::Zero3];

/// A model on its engine, with an optimizer.
pub(super) struct Training {
    pub(super) vs: VarStore,
    pub(super) net: Net,
    pub(super) engine: Box<dyn Engine>,
    pub(super) optimizer: Box<dyn Optimizer>,
}

pub(super) type MakeOptimizer = fn(Vec<Named>) -> Result<Box<dyn Optimizer>>;

pub(super) fn adam(params: Vec<Named>) -> Result<Box<dyn Optimizer>> {
    Ok(Box::new(AdamW::new(params, AdamOptions { lr: 0.05, ..AdamOptions::default() })?))
}

fn momentum(params: Vec<Named>) -> Result<Box<dyn Optimizer>> {
    Ok(Box::new(Sgd::new(params, SgdOptions { lr: 0.05, momentum: 0.9, ..SgdOptions::default() })?))
}

pub(super) fn engine(
    group: &ProcessGroup,
    vs: &VarStore,
    options: impl EngineOptions + 'static,
) -> Result<Box<dyn Engine>> {
    let mesh = Mesh::new(group, options.mesh_shape(group.size())?)?;
    Ok(Box::new(options).engine(EngineSetup::new(vs, &mesh))?)
}

impl Training {
    pub(super) fn new(
        group: &ProcessGroup,
        options: impl EngineOptions + 'static,
        optimizer: MakeOptimizer,
    ) -> Result<Self> {
        let vs = VarStore::new(Device::Cpu);
        // Other ranks begin with other parameters, and must get those of rank 0.
        let net = Net::new(&vs, group.rank() as i64 * 10);
        let mut optimizer = optimizer(parameters(&vs))?;
        let engine = engine(group, &vs, options)?;
        engine.adopt(&mut *optimizer)?;
        Ok(Self { vs, net, engine, optimizer })
    }

    /// One step on this rank's part of a batch, in micro-batches.
    pub(super) fn step(
        &mut self,
        group: &ProcessGroup,
        step: i64,
        num_micro_batches: usize,
        clip: Option<f64>,
    ) -> Result<Option<f64>> {
        let each = BATCH / group.size() as i64;
        let (x, y) = samples(
            step * BATCH + group.rank() as i64 * each..step * BATCH + (group.rank() as i64 + 1) * each,
        );
        let rows = each / num_micro_batches as i64;
        self.optimizer.zero_grad()?;
        for index in 0..num_micro_batches {
            let part = |tensor: &Tensor| tensor.narrow(0, index as i64 * rows, rows);
            let sync = GradSync::of(index, num_micro_batches);
            let output = self.engine.forward_with(sync, || self.net.forward(&part(&x)))?;
            self.engine.backward(&(loss(&output, &part(&y)) / num_micro_batches as f64), sync)?;
        }
        let norm = match clip {
            Some(max_norm) => self.engine.clip(Clip::Norm(max_norm), &self.optimizer.parameters())?,
            None => None,
        };
        self.engine.step(&mut *self.optimizer)?;
        Ok(norm)
    }

    pub(super) fn values(&self) -> Vec<Tensor> {
        values(&parameters(&self.vs))
    }
}

#[track_caller]
fn assert_same_bits(ours: &[Tensor], theirs: &[Tensor]) {
    assert_close(ours, theirs, 0.0);
}

/// Each stage has the gradients of DDP to the bit, and makes the same steps. The stages are equal to each other to the
/// bit; libtorch's optimizers round the ends of a tensor otherwise than its middle, so that parts of it may differ from the
/// whole in the last bit.
fn stages_equal_ddp(optimizer: MakeOptimizer) -> Result<()> {
    let group = ProcessGroup::from_env()?;
    let mut ddp = Training::new(&group, DdpOptions::default(), optimizer)?;
    ddp.step(&group, 0, 1, None)?;
    let gradients: HashMap<String, Tensor> = parameters(&ddp.vs)
        .into_iter()
        .filter_map(|named| Some((named.name, grad(&named.tensor).unwrap()?.copy())))
        .collect();
    (1..STEPS).try_for_each(|step| ddp.step(&group, step, 1, None).map(drop))?;
    let mut first: Option<Vec<Tensor>> = None;
    for stage in STAGES {
        let mut sharded = Training::new(&group, ShardOptions::new(stage), optimizer)?;
        sharded.step(&group, 0, 1, None)?;
        for placed in sharded.engine.state() {
            if let Some(rows) = grad(&placed.tensor)? {
                let whole = gradients[&placed.name].narrow(0, placed.offsets[0], rows.size()[0]);
                assert!(rows.equal(&whole), "{stage}: {}", placed.name);
            }
        }
        (1..STEPS).try_for_each(|step| sharded.step(&group, step, 1, None).map(drop))?;
        assert_close(&sharded.values(), &ddp.values(), 1e-6);
        let values = sharded.values();
        assert_same_bits(&values, first.get_or_insert_with(|| sharded.values()));
        // The control: a larger step makes other weights.
        sharded.optimizer.set_lr(1.0);
        sharded.step(&group, STEPS, 1, None)?;
        assert!(!sharded.values()[0].equal(&values[0]));
    }
    Ok(())
}

ranks_test!(stages_equal_ddp_on_one_rank, 1, { stages_equal_ddp(adam)? });
ranks_test!(stages_equal_ddp_on_two_ranks, 2, { stages_equal_ddp(adam)? });
ranks_test!(stages_equal_ddp_on_three_ranks, 3, { stages_equal_ddp(momentum)? });
ranks_test!(stages_equal_ddp_on_four_ranks, 4, { stages_equal_ddp(adam)? });
ranks_test!(stages_equal_ddp_over_tcp, 3, env = [("DRUMLINE_TRANSPORT", "tcp")], { stages_equal_ddp(adam)? });

ranks_test!(stages_accumulate_and_clip_as_one_process_does, 2, {
    let group = ProcessGroup::from_env()?;
    let mut ddp = Training::new(&group, DdpOptions::default(), adam)?;
    let mut norms = Vec::new();
    for step in 0..STEPS {
        norms.extend(ddp.step(&group, step, 3, Some(0.02))?);
    }
    for stage in STAGES {
        for accumulation in [Accumulation::OwnRows, Accumulation::All] {
            let options = ShardOptions { accumulation: Some(accumulation), ..ShardOptions::new(stage) };
            let mut sharded = Training::new(&group, options, adam)?;
            for (step, norm) in norms.iter().enumerate() {
                let ours = sharded.step(&group, step as i64, 3, Some(0.02))?.unwrap();
                assert!((ours - norm).abs() < 1e-6, "{stage} {accumulation:?}: {ours} and {norm}");
            }
            assert_close(&sharded.values(), &ddp.values(), 1e-6);
        }
    }
});

ranks_test!(replicas_of_shards_train_as_replicas, 4, {
    let group = ProcessGroup::from_env()?;
    let mut ddp = Training::new(&group, DdpOptions::default(), adam)?;
    for stage in STAGES {
        let options = ShardOptions { shard: Some(2), ..ShardOptions::new(stage) };
        let mut hybrid = Training::new(&group, options, adam)?;
        let mut alike = Training::new(&group, DdpOptions::default(), adam)?;
        for step in 0..STEPS {
            let clipped = hybrid.step(&group, step, 1, Some(0.02))?.unwrap();
            let expected = alike.step(&group, step, 1, Some(0.02))?.unwrap();
            assert!((clipped - expected).abs() < 1e-6, "each element counts once, not in each replica");
        }
        assert_close(&hybrid.values(), &alike.values(), 1e-6);
    }
    ddp.step(&group, 0, 1, None)?;
    let three = ShardOptions { shard: Some(3), ..ShardOptions::new(Stage::Zero3) };
    let error = three.mesh_shape(4).unwrap_err().to_string();
    assert!(error.contains('4'), "{error}");
});

ranks_test!(each_rank_owns_its_rows_and_state, 3, {
    let group = ProcessGroup::from_env()?;
    for stage in STAGES {
        let mut sharded = Training::new(&group, ShardOptions::new(stage), adam)?;
        sharded.step(&group, 0, 1, None)?;
        let own: usize = sharded.engine.parameters().iter().map(|named| named.tensor.numel()).sum();
        let mut all = [own as u64];
        group.all_reduce(&mut all, drumline_comm::ReduceOp::Sum)?;
        let whole: usize = parameters(&sharded.vs).iter().map(|named| named.tensor.numel()).sum();
        assert_eq!(all[0], whole as u64, "every element has one owner");
        let moments = sharded.optimizer.state().tensors;
        let moments: usize = moments
            .iter()
            .filter(|named| named.name.ends_with("exp_avg"))
            .map(|named| named.tensor.numel())
            .sum();
        assert!(moments <= own, "no state for the rows of others");
        for placed in sharded.engine.state() {
            let rows = placed.tensor.size().first().copied().unwrap_or(1);
            assert!(
                placed.offsets.first().copied().unwrap_or(0) + rows
                    <= placed.whole.first().copied().unwrap_or(1)
            );
        }
    }
});

ranks_test!(parameters_are_one_copy_on_a_node_in_stage_3, 2, {
    let group = ProcessGroup::from_env()?;
    let read = |sharded: &Training| f64::try_from(parameters(&sharded.vs)[0].tensor.get(0).sum(Kind::Double));
    for (stage, is_shared) in [(Stage::Zero2, false), (Stage::Zero3, true)] {
        let sharded = Training::new(&group, ShardOptions::new(stage), adam)?;
        let before = read(&sharded)?;
        group.barrier()?;
        if group.rank() == 0 {
            tch::no_grad(|| drop(parameters(&sharded.vs)[0].tensor.get(0).fill_(7.0)));
        }
        group.barrier()?;
        let after = read(&sharded)?;
        assert_eq!(after != before, is_shared || group.rank() == 0, "{stage}");
        group.barrier()?;
    }
});

ranks_test!(unused_frozen_and_partly_used_parameters, 2, {
    let group = ProcessGroup::from_env()?;
    for stage in STAGES {
        let vs = VarStore::new(Device::Cpu);
        let net = Net::new(&vs, group.rank() as i64);
        let frozen = parameters(&vs).into_iter().find(|named| named.name == "first.bias").unwrap();
        let _ = frozen.tensor.set_requires_grad(false);
        let engine = engine(&group, &vs, ShardOptions::new(stage))?;
        let mut optimizer = adam(parameters(&vs))?;
        engine.adopt(&mut *optimizer)?;
        let of = |name: &str| {
            parameters(&vs)
                .into_iter()
                .chain(drumline_torch::frozen(&vs))
                .find(|named| named.name == name)
                .unwrap()
                .tensor
                .copy()
        };
        let names = ["first.bias", "extra.weight", "second.weight"];
        let [frozen, extra, second] = names.map(of);
        for use_extra in [false, true] {
            let (x, y) = samples(group.rank() as i64 * 8..group.rank() as i64 * 8 + 8);
            optimizer.zero_grad()?;
            let output = engine.forward_with(GradSync::Reduce, || {
                let output = net.forward(&x);
                // Only rank 1 uses the layer.
                if use_extra && group.rank() == 1 { net.extra.forward(&output) } else { output }
            })?;
            engine.backward(&loss(&output, &y), GradSync::Reduce)?;
            engine.step(&mut *optimizer)?;
            assert_eq!(
                of("extra.weight").equal(&extra),
                !use_extra,
                "{stage}: stepped if any rank has used it"
            );
        }
        assert!(of("first.bias").equal(&frozen), "{stage}");
        assert!(!of("second.weight").equal(&second), "{stage}");
    }
});

ranks_test!(gradients_that_were_not_made_undefined_add_up_in_each_stage, 2, {
    let group = ProcessGroup::from_env()?;
    let mut expected: Option<Vec<Tensor>> = None;
    for stage in STAGES {
        let sharded = Training::new(&group, ShardOptions::new(stage), adam)?;
        for step in 0..3 {
            let start = (step * 2 + group.rank() as i64) * 8;
            let (x, y) = samples(start..start + 8);
            let output = sharded.engine.forward_with(GradSync::Reduce, || sharded.net.forward(&x))?;
            sharded.engine.backward(&loss(&output, &y), GradSync::Reduce)?;
        }
        let lone = VarStore::new(Device::Cpu);
        let net = Net::new(&lone, 0);
        for step in 0..3 {
            let (x, y) = samples(step * 16..step * 16 + 16);
            loss(&net.forward(&x), &y).backward();
        }
        let mut grads = Vec::new();
        for own in sharded.engine.parameters() {
            let placed = sharded.engine.state().into_iter().find(|placed| placed.name == own.name).unwrap();
            let whole = parameters(&lone).into_iter().find(|named| named.name == own.name).unwrap().tensor;
            match grad(&own.tensor)? {
                None => assert!(own.name.starts_with("extra"), "{}", own.name),
                Some(rows) => {
                    let theirs = whole.grad().narrow(0, placed.offsets[0], rows.size()[0]);
                    assert_close(&[rows.copy()], &[theirs], 1e-6);
                    grads.push(rows.copy());
                }
            }
        }
        match &expected {
            None => expected = Some(grads),
            Some(first) => assert_close(first, &grads, 1e-6),
        }
    }
});

ranks_test!(ranks_without_a_batch_take_part, 3, {
    let group = ProcessGroup::from_env()?;
    for stage in STAGES {
        let mut sharded = Training::new(&group, ShardOptions::new(stage), adam)?;
        let mut ddp = Training::new(&group, DdpOptions::default(), adam)?;
        for training in [&mut sharded, &mut ddp] {
            // Rank 0 has two micro-batches, rank 1 has one, rank 2 has none.
            let batches = 2 - group.rank();
            let brought =
                Brought { batches, samples: batches * 8, count: (batches * 8) as f64, ..Brought::default() };
            let agreed = Agreed::reach(training.engine.mesh(), &brought)?;
            training.optimizer.zero_grad()?;
            training.engine.begin_step(&agreed)?;
            for index in 0..batches {
                let (x, y) =
                    samples((group.rank() + index) as i64 * 8..(group.rank() + index) as i64 * 8 + 8);
                let sync = GradSync::of(index, agreed.most_batches());
                training.engine.begin_micro_batch();
                let output = training.engine.forward_with(sync, || training.net.forward(&x))?;
                training.engine.backward(&(loss(&output, &y) * 8.0 * agreed.factor_of_sums()), sync)?;
            }
            training.engine.join_rest(batches, agreed.most_batches())?;
            training.engine.step(&mut *training.optimizer)?;
        }
        assert_close(&sharded.values(), &ddp.values(), 1e-6);
    }
});

/// Layers with synchronised norms, each a unit.
struct Normed {
    vs: VarStore,
    layers: Vec<(tch::nn::Linear, SyncBatchNorm)>,
    sync: SyncGroup,
}

impl Normed {
    fn new(group: &ProcessGroup) -> Result<Self> {
        tch::set_num_threads(1);
        tch::manual_seed(5);
        let (vs, sync) = (VarStore::new(Device::Cpu), SyncGroup::new(group)?);
        let layer = |index: usize| {
            let path = vs.root() / "h" / index;
            let norm = SyncBatchNorm::new(&path / "norm", 6, Default::default(), &sync);
            (tch::nn::linear(&path / "linear", 6, 6, Default::default()), norm)
        };
        let layers = (0..6).map(layer).collect();
        Ok(Self { vs, layers, sync })
    }

    fn loss(&self, start: i64) -> Tensor {
        let x = (Tensor::arange(48, (Kind::Float, Device::Cpu)) * 0.3 + start).sin().view([8, 6]);
        let forward = |x: Tensor, (linear, norm): &(tch::nn::Linear, SyncBatchNorm)| {
            norm.forward_t(&linear.forward(&x), true).tanh()
        };
        self.layers.iter().fold(x, forward).square().mean(Kind::Float)
    }
}

ranks_test!(synchronised_norms_and_ranks_without_a_batch, 2, {
    let group = ProcessGroup::from_env()?;
    let train = |stage: Option<Stage>| -> Result<Vec<Tensor>> {
        let model = Normed::new(&group)?;
        let sync_group = Some(model.sync.clone());
        let options: Box<dyn EngineOptions> = match stage {
            None => DdpOptions { sync_group, ..DdpOptions::default() }.into(),
            Some(stage) => ShardOptions { sync_group, ..ShardOptions::new(stage) }.into(),
        };
        let mesh = Mesh::new(&group, options.mesh_shape(group.size())?)?;
        let engine = options.engine(EngineSetup::new(&model.vs, &mesh))?;
        let mut optimizer = momentum(parameters(&model.vs))?;
        engine.adopt(&mut *optimizer)?;
        for step in 0..4 {
            // Rank 1 has a batch in every second step.
            let batches = if group.rank() == 0 || step % 2 == 0 { 1 } else { 0 };
            let brought = Brought { batches, samples: batches * 8, count: 8.0, ..Brought::default() };
            let agreed = Agreed::reach(engine.mesh(), &brought)?;
            optimizer.zero_grad()?;
            engine.begin_step(&agreed)?;
            if batches == 1 {
                engine.begin_micro_batch();
                let start = step * 2 + group.rank() as i64;
                let loss = engine.forward_with(GradSync::Reduce, || model.loss(start))?;
                engine.backward(&loss, GradSync::Reduce)?;
            }
            engine.join_rest(batches, agreed.most_batches())?;
            engine.step(&mut *optimizer)?;
        }
        Ok(values(&parameters(&model.vs)))
    };
    let ddp = train(None)?;
    for stage in STAGES {
        assert_close(&train(Some(stage))?, &ddp, 1e-6);
    }
});

/// Weights after steps with a scaled loss, of which one rank's gradient overflows in step 2, in a row of rank 0; and the
/// scales.
fn trained_with_an_overflow(
    group: &ProcessGroup,
    options: Box<dyn EngineOptions>,
) -> Result<(Tensor, Vec<f64>)> {
    let vs = VarStore::new(Device::Cpu);
    let weight = vs.root().ones("w", &[8, 4]);
    let mesh = Mesh::new(group, options.mesh_shape(group.size())?)?;
    let engine = options.engine(EngineSetup::new(&vs, &mesh))?;
    let adam = AdamOptions { lr: 0.01, ..AdamOptions::default() };
    let mut optimizer = AdamW::new(parameters(&vs), adam)?;
    engine.adopt(&mut optimizer)?;
    let mut scaler = LossScaler::new(ScalePolicy::default(), Device::Cpu)?;
    let mut scales = Vec::new();
    for step in 0..STEPS {
        optimizer.zero_grad()?;
        let slope = Tensor::full([8, 4], 0.01 * (1 + group.rank()) as f64, (Kind::Float, Device::Cpu));
        if step == 2 && group.rank() == 1 {
            let _ = slope.narrow(0, 0, 1).fill_(f64::INFINITY);
        }
        let forward = || (&weight * &slope).sum(Kind::Float);
        let loss = engine.forward_with(GradSync::Reduce, forward)?;
        drop(scaler.backward_with(&loss, |loss| engine.backward(loss, GradSync::Reduce))?);
        let unscaled = engine.unscale(&scaler, optimizer.parameters())?;
        let made = engine.step_unless_overflowed(&unscaled, &mut optimizer)?;
        assert_eq!(made == StepMade::Skipped, step == 2, "on each rank");
        drop(unscaled.update(&mut scaler)?);
        scales.push(scaler.scale()?);
    }
    Ok((engine.full("w")?, scales))
}

ranks_test!(an_overflow_in_the_rows_of_one_rank_skips_the_step_of_all, 2, {
    let group = ProcessGroup::from_env()?;
    let (expected, scales) = trained_with_an_overflow(&group, DdpOptions::default().into())?;
    assert_eq!(scales[1], 2.0 * scales[2]);
    for stage in STAGES {
        let (ours, ours_scales) = trained_with_an_overflow(&group, ShardOptions::new(stage).into())?;
        assert_close(&[ours], &[expected.shallow_clone()], 1e-6);
        assert_eq!(ours_scales, scales, "{stage}");
    }
});

ranks_test!(an_optimizer_that_cannot_be_divided_is_an_error, 2, {
    let group = ProcessGroup::from_env()?;
    let mut sharded = Training::new(&group, ShardOptions::new(Stage::Zero1), adam)?;
    sharded.step(&group, 0, 1, None)?;
    let error = sharded.engine.adopt(&mut *sharded.optimizer).unwrap_err().to_string();
    assert!(error.contains("it has made a step"), "{error}");
});

/// A table that is larger than a slot, and a layer with odd sizes.
struct Table {
    table: Tensor,
    layer: tch::nn::Linear,
}

impl Table {
    const ROWS: i64 = 70_001;

    fn new(vs: &VarStore) -> Self {
        tch::set_num_threads(1);
        let table = vs.root().var("table", &[Self::ROWS, 15], tch::nn::Init::Const(0.01));
        let layer = tch::nn::linear(vs.root() / "layer", 15, 7, Default::default());
        for named in parameters(vs) {
            let index = Tensor::arange(named.tensor.numel() as i64, (Kind::Float, Device::Cpu));
            tch::no_grad(|| named.tensor.shallow_clone().copy_(&(index * 0.37).sin().view_as(&named.tensor)));
        }
        Self { table, layer }
    }

    fn loss(&self, rank: usize, step: i64) -> Tensor {
        let places = Tensor::arange(64, (Kind::Int64, Device::Cpu)) * 1009 + (rank as i64 * 31 + step) * 17;
        let rows = Tensor::embedding(&self.table, &places.remainder(Self::ROWS), -1, false, false);
        self.layer.forward(&rows).square().mean(Kind::Float)
    }
}

fn tables_are_reduced_in_chunks() -> Result<()> {
    let group = ProcessGroup::from_env()?;
    let train = |options: Box<dyn EngineOptions>| -> Result<Vec<Tensor>> {
        let vs = VarStore::new(Device::Cpu);
        let model = Table::new(&vs);
        let mesh = Mesh::new(&group, options.mesh_shape(group.size())?)?;
        let engine = options.engine(EngineSetup::new(&vs, &mesh))?;
        let mut optimizer = momentum(parameters(&vs))?;
        engine.adopt(&mut *optimizer)?;
        for step in 0..4 {
            optimizer.zero_grad()?;
            for micro_batch in 0..2 {
                let sync = GradSync::of(micro_batch, 2);
                let loss =
                    engine.forward_with(sync, || model.loss(group.rank(), step * 2 + micro_batch as i64))?;
                engine.backward(&loss, sync)?;
            }
            engine.step(&mut *optimizer)?;
        }
        Ok(values(&parameters(&vs)))
    };
    let ddp = train(DdpOptions::default().into())?;
    for stage in STAGES {
        assert_close(&train(ShardOptions::new(stage).into())?, &ddp, 1e-6);
    }
    Ok(())
}

ranks_test!(tables_larger_than_a_slot_are_reduced_in_chunks, 2, { tables_are_reduced_in_chunks()? });
ranks_test!(tables_are_reduced_in_chunks_of_three_ranks, 3, { tables_are_reduced_in_chunks()? });
