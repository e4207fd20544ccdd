//! Activation checkpoints under each engine: the same bits as without them.

use anyhow::Result;
use drumline_comm::{Mesh, ProcessGroup};
use drumline_parallel::{
    Accumulation, Agreed, Brought, DdpOptions, Engine, EngineOptions, EngineSetup, GradSync, ShardOptions,
    SyncBatchNorm, SyncGroup,
};
use drumline_plan::Stage;
use drumline_torch::{
    AdamOptions, AdamW, Autocast, LossScaler, Optimizer, ScalePolicy, checkpoint, keep, parameters,
    selective_checkpoint, sum_with_dropout,
};
use rank_test::ranks_test;
use tch::nn::{BatchNormConfig, Init, ModuleT, VarStore};
use tch::{Device, Kind, Tensor};

const STEPS: i64 = 3;
const WIDTH: i64 = 24;
const BLOCKS: usize = 5;

#[derive(Debug, Clone, Copy, PartialEq)]
enum How {
    Plain,
    Full,
    Selective,
}

/// Two layers with GELU between them, dropout and a residual connection.
struct Block([Tensor; 2]);

impl Block {
    fn new(vs: &VarStore, index: usize) -> Self {
        let path = vs.root() / "h" / index;
        Self(["one", "two"].map(|name| path.var(name, &[WIDTH, WIDTH], Init::Const(0.0))))
    }

    fn shared(&self) -> Self {
        let Self([one, two]) = self;
        Self([one.shallow_clone(), two.shallow_clone()])
    }

    fn forward(&self, xs: &Tensor) -> Tensor {
        let product =
            |xs: &Tensor, weight: &Tensor| keep(&[xs], || Ok(xs.f_linear(weight, None::<&Tensor>)?)).unwrap();
        let hidden = product(xs, &self.0[0]).gelu("none");
        sum_with_dropout(xs, &product(&hidden, &self.0[1]), 0.2).unwrap()
    }
}

/// Blocks and a scale, on an engine.
struct Training {
    blocks: Vec<Block>,
    scale: Tensor,
    how: How,
    engine: Box<dyn Engine>,
    optimizer: AdamW,
    names: Vec<String>,
}

impl Training {
    fn new(group: &ProcessGroup, options: Box<dyn EngineOptions>, how: How) -> Result<Self> {
        tch::set_num_threads(1);
        tch::manual_seed(5 + group.rank() as i64);
        let vs = VarStore::new(Device::Cpu);
        let blocks = (0..BLOCKS).map(|index| Block::new(&vs, index)).collect();
        let scale = vs.root().ones("scale", &[WIDTH]);
        for named in parameters(&vs) {
            let index = Tensor::arange(named.tensor.numel() as i64, (Kind::Float, Device::Cpu));
            let value = (index * 0.37 + named.name.bytes().map(f64::from).sum::<f64>()).sin() * 0.4;
            tch::no_grad(|| named.tensor.shallow_clone().copy_(&value.view_as(&named.tensor)));
        }
        let mut optimizer = AdamW::new(parameters(&vs), AdamOptions { lr: 0.01, ..AdamOptions::default() })?;
        let mesh = Mesh::new(group, options.mesh_shape(group.size())?)?;
        let names = parameters(&vs).into_iter().map(|named| named.name).collect();
        let engine = options.engine(EngineSetup::new(&vs, &mesh))?;
        engine.adopt(&mut optimizer)?;
        Ok(Self { blocks, scale, how, engine, optimizer, names })
    }

    fn forward(&self, x: &Tensor) -> Tensor {
        self.blocks.iter().fold(x * &self.scale, |x, block| {
            let owned = block.shared();
            let function = move |xs: &[Tensor]| Ok(owned.forward(&xs[0]));
            match self.how {
                How::Plain => block.forward(&x),
                How::Full => checkpoint(function, &[&x]).unwrap(),
                How::Selective => selective_checkpoint(function, &[&x]).unwrap(),
            }
        })
    }

