//! Optimizers with less state under ZeRO: those that treat each element or block by itself make the same steps to the
//! bit, and those that need norms, rows and columns of a whole parameter sum them over the ranks.

use anyhow::Result;
use drumline_comm::{Mesh, ProcessGroup};
use drumline_parallel::{DdpOptions, EngineOptions, EngineSetup, GradSync, ShardOptions};
use drumline_plan::Stage;
use drumline_torch::{
    Adafactor, AdamOptions, AdamW, Autocast, BiasCorrection, Lamb, LambOptions, Lion, LionOptions,
    MasterKind, MasterWeights, Moments, Named, Optimizer, TorchError, bytes, parameters, weights_in,
};
use rank_test::ranks_test;
use tch::nn::{Linear, Module, VarStore, linear};
use tch::{Device, Kind, Tensor};

use super::net::{loss, samples};

const STEPS: i64 = 5;
const STAGES: [Stage; 3] = [Stage::Zero1, Stage::Zero2, Stage::Zero3];

/// Layers of which one is large enough for moments in 8 bits, with 50 elements in a row; a weight of one row, and
/// biases of which some ranks own nothing.
#[derive(Debug)]
struct Wide {
    layers: [Linear; 4],
}

impl Wide {
    fn new(vs: &VarStore, seed: i64) -> Self {
        tch::set_num_threads(1);
        let sizes = [(6, 50), (50, 101), (101, 1), (1, 3)];
        let mut index = 0;
        let layers = sizes.map(|(from, to)| {
            index += 1;
            linear(vs.root() / format!("layer{index}"), from, to, Default::default())
        });
        for (place, named) in parameters(vs).iter().enumerate() {
            let numel = named.tensor.numel() as i64;
            let index = Tensor::arange(numel, (Kind::Float, Device::Cpu));
            let values = (index * 0.7 + (place as i64 + seed) as f64).sin() * 0.3;
            tch::no_grad(|| named.tensor.shallow_clone().copy_(&values.view_as(&named.tensor)));
        }
        Self { layers }
    }
}

impl Module for Wide {
    fn forward(&self, xs: &Tensor) -> Tensor {
        self.layers.iter().fold(xs.shallow_clone(), |xs, layer| layer.forward(&xs).tanh())
    }
}

type Make = fn(Vec<Named>) -> Result<Box<dyn Optimizer>, TorchError>;

fn adamw(moments: Moments) -> AdamOptions {
    AdamOptions { lr: 0.01, moments, ..AdamOptions::default() }
}

/// Those that treat each element or block by itself.
const ELEMENTWISE: [(&str, Make); 3] = [
    ("bf16 moments", |all| Ok(Box::new(AdamW::new(all, adamw(Moments::Bf16 { seed: 3 }))?))),
    ("8-bit moments", |all| Ok(Box::new(AdamW::new(all, adamw(Moments::EightBit))?))),
    ("lion", |all| {
        Ok(Box::new(Lion::new(all, LionOptions { lr: 1e-3, weight_decay: 0.1, ..Default::default() })?))
    }),
];

/// Those that need sums over all rows of a parameter.
const SUMMING: [(&str, Make); 3] = [
    ("lamb", |all| {
        Ok(Box::new(Lamb::new(all, LambOptions { lr: 0.02, weight_decay: 0.1, ..Default::default() })?))
    }),
    ("lamb of deepspeed", |all| {
        let bias_correction = BiasCorrection::StepSize;
        Ok(Box::new(Lamb::new(all, LambOptions { lr: 0.02, bias_correction, ..Default::default() })?))
    }),
    ("adafactor", |all| Ok(Box::new(Adafactor::new(all, Default::default())?))),
];

/// What a training has at its end.
struct Trained {
    values: Vec<Tensor>,
    state: Vec<Named>,
    /// Of this rank's parts, by name.
    first_rows: Vec<(String, i64)>,
}

