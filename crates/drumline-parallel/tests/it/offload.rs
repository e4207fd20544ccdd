//! State that lies on disk: the steps are those of state in memory, to the bit.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use anyhow::Result;
use drumline_comm::{Mesh, ProcessGroup};
use drumline_parallel::{
    Accumulation, Clip, Engine, EngineOptions, EngineSetup, GradSync, Offload, Place, ShardOptions,
};
use drumline_plan::Stage;
use drumline_torch::{
    AdamOptions, AdamW, Lamb, LambOptions, MasterWeights, Named, Optimizer, OptimizerState, Sgd, SgdOptions,
    grad, parameters, weights_in,
};
use rank_test::ranks_test;
use tch::nn::{Linear, VarStore, linear};
use tch::{Device, Kind, Tensor};

use super::net::{assert_close, values};

pub(super) const STEPS: i64 = 5;
/// Enough elements in a block for moments of 16 and 8 bits.
pub(super) const WIDTH: i64 = 72;
pub(super) const STAGES: [Stage; 3] = [Stage::Zero1, Stage::Zero2, Stage::Zero3];

/// Four blocks and a head: units of different sizes. The last block is used in every second step only.
pub(super) struct Blocks {
    pub(super) blocks: Vec<Linear>,
    pub(super) head: Linear,
}

impl Blocks {
    pub(super) fn new(vs: &VarStore) -> Self {
        tch::set_num_threads(1);
        tch::manual_seed(5);
        let block = |index: usize| linear(vs.root() / "h" / index, WIDTH, WIDTH, Default::default());
        Self {
            blocks: (0..4).map(block).collect(),
            head: linear(vs.root() / "head", WIDTH, 3, Default::default()),
        }
    }

    pub(super) fn loss(&self, step: i64, rank: usize) -> Tensor {
        // Weights may be in bf16, and biases are not.
        let apply = |layer: &Linear, x: &Tensor| {
            let product = x.to_kind(layer.ws.kind()).matmul(&layer.ws.tr());
            product.to_kind(Kind::Float) + layer.bs.as_ref().unwrap()
        };
        let x = (Tensor::arange(6 * WIDTH, (Kind::Float, Device::Cpu)) * 0.37
            + (step * 7 + rank as i64) as f64)
            .sin();
        let num_used = if step % 2 == 0 { 4 } else { 3 };
        let x = x.view([6, WIDTH]);
        let x = self.blocks[..num_used].iter().fold(x, |x, block| apply(block, &x).tanh());
        apply(&self.head, &x).square().mean(Kind::Float)
    }
}

/// Parameters of a kind, and their optimizer.
#[derive(Clone, Copy)]
pub(super) struct Case {
    pub(super) kind: Kind,
    pub(super) optimizer: fn(Vec<Named>) -> Result<Box<dyn Optimizer>>,
}

pub(super) const ADAM: Case = Case { kind: Kind::Float, optimizer: adam };
pub(super) const MOMENTUM: Case = Case { kind: Kind::Float, optimizer: momentum };
/// In bf16, with f32 masters.
pub(super) const MASTERS: Case = Case { kind: Kind::BFloat16, optimizer: masters };

pub(super) fn adam(params: Vec<Named>) -> Result<Box<dyn Optimizer>> {
    Ok(Box::new(AdamW::new(params, AdamOptions { lr: 0.05, amsgrad: true, ..AdamOptions::default() })?))
}

fn momentum(params: Vec<Named>) -> Result<Box<dyn Optimizer>> {
    Ok(Box::new(Sgd::new(
        params,
        SgdOptions { lr: 0.05, momentum: 0.9, dampening: 0.1, ..SgdOptions::default() },
    )?))
}

pub(super) fn masters(params: Vec<Named>) -> Result<Box<dyn Optimizer>> {
    let options = AdamOptions { lr: 1e-3, ..AdamOptions::default() };
    Ok(Box::new(MasterWeights::new(params, |copies| AdamW::new(copies, options))?))
}