    fn micro_batch(&self, x: &Tensor, precision: Option<Kind>, sync: GradSync) -> Result<f64> {
        let forward = || -> Result<Tensor> {
            let _autocast = precision.map(|kind| Autocast::new(Device::Cpu, kind)).transpose()?;
            Ok(self.forward(x).to_kind(Kind::Float).square().mean(Kind::Float))
        };
        let loss = self.engine.forward_with(sync, forward)??;
        if precision != Some(Kind::Half) {
            self.engine.backward(&loss, sync)?;
            return Ok(loss.double_value(&[]));
        }
        let scaler = LossScaler::new(ScalePolicy::Static(64.0), Device::Cpu)?;
        drop(scaler.backward_with(&loss, |loss| self.engine.backward(loss, sync))?);
        if sync == GradSync::Reduce {
            drop(self.engine.unscale(&scaler, self.optimizer.parameters())?);
        }
        Ok(loss.double_value(&[]))
    }

    /// A step of two micro-batches.
    fn step(&mut self, rank: usize, step: i64, precision: Option<Kind>) -> Result<f64> {
        self.optimizer.zero_grad()?;
        self.micro_batch(&input(rank, step), precision, GradSync::Accumulate)?;
        let loss = self.micro_batch(&input(rank, step + 100), precision, GradSync::Reduce)?;
        self.engine.step(&mut self.optimizer)?;
        Ok(loss)
    }

    fn weights(&self) -> Result<Vec<Tensor>> {
        self.names.iter().map(|name| Ok(self.engine.full(name)?)).collect()
    }
}

fn input(rank: usize, step: i64) -> Tensor {
    let index = Tensor::arange(4 * WIDTH, (Kind::Float, Device::Cpu)) + (rank as i64 * 1000 + step * 77);
    (index * 0.11).cos().view([4, WIDTH])
}

/// Trains with and without checkpoints; losses and weights must have the same bits.
fn same_bits(options: impl Fn() -> Box<dyn EngineOptions>, precision: Option<Kind>) -> Result<()> {
    let group = ProcessGroup::from_env()?;
    let train = |how: How| -> Result<(Vec<f64>, Vec<Tensor>)> {
        let mut training = Training::new(&group, options(), how)?;
        let losses = (0..STEPS).map(|step| training.step(group.rank(), step, precision));
        let losses = losses.collect::<Result<_>>()?;
        Ok((losses, training.weights()?))
    };
    let (losses, weights) = train(How::Plain)?;
    assert!(losses[0] != losses[1] && losses.iter().all(|loss| loss.is_finite()), "{losses:?}");
    for how in [How::Full, How::Selective] {
        let found = train(how)?;
        assert_eq!(found.0, losses, "{how:?}");
        assert!(found.1.iter().zip(&weights).all(|(ours, theirs)| ours.equal(theirs)), "{how:?}");
    }
    Ok(())
}

fn ddp() -> Box<dyn EngineOptions> {
    DdpOptions { bucket_cap: 4000, first_bucket: 1000, ..DdpOptions::default() }.into()
}

fn stage(stage: Stage) -> Box<dyn EngineOptions> {
    ShardOptions::new(stage).into()
}

fn gathered(accumulation: Accumulation) -> Box<dyn EngineOptions> {
    ShardOptions {
        gather_parameters: Some(true),
        keep_gathered: 30,
        accumulation: Some(accumulation),
        ..ShardOptions::new(Stage::Zero3)
    }
    .into()
}

ranks_test!(checkpoints_train_to_the_same_bits_with_ddp, 2, { same_bits(ddp, None)? });
ranks_test!(checkpoints_train_to_the_same_bits_with_zero_1_and_2, 2, {
    same_bits(|| stage(Stage::Zero1), None)?;
    same_bits(|| stage(Stage::Zero2), None)?;
});
ranks_test!(checkpoints_train_to_the_same_bits_with_zero_3, 2, { same_bits(|| stage(Stage::Zero3), None)? });
ranks_test!(checkpoints_train_to_the_same_bits_with_gathered_parameters, 2, {
    same_bits(|| gathered(Accumulation::OwnRows), None)?;
    same_bits(|| gathered(Accumulation::All), None)?;
});
ranks_test!(checkpoints_train_to_the_same_bits_in_16_bits, 2, {
    for kind in [Kind::BFloat16, Kind::Half] {
        same_bits(ddp, Some(kind))?;
        same_bits(|| stage(Stage::Zero3), Some(kind))?;
        same_bits(|| gathered(Accumulation::OwnRows), Some(kind))?;
    }
});