fn train(group: &ProcessGroup, options: Box<dyn EngineOptions>, make: Make) -> Result<Trained> {
    let vs = VarStore::new(Device::Cpu);
    let net = Wide::new(&vs, group.rank() as i64 * 10);
    let mesh = Mesh::new(group, options.mesh_shape(group.size())?)?;
    let engine = options.engine(EngineSetup::new(&vs, &mesh))?;
    let mut optimizer = make(parameters(&vs))?;
    engine.adopt(&mut *optimizer)?;
    for step in 0..STEPS {
        let start = (step * group.size() as i64 + group.rank() as i64) * 8;
        let (x, y) = samples(start..start + 8);
        optimizer.zero_grad()?;
        let output = engine.forward_with(GradSync::Reduce, || net.forward(&x))?;
        engine.backward(&loss(&output, &y), GradSync::Reduce)?;
        engine.step(&mut *optimizer)?;
    }
    group.barrier()?;
    let first =
        |placed: drumline_parallel::Placed| (placed.name, placed.offsets.first().copied().unwrap_or(0));
    Ok(Trained {
        values: parameters(&vs).iter().map(|named| named.tensor.detach().copy()).collect(),
        state: optimizer.state().tensors,
        first_rows: engine.state().into_iter().map(first).collect(),
    })
}

impl Trained {
    /// Of a tensor of a whole state the part that a rank with these rows has.
    fn part_of(&self, whole: &Tensor, own: &Named) -> Tensor {
        let parameter = own.name.rsplit_once('.').unwrap().0;
        let first = self.first_rows.iter().find(|(name, _)| name == parameter).unwrap().1;
        if whole.size() == own.tensor.size() {
            return whole.shallow_clone();
        }
        whole.narrow(0, first, own.tensor.size()[0])
    }

    fn assert_like(&self, whole: &Self, tolerance: f64, what: &str) {
        let close = |ours: &Tensor, theirs: &Tensor| {
            let [ours, theirs] = [ours, theirs].map(|tensor| tensor.to_kind(Kind::Double));
            f64::try_from((ours - theirs).abs().max()).unwrap()
        };
        for (ours, theirs) in self.values.iter().zip(&whole.values) {
            let difference = close(ours, theirs);
            assert!(difference <= tolerance, "{what}: weights differ by {difference:e}");
        }
        for own in &self.state {
            let theirs = whole.state.iter().find(|named| named.name == own.name).unwrap();
            let theirs = self.part_of(&theirs.tensor, own);
            let difference = if own.tensor.numel() == 0 { 0.0 } else { close(&own.tensor, &theirs) };
            assert!(difference <= tolerance, "{what}: {} differs by {difference:e}", own.name);
        }
    }
}

fn stages_equal_replicas() -> Result<()> {
    let group = ProcessGroup::from_env()?;
    let all = ELEMENTWISE.map(|(name, make)| (name, make, 0.0)).into_iter();
    for (name, make, tolerance) in all.chain(SUMMING.map(|(name, make)| (name, make, 1e-6))) {
        let replicas = train(&group, DdpOptions::default().into(), make)?;
        for stage in STAGES {
            let sharded = train(&group, ShardOptions::new(stage).into(), make)?;
            sharded.assert_like(&replicas, tolerance, &format!("{name}, stage {stage}"));
            assert!(
                sharded.state.len() < replicas.state.len() || group.size() == 1,
                "a rank owns nothing of some"
            );
        }
    }
    Ok(())
}

ranks_test!(stages_equal_replicas_on_two_ranks, 2, { stages_equal_replicas()? });
ranks_test!(stages_equal_replicas_on_three_ranks, 3, { stages_equal_replicas()? });

/// The control of the sums: an optimizer that does not use the group makes other steps.
#[derive(Debug)]
struct WithoutSums(Lamb);