pub(super) struct Training {
    pub(super) vs: VarStore,
    pub(super) model: Blocks,
    pub(super) engine: Box<dyn Engine>,
    pub(super) optimizer: Box<dyn Optimizer>,
}

impl Training {
    pub(super) fn new(group: &ProcessGroup, options: ShardOptions, case: Case) -> Result<Self> {
        let vs = VarStore::new(Device::Cpu);
        let model = Blocks::new(&vs);
        if case.kind != Kind::Float {
            weights_in(&parameters(&vs), case.kind)?;
        }
        let mut optimizer = (case.optimizer)(parameters(&vs))?;
        let mesh = Mesh::new(group, options.mesh_shape(group.size())?)?;
        let engine = Box::new(options).engine(EngineSetup::new(&vs, &mesh))?;
        engine.adopt(&mut *optimizer)?;
        Ok(Self { vs, model, engine, optimizer })
    }

    pub(super) fn step(&mut self, step: i64) -> Result<f64> {
        let rank = self.engine.mesh().whole().rank();
        self.optimizer.zero_grad()?;
        for micro_batch in 0..2 {
            let sync = GradSync::of(micro_batch, 2);
            let loss = self.engine.forward_with(sync, || self.model.loss(step, rank + 10 * micro_batch))?;
            self.engine.backward(&loss, sync)?;
        }
        let norm = self.engine.clip(Clip::Norm(0.05), &self.optimizer.parameters())?;
        self.engine.step(&mut *self.optimizer)?;
        Ok(norm.unwrap_or_default())
    }

    pub(super) fn run(&mut self, steps: std::ops::Range<i64>) -> Result<Vec<f64>> {
        steps.map(|step| self.step(step)).collect()
    }

    /// All parameters, and this rank's state of the optimizer, read at home.
    pub(super) fn bits(&self) -> (Vec<Tensor>, Vec<Named>) {
        let mut state = self.optimizer.state().tensors;
        state.iter_mut().for_each(|named| named.tensor = named.tensor.copy());
        (values(&parameters(&self.vs)), state)
    }
}

#[track_caller]
pub(super) fn assert_same(ours: &Training, theirs: &Training, what: &str) {
    let ((ours, our_state), (theirs, their_state)) = (ours.bits(), theirs.bits());
    assert_close(&ours, &theirs, 0.0);
    let names = |state: &[Named]| state.iter().map(|named| named.name.clone()).collect::<Vec<_>>();
    assert_eq!(names(&our_state), names(&their_state), "{what}");
    for (one, other) in our_state.iter().zip(&their_state) {
        assert!(one.tensor.equal(&other.tensor), "{what}: {}", one.name);
    }
}

pub(super) fn on_disk(folder: &Path, stage: Stage, ratio: f64) -> ShardOptions {
    let offload = Offload { optimizer: Place::Disk(folder.to_owned()), ratio, ..Offload::default() };
    ShardOptions { offload, ..ShardOptions::new(stage) }
}

/// The bytes of deleted files that this process holds in the folder.
pub(super) fn held_files(folder: &Path) -> Vec<PathBuf> {
    let links = std::fs::read_dir("/proc/self/fd").unwrap().filter_map(|entry| Some(entry.ok()?.path()));
    let is_there = |link: &PathBuf| std::fs::read_link(link).is_ok_and(|to| to.starts_with(folder));
    links.filter(is_there).collect()
}