ranks_test!(checkpoints_of_ranks_with_different_numbers_of_batches, 2, {
    let group = ProcessGroup::from_env()?;
    for options in [ddp as fn() -> Box<dyn EngineOptions>, || gathered(Accumulation::OwnRows)] {
        let mut all = Vec::new();
        for how in [How::Plain, How::Full] {
            let mut training = Training::new(&group, options(), how)?;
            training.step(group.rank(), 0, None)?;
            // Rank 0 has two micro-batches, rank 1 has one.
            let batches = 2 - group.rank();
            let brought = Brought { batches, samples: batches * 4, count: 1.0, ..Brought::default() };
            let agreed = Agreed::reach(training.engine.mesh(), &brought)?;
            training.optimizer.zero_grad()?;
            training.engine.begin_step(&agreed)?;
            for index in 0..batches {
                training.engine.begin_micro_batch();
                let sync = GradSync::of(index, agreed.most_batches());
                training.micro_batch(&input(group.rank(), index as i64), None, sync)?;
            }
            training.engine.join_rest(batches, agreed.most_batches())?;
            training.engine.step(&mut training.optimizer)?;
            all.push(training.weights()?);
        }
        assert!(all[0].iter().zip(&all[1]).all(|(plain, full)| plain.equal(full)));
    }
});

/// Two layers with a norm over all ranks between them, for each of two blocks.
fn with_norms(group: &ProcessGroup, how: How) -> Result<Vec<Tensor>> {
    tch::set_num_threads(1);
    let (vs, sync) = (VarStore::new(Device::Cpu), SyncGroup::new(group)?);
    let options = DdpOptions { sync_group: Some(sync.clone()), ..DdpOptions::default() };
    let weights: Vec<Tensor> =
        (0..2).map(|index| (vs.root() / index).var("w", &[WIDTH, WIDTH], Init::Const(0.0))).collect();
    let norm =
        |index: usize| SyncBatchNorm::new(vs.root() / index / "bn", WIDTH, BatchNormConfig::default(), &sync);
    let norms: Vec<_> = (0..2).map(|index| std::sync::Arc::new(std::sync::Mutex::new(norm(index)))).collect();
    for (index, named) in parameters(&vs).into_iter().enumerate() {
        let numbers = Tensor::arange(named.tensor.numel() as i64, (Kind::Float, Device::Cpu)) * 0.3;
        let value = (numbers + index as f64).sin().view_as(&named.tensor);
        tch::no_grad(|| named.tensor.shallow_clone().copy_(&value));
    }
    let mut optimizer = AdamW::new(parameters(&vs), AdamOptions { lr: 0.01, ..AdamOptions::default() })?;
    let mesh = Mesh::new(group, options.mesh_shape(group.size())?)?;
    let engine = Box::new(options).engine(EngineSetup::new(&vs, &mesh))?;
    engine.adopt(&mut optimizer)?;
    for step in 0..STEPS {
        optimizer.zero_grad()?;
        let net = || {
            weights.iter().zip(&norms).fold(input(group.rank(), step), |x, (weight, norm)| {
                let (weight, norm) = (weight.shallow_clone(), norm.clone());
                let function = move |xs: &[Tensor]| {
                    Ok(norm.lock().unwrap().forward_t(&xs[0].matmul(&weight), true).tanh())
                };
                let made = if how == How::Plain {
                    function(&[x.shallow_clone()])
                } else {
                    checkpoint(function, &[&x]).map_err(Into::into)
                };
                made.unwrap()
            })
        };
        let loss = engine.forward_with(GradSync::Reduce, || net().square().mean(Kind::Float))?;
        engine.backward(&loss, GradSync::Reduce)?;
        engine.step(&mut optimizer)?;
    }
    let variables: std::collections::BTreeMap<_, _> = vs.variables().into_iter().collect();
    Ok(variables.into_values().map(|tensor| tensor.detach().copy()).collect())
}

ranks_test!(synchronised_norms_in_checkpoints_count_a_batch_once, 2, {
    let group = ProcessGroup::from_env()?;
    let plain = with_norms(&group, How::Plain)?;
    let full = with_norms(&group, How::Full)?;
    assert!(plain.iter().zip(&full).all(|(plain, full)| plain.equal(full)), "running statistics, too");
});