impl Optimizer for WithoutSums {
    fn step_with(&mut self, tensors: drumline_torch::StepTensors<'_>) -> Result<(), TorchError> {
        self.0.step_with(tensors)
    }
    fn keep_lr_on_device(&mut self) -> Result<(), TorchError> {
        self.0.keep_lr_on_device()
    }
    fn zero_grad(&mut self) -> Result<(), TorchError> {
        self.0.zero_grad()
    }
    fn lr(&self) -> f64 {
        self.0.lr()
    }
    fn set_lr(&mut self, lr: f64) {
        self.0.set_lr(lr);
    }
    fn parameters(&self) -> Vec<Named> {
        self.0.parameters()
    }
    fn replace_parameters(
        &mut self,
        replaced: &mut dyn FnMut(&Named) -> Option<Tensor>,
    ) -> Result<(), TorchError> {
        self.0.replace_parameters(replaced)
    }
    fn state(&self) -> drumline_torch::OptimizerState {
        self.0.state()
    }
    fn load_state(&mut self, state: &drumline_torch::OptimizerState) -> Result<(), TorchError> {
        self.0.load_state(state)
    }
}

ranks_test!(norms_of_own_rows_alone_make_other_steps, 2, {
    let group = ProcessGroup::from_env()?;
    let lamb: Make = |all| Ok(Box::new(Lamb::new(all, LambOptions { lr: 0.02, ..Default::default() })?));
    let without: Make =
        |all| Ok(Box::new(WithoutSums(Lamb::new(all, LambOptions { lr: 0.02, ..Default::default() })?)));
    let expected = train(&group, ShardOptions::new(Stage::Zero2).into(), lamb)?;
    let found = train(&group, ShardOptions::new(Stage::Zero2).into(), without)?;
    let differs = |(a, b): (&Tensor, &Tensor)| f64::try_from((a - b).abs().max()).unwrap() > 1e-5;
    assert!(found.values.iter().zip(&expected.values).any(differs));
});

/// bf16 weights and their masters after some steps, with each kind of master weights.
fn mastered(group: &ProcessGroup, options: Box<dyn EngineOptions>, kind: MasterKind) -> Result<Trained> {
    let vs = VarStore::new(Device::Cpu);
    let net = Wide::new(&vs, 0);
    weights_in(&parameters(&vs), Kind::BFloat16)?;
    let mesh = Mesh::new(group, options.mesh_shape(group.size())?)?;
    let engine = options.engine(EngineSetup::new(&vs, &mesh))?;
    let make = |copies| AdamW::new(copies, adamw(Moments::EightBit));
    let mut optimizer = MasterWeights::with_kind(kind, parameters(&vs), make)?;
    engine.adopt(&mut optimizer)?;
    for step in 0..STEPS {
        let start = (step * group.size() as i64 + group.rank() as i64) * 8;
        let (x, y) = samples(start..start + 8);
        optimizer.zero_grad()?;
        let output = engine.forward_with(GradSync::Reduce, || {
            let _autocast = Autocast::new(Device::Cpu, Kind::BFloat16);
            net.forward(&x)
        })?;
        engine.backward(&loss(&output.to_kind(Kind::Float), &y), GradSync::Reduce)?;
        engine.step(&mut optimizer)?;
    }
    group.barrier()?;
    let values = parameters(&vs).iter().map(|named| named.tensor.detach().copy()).collect();
    Ok(Trained { values, state: optimizer.state().tensors, first_rows: Vec::new() })
}

ranks_test!(split_master_rows_have_the_bits_of_copied_ones, 2, {
    let group = ProcessGroup::from_env()?;
    for stage in STAGES {
        let [copied, split] = [MasterKind::Copy, MasterKind::Split]
            .map(|kind| mastered(&group, ShardOptions::new(stage).into(), kind).unwrap());
        assert_eq!(copied.state.len(), split.state.len());
        for ours in &split.state {
            let theirs = copied.state.iter().find(|theirs| theirs.name == ours.name).unwrap();
            assert_eq!(bytes(&ours.tensor)?, bytes(&theirs.tensor)?, "{stage}: {}", ours.name);
        }
        for (ours, theirs) in split.values.iter().zip(&copied.values) {
            // Masters in the middle between two bf16 numbers are rounded to different ones.
            let num_different = i64::try_from(ours.ne_tensor(theirs).sum(Kind::Int64))?;
            let [ours, theirs] = [ours, theirs].map(|weights| weights.to_kind(Kind::Float));
            let furthest = f64::try_from((&ours - &theirs).abs().max())?;
            assert!(num_different <= 3 && furthest < 0.01, "{stage}: {num_different} differ by {furthest}");
        }
    }
});