fn offloaded_steps_have_the_same_bits(case: Case) -> Result<()> {
    let group = ProcessGroup::from_env()?;
    let folder = tempfile::tempdir()?;
    for stage in STAGES {
        for ratio in [1.0, 0.4] {
            for accumulation in [Accumulation::OwnRows, Accumulation::All] {
                let with = |options| ShardOptions { accumulation: Some(accumulation), ..options };
                let mut resident = Training::new(&group, with(ShardOptions::new(stage)), case)?;
                let mut offloaded = Training::new(&group, with(on_disk(folder.path(), stage, ratio)), case)?;
                let note = offloaded.engine.offload_note().unwrap();
                assert!(note.contains("two buffers") && note.contains(" GB/s"), "{note}");
                assert_eq!(held_files(folder.path()).len(), 1, "one file, which has no name");
                assert_eq!(std::fs::read_dir(folder.path())?.count(), 0);
                let what = format!("{stage} {ratio} {accumulation:?}");
                assert_eq!(offloaded.run(0..STEPS)?, resident.run(0..STEPS)?, "{what}: norms");
                assert_same(&offloaded, &resident, &what);
                let groups = offloaded.engine.state_groups();
                assert!(groups.len() > 2 && resident.engine.state_groups().is_empty(), "{groups:?}");
                // The control: another learning rate makes other weights.
                offloaded.optimizer.set_lr(1.0);
                offloaded.step(STEPS)?;
                assert!(!offloaded.bits().0[0].equal(&resident.bits().0[0]));
                let state = offloaded.bits().1;
                let (held, optimizer) = (offloaded.engine, offloaded.optimizer);
                drop(held);
                let after = optimizer.state().tensors;
                let is_same = after.iter().zip(&state).all(|(one, other)| one.tensor.equal(&other.tensor));
                assert!(is_same, "the state can be read when the engine has ended");
            }
        }
        assert!(held_files(folder.path()).is_empty(), "the file ends with its last tensor");
    }
    Ok(())
}

ranks_test!(one_rank_offloads, 1, { offloaded_steps_have_the_same_bits(ADAM)? });
ranks_test!(two_ranks_offload, 2, { offloaded_steps_have_the_same_bits(ADAM)? });
ranks_test!(three_ranks_offload_momentum, 3, { offloaded_steps_have_the_same_bits(MOMENTUM)? });
ranks_test!(two_ranks_offload_master_weights, 2, { offloaded_steps_have_the_same_bits(MASTERS)? });

/// A copy of the state in memory, in the groups in which it is loaded.
fn resumes(from: &Training, into: &mut Training) -> Result<()> {
    let (weights, tensors) = from.bits();
    into.engine.change_parameters(&mut || {
        for (named, value) in parameters(&into.vs).iter().zip(&weights) {
            tch::no_grad(|| named.tensor.shallow_clone().copy_(value));
        }
    })?;
    let state = OptimizerState { tensors, ..from.optimizer.state() };
    let groups = into.engine.state_groups();
    if groups.is_empty() {
        into.optimizer.load_state(&state)?;
    }
    for names in groups.into_iter().map(HashSet::<String>::from_iter) {
        let is_wanted = |name: &str| names.contains(name);
        let mut part = state.clone();
        part.tensors.retain(|named| is_wanted(named.name.rsplit_once('.').unwrap().0));
        into.optimizer.load_state_of(&part, &is_wanted)?;
        into.engine.settle_state(&*into.optimizer)?;
    }
    Ok(())
}

fn a_state_resumes_with_and_without_offload(case: Case) -> Result<()> {
    let group = ProcessGroup::from_env()?;
    let folder = tempfile::tempdir()?;
    let in_memory = || ("memory", ShardOptions::new(Stage::Zero2));
    let on_disk = || ("disk", on_disk(folder.path(), Stage::Zero2, 1.0));
    for [(from, options), (into, others)] in
        [[on_disk(), on_disk()], [on_disk(), in_memory()], [in_memory(), on_disk()]]
    {
        let mut first = Training::new(&group, options, case)?;
        first.run(0..3)?;
        let mut second = Training::new(&group, others, case)?;
        resumes(&first, &mut second)?;
        assert_same(&second, &first, "loaded");
        assert_eq!(second.run(3..STEPS)?, first.run(3..STEPS)?);
        assert_same(&second, &first, &format!("{from}, then {into}"));
        // State that was loaded at once is taken in by the next step.
        let whole = first.optimizer.state();
        second.optimizer.load_state(&whole)?;
        assert_eq!(second.run(5..7)?, first.run(5..7)?);
        assert_same(&second, &first, "loaded at once");
    }
    Ok(())
}

ranks_test!(one_rank_resumes_offloaded, 1, { a_state_resumes_with_and_without_offload(ADAM)? });
ranks_test!(two_ranks_resume_offloaded, 2, { a_state_resumes_with_and_without_offload(MASTERS)? });

/// As from a GPU: the CPU steps twins in host memory.
pub(super) fn beside(stage: Stage, ratio: f64) -> ShardOptions {
    let offload = Offload { optimizer: Place::Host, ratio, mimics_gpu: true, ..Offload::default() };
    ShardOptions { offload, ..ShardOptions::new(stage) }
}

fn twins_make_steps_with_the_same_bits(case: Case) -> Result<()> {
    let group = ProcessGroup::from_env()?;
    for stage in STAGES {
        for ratio in [1.0, 0.4] {
            for shards_alone in [false, true] {
                let with = |options| ShardOptions { shards_alone, ..options };
                let mut resident = Training::new(&group, with(ShardOptions::new(stage)), case)?;
                let mut offloaded = Training::new(&group, with(beside(stage, ratio)), case)?;
                let note = offloaded.engine.offload_note().unwrap();
                assert!(note.contains("\n  host ") && note.contains(" pinned for "), "{note}");
                assert!(offloaded.engine.is_recordable().is_err());
                let what = format!("{stage} {ratio} {shards_alone}");
                assert_eq!(offloaded.run(0..STEPS)?, resident.run(0..STEPS)?, "{what}: norms");
                assert_same(&offloaded, &resident, &what);
                // What a program writes to parameters counts.
                for training in [&mut offloaded, &mut resident] {
                    let held = training.engine.parameters();
                    let change = || held.iter().for_each(|named| drop(named.tensor.shallow_clone().neg_()));
                    training.engine.change_parameters(&mut || tch::no_grad(change))?;
                }
                assert_eq!(
                    offloaded.run(STEPS..STEPS + 2)?,
                    resident.run(STEPS..STEPS + 2)?,
                    "{what}: written"
                );
                assert_same(&offloaded, &resident, &what);
                // The control: another learning rate makes other weights.
                offloaded.optimizer.set_lr(1.0);
                offloaded.step(STEPS)?;
                assert!(!offloaded.bits().0[0].equal(&resident.bits().0[0]));
            }
        }
    }
    Ok(())
}

ranks_test!(one_rank_has_twins, 1, { twins_make_steps_with_the_same_bits(ADAM)? });
ranks_test!(two_ranks_have_twins, 2, { twins_make_steps_with_the_same_bits(ADAM)? });
ranks_test!(two_ranks_have_twins_with_momentum, 2, { twins_make_steps_with_the_same_bits(MOMENTUM)? });
ranks_test!(one_rank_has_twins_with_master_weights, 1, { twins_make_steps_with_the_same_bits(MASTERS)? });
ranks_test!(two_ranks_have_twins_with_master_weights, 2, { twins_make_steps_with_the_same_bits(MASTERS)? });

/// A step whose units are stepped in backward, or after it.
pub(super) fn step_without_clipping(training: &mut Training, step: i64, is_in_backward: bool) -> Result<()> {
    training.optimizer.zero_grad()?;
    let first = training.engine.forward_with(GradSync::Accumulate, || training.model.loss(step, 0))?;
    training.engine.backward(&first, GradSync::Accumulate)?;
    let last = training.engine.forward_with(GradSync::Reduce, || training.model.loss(step, 10))?;
    if is_in_backward {
        return Ok(training.engine.backward_and_step(&last, &mut *training.optimizer)?);
    }
    training.engine.backward(&last, GradSync::Reduce)?;
    Ok(training.engine.step(&mut *training.optimizer)?)
}

fn units_step_in_backward_to_the_same_bits(case: Case) -> Result<()> {
    let group = ProcessGroup::from_env()?;
    for ratio in [1.0, 0.4] {
        let mut resident = Training::new(&group, ShardOptions::new(Stage::Zero1), case)?;
        let mut offloaded = Training::new(&group, beside(Stage::Zero1, ratio), case)?;
        for step in 0..STEPS {
            step_without_clipping(&mut resident, step, false)?;
            // Some steps are made after backward.
            step_without_clipping(&mut offloaded, step, step != 3)?;
            let freed = grad(&offloaded.model.blocks[0].ws)?.is_none();
            assert_eq!(freed, step != 3, "gradients in step {step}");
            assert_same(&offloaded, &resident, &format!("{ratio} {step}"));
        }
    }
    Ok(())
}

ranks_test!(units_step_in_backward, 1, { units_step_in_backward_to_the_same_bits(ADAM)? });
ranks_test!(units_with_master_weights_step_in_backward, 1, {
    units_step_in_backward_to_the_same_bits(MASTERS)?
});

fn a_state_resumes_with_and_without_twins(case: Case) -> Result<()> {
    let group = ProcessGroup::from_env()?;
    let with = || Training::new(&group, beside(Stage::Zero2, 1.0), case);
    let without = || Training::new(&group, ShardOptions::new(Stage::Zero2), case);
    for (from, into) in [(with()?, without()?), (without()?, with()?), (with()?, with()?)] {
        let (mut from, mut into) = (from, into);
        from.run(0..3)?;
        into.run(7..8)?;
        resumes(&from, &mut into)?;
        assert_eq!(into.run(3..5)?, from.run(3..5)?);
        assert_same(&into, &from, "resumed");
    }
    Ok(())
}

ranks_test!(one_rank_resumes_with_twins, 1, { a_state_resumes_with_and_without_twins(MASTERS)? });
ranks_test!(two_ranks_resume_with_twins, 2, { a_state_resumes_with_and_without_twins(ADAM)? });

ranks_test!(an_optimizer_that_does_not_say_its_state_has_no_twins, 1, {
    let group = ProcessGroup::from_env()?;
    let lamb =
        |params| -> Result<Box<dyn Optimizer>> { Ok(Box::new(Lamb::new(params, LambOptions::default())?)) };
    let error = Training::new(&group, beside(Stage::Zero1, 1.0), Case { kind: Kind::Float, optimizer: lamb });
    let error = error.err().unwrap().to_string();
    assert!(error.contains("the optimizer `lamb` does not say how much state it keeps"), "{error}");
});

ranks_test!(a_disk_that_cannot_be_used_is_an_error_on_all_ranks_before_training, 2, {
    let group = ProcessGroup::from_env()?;
    let folder = tempfile::tempdir()?;
    // Only rank 1 cannot use its folder.
    let own = if group.rank() == 1 { folder.path().join("missing") } else { folder.path().to_owned() };
    let error = Training::new(&group, on_disk(&own, Stage::Zero1, 1.0), ADAM).err().unwrap().to_string();
    assert!(error.starts_with("rank 1 cannot offload: cannot make a file"), "{error}");
    assert!(error.ends_with("try a folder that exists and can be written"), "{error}");
    let too_much = Offload { ratio: 1.5, ..Offload::default() };
    let options = ShardOptions { offload: too_much, ..ShardOptions::new(Stage::Zero1) };
    let error = Training::new(&group, options, ADAM).err().unwrap().to_string();
    assert!(error.contains("the ratio of offloaded state is 1.5"), "{error}");
    let error = Training::new(&group, on_disk(&own, Stage::Zero0, 1.0), ADAM).err().unwrap().to_string();
    assert!(error.contains("expected 1, 2 or 3"), "{error}");
    // The control: the same ranks can train.
    Training::new(&group, on_disk(folder.path(), Stage::Zero1, 1.0), ADAM)?.run(0..1)?;
});

ranks_test!(a_file_that_loses_state_ends_the_training_on_all_ranks, 2, {
    let group = ProcessGroup::from_env()?;
    let folder = tempfile::tempdir()?;
    let mut training = Training::new(&group, on_disk(folder.path(), Stage::Zero2, 1.0), ADAM)?;
    training.run(0..2)?;
    if group.rank() == 1 {
        let held = held_files(folder.path());
        std::fs::OpenOptions::new().write(true).open(&held[0])?.set_len(4096)?;
    }
    let error = training.step(2).unwrap_err().to_string();
    match group.rank() {
        1 => assert!(
            error.contains("the file for state in") && error.contains("resume from the last"),
            "{error}"
        ),
        _ => assert!(error.contains("rank 1") && error.contains("the file for state in"), "{error}"),
    }
    if group.rank() == 1 {
        let error = training.engine.step(&mut *training.optimizer).unwrap_err().to_string();
        assert!(error.contains("makes no more steps"), "{error}");
    }
});

ranks_test!(what_fits_stays_in_memory, 2, {
    let group = ProcessGroup::from_env()?;
    let folder = tempfile::tempdir()?;
    let offload = Offload { optimizer: Place::Auto(folder.path().to_owned()), ..Offload::default() };
    let options = ShardOptions { offload, ..ShardOptions::new(Stage::Zero1) };
    let mut fits = Training::new(&group, options, ADAM)?;
    assert!(held_files(folder.path()).is_empty());
    assert!(fits.engine.offload_note().unwrap().contains("\n  memory "), "{:?}", fits.engine.offload_note());
    let mut resident = Training::new(&group, ShardOptions::new(Stage::Zero1), ADAM)?;
    assert_eq!(fits.run(0..2)?, resident.run(0..2)?);
    assert_same(&fits, &resident, "auto");
});

ranks_test!(rows_of_parameters_lie_on_disk, 2, {
    let group = ProcessGroup::from_env()?;
    rows_on_disk_have_the_same_bits(&group)?;
});

ranks_test!(one_rank_has_its_parameters_on_disk, 1, {
    let group = ProcessGroup::from_env()?;
    rows_on_disk_have_the_same_bits(&group)?;
    let folder = tempfile::tempdir()?;
    let offload = Offload { parameters: Place::Disk(folder.path().to_owned()), ..Offload::default() };
    let options = ShardOptions { offload, ..ShardOptions::new(Stage::Zero2) };
    let error = Training::new(&group, options, ADAM).err().unwrap().to_string();
    assert!(error.contains("the place of parameters is a file; expected in stage 3"), "{error}");
});

fn rows_on_disk_have_the_same_bits(group: &ProcessGroup) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let disk = Place::Disk(folder.path().to_owned());
    let stage_3 =
        || ShardOptions { keep_gathered: 100, shards_alone: true, ..ShardOptions::new(Stage::Zero3) };
    for case in [ADAM, MASTERS] {
        for optimizer in [Place::Device, disk.clone()] {
            let gathered = ShardOptions { gather_parameters: Some(true), ..stage_3() };
            let mut resident = Training::new(group, gathered, case)?;
            let num_files = 1 + usize::from(optimizer == disk);
            let offload = Offload { optimizer, parameters: disk.clone(), ..Offload::default() };
            let mut offloaded = Training::new(group, ShardOptions { offload, ..stage_3() }, case)?;
            assert_eq!(held_files(folder.path()).len(), num_files);
            assert_eq!(offloaded.run(0..STEPS)?, resident.run(0..STEPS)?);
            for named in parameters(&resident.vs) {
                let [ours, theirs] =
                    [&offloaded, &resident].map(|training| training.engine.full(&named.name));
                assert!(ours?.equal(&theirs?), "{}", named.name);
            }
        }
    }
    Ok(())
}
