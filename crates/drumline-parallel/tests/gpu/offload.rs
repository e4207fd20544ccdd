//! The optimizer's state in host memory: steps as with the state on the GPU.
//!
//! The CPU's kernels and the GPU's round some intermediate results in another order, so that weights are close and not of
//! the same bits. Two runs with the same decision have the same bits.

use std::collections::HashSet;

use anyhow::Result;
use drumline_comm::{Mesh, ProcessGroup};
use drumline_parallel::{
    Clip, Engine, EngineOptions, EngineSetup, GradSync, Offload, ParallelError, Place, ShardOptions,
};
use drumline_plan::Stage;
use drumline_torch::cuda::memory;
use drumline_torch::{
    AdamOptions, AdamW, MasterWeights, Named, Optimizer, OptimizerState, PAGE, Pages, Sgd, SgdOptions,
    parameters, weights_in,
};
use rank_test::ranks_test;
use tch::nn::{Linear, VarStore, linear};
use tch::{Device, Kind, Tensor};

use super::{GPU, join};

const STEPS: i64 = 6;
const WIDTH: i64 = 64;
const STAGES: [Stage; 3] = [Stage::Zero1, Stage::Zero2, Stage::Zero3];

#[derive(Clone, Copy)]
struct Case {
    name: &'static str,
    kind: Kind,
    optimizer: fn(Vec<Named>) -> Result<Box<dyn Optimizer>>,
    /// By how much weights may differ.
    close: f64,
}

const CASES: [Case; 3] = [
    Case { name: "AdamW", kind: Kind::Float, optimizer: adam, close: 1e-5 },
    Case { name: "momentum", kind: Kind::Float, optimizer: momentum, close: 1e-5 },
    // Weights in bf16 near 0.5 are 0.004 apart.
    Case { name: "master weights", kind: Kind::BFloat16, optimizer: masters, close: 8e-3 },
];

fn adam(params: Vec<Named>) -> Result<Box<dyn Optimizer>> {
    Ok(Box::new(AdamW::new(params, AdamOptions { lr: 1e-2, eps: 1e-4, ..AdamOptions::default() })?))
}

fn momentum(params: Vec<Named>) -> Result<Box<dyn Optimizer>> {
    Ok(Box::new(Sgd::new(params, SgdOptions { lr: 0.1, momentum: 0.9, ..SgdOptions::default() })?))
}

fn masters(params: Vec<Named>) -> Result<Box<dyn Optimizer>> {
    let options = AdamOptions { lr: 1e-2, eps: 1e-4, ..AdamOptions::default() };
    Ok(Box::new(MasterWeights::new(params, |copies| AdamW::new(copies, options))?))
}

struct Training {
    vs: VarStore,
    blocks: Vec<Linear>,
    engine: Box<dyn Engine>,
    optimizer: Box<dyn Optimizer>,
}

impl Training {
    fn new(group: &ProcessGroup, options: ShardOptions, case: Case) -> Result<Self> {
        let vs = VarStore::new(GPU);
        let block = |index: usize| linear(vs.root() / "h" / index, WIDTH, WIDTH, Default::default());
        let blocks = (0..6).map(block).collect();
        for named in parameters(&vs) {
            let index = Tensor::arange(named.tensor.numel() as i64, (Kind::Float, Device::Cpu));
            let value = (index * 0.37).sin() * 0.3;
            tch::no_grad(|| named.tensor.shallow_clone().copy_(&value.view_as(&named.tensor)));
        }
        if case.kind != Kind::Float {
            weights_in(&parameters(&vs), case.kind)?;
        }
        let mut optimizer = (case.optimizer)(parameters(&vs))?;
        let mesh = Mesh::new(group, options.mesh_shape(group.size())?)?;
        let engine = Box::new(options).engine(EngineSetup::new(&vs, &mesh))?;
        engine.adopt(&mut *optimizer)?;
        Ok(Self { vs, blocks, engine, optimizer })
    }

    fn loss(&self, step: i64, factor: f64) -> Tensor {
        let rank = self.engine.mesh().whole().rank() as i64;
        let index = Tensor::arange(16 * WIDTH, (Kind::Float, GPU)) + (rank * 5000 + step * 77);
        let x = (index * 0.11).cos().view([16, WIDTH]);
        let apply = |x: Tensor, layer: &Linear| {
            let product = x.to_kind(layer.ws.kind()).matmul(&layer.ws.tr()).to_kind(Kind::Float);
            (product + layer.bs.as_ref().unwrap()).tanh()
        };
        let y = self.blocks.iter().fold(x, apply);
        (y - 0.25).square().mean(Kind::Float) * factor
    }

    fn accumulate(&mut self, step: i64, factor: f64) -> std::result::Result<f64, ParallelError> {
        self.optimizer.zero_grad()?;
        let mut sum = 0.0;
        for micro_batch in 0..2 {
            let sync = GradSync::of(micro_batch, 2);
            let loss =
                self.engine.forward_with(sync, || self.loss(step + 100 * micro_batch as i64, factor))?;
            self.engine.backward(&loss, sync)?;
            sum += loss.double_value(&[]);
        }
        Ok(sum)
    }

    fn losses(&mut self, steps: std::ops::Range<i64>) -> Result<Vec<f64>> {
        let mut losses = Vec::new();
        for step in steps {
            losses.push(self.accumulate(step, 1.0)?);
            self.engine.clip(Clip::Norm(0.1), &self.optimizer.parameters())?;
            self.engine.step(&mut *self.optimizer)?;
        }
        Ok(losses)
    }

    fn weights(&self) -> Result<Vec<Tensor>> {
        let names = parameters(&self.vs).into_iter().map(|named| named.name);
        names.map(|name| Ok(self.engine.full(&name)?.to_kind(Kind::Float).to_device(Device::Cpu))).collect()
    }
}

fn with(stage: Stage, offload: Offload) -> ShardOptions {
    let shards_alone = stage != Stage::Zero0;
    ShardOptions { keep_gathered: 100, shards_alone, offload, ..ShardOptions::new(stage) }
}

fn to_host(stage: Stage, ratio: f64) -> ShardOptions {
    with(stage, Offload { optimizer: Place::Host, ratio, ..Offload::default() })
}

fn on_gpu(stage: Stage) -> ShardOptions {
    with(stage, Offload::default())
}

#[track_caller]
fn assert_close(ours: &[Tensor], theirs: &[Tensor], close: f64, what: &str) {
    let most = |(one, other): (&Tensor, &Tensor)| (one - other).abs().max().double_value(&[]);
    let most = ours.iter().zip(theirs).map(most).fold(0.0, f64::max);
    assert!(most <= close, "{what}: weights differ by {most}");
}

fn steps_are_those_of_the_gpu(stages: &[Stage]) -> Result<()> {
    let group = join()?;
    for case in CASES {
        for stage in stages {
            let mut resident = Training::new(&group, on_gpu(*stage), case)?;
            let expected = resident.losses(0..STEPS)?;
            assert!(expected[0] > 1.1 * expected[STEPS as usize - 1], "it learns: {expected:?}");
            for ratio in [1.0, 0.5] {
                let what = format!("{} {stage} {ratio}", case.name);
                let mut runs = Vec::new();
                for _ in 0..2 {
                    let mut offloaded = Training::new(&group, to_host(*stage, ratio), case)?;
                    let note = offloaded.engine.offload_note().unwrap();
                    assert!(note.contains("\n  host "), "{note}");
                    assert!(offloaded.engine.is_recordable().is_err());
                    let losses = offloaded.losses(0..STEPS)?;
                    let is_close = losses
                        .iter()
                        .zip(&expected)
                        .all(|(ours, theirs)| (ours - theirs).abs() < case.close.max(1e-5));
                    assert!(is_close, "{what}: {losses:?} and {expected:?}");
                    runs.push(offloaded.weights()?);
                }
                assert_close(&runs[0], &resident.weights()?, case.close, &what);
                let is_same = runs[0].iter().zip(&runs[1]).all(|(one, other)| one.equal(other));
                assert!(is_same, "{what}: two runs have the same bits");
            }
        }
    }
    Ok(())
}

ranks_test!(one_rank_without_zero_steps_in_host_memory, 1, { steps_are_those_of_the_gpu(&[Stage::Zero0])? });
ranks_test!(one_rank_with_zero_steps_in_host_memory, 1, { steps_are_those_of_the_gpu(&STAGES)? });
ranks_test!(two_ranks_step_in_host_memory, 2, { steps_are_those_of_the_gpu(&STAGES)? });

ranks_test!(a_skipped_step_changes_no_state_in_host_memory, 1, timeout = super::BRIEF, {
    let group = join()?;
    let case = CASES[2];
    let mut skipping = Training::new(&group, to_host(Stage::Zero0, 1.0), case)?;
    let mut control = Training::new(&group, to_host(Stage::Zero0, 1.0), case)?;
    skipping.losses(0..2)?;
    control.losses(0..2)?;
    skipping.accumulate(2, f64::INFINITY)?;
    assert!(
        !skipping.engine.grad_norm(&skipping.optimizer.parameters())?.is_finite(),
        "the program skips it"
    );
    assert_eq!(skipping.losses(3..5)?, control.losses(3..5)?);
    assert_close(&skipping.weights()?, &control.weights()?, 0.0, "after a skipped step");
});

fn resumes(from: &Training, into: &mut Training) -> Result<()> {
    let weights = from.weights()?;
    into.engine.change_parameters(&mut || {
        for (named, value) in parameters(&into.vs).iter().zip(&weights) {
            tch::no_grad(|| named.tensor.shallow_clone().copy_(&value.to_kind(named.tensor.kind())));
        }
    })?;
    let state = from.optimizer.state();
    let groups = into.engine.state_groups();
    if groups.is_empty() {
        into.optimizer.load_state(&state)?;
    }
    for names in groups.into_iter().map(HashSet::<String>::from_iter) {
        let is_wanted = |name: &str| names.contains(name);
        let tensors =
            state.tensors.iter().filter(|named| is_wanted(named.name.rsplit_once('.').unwrap().0)).cloned();
        let part = OptimizerState { tensors: tensors.collect(), ..state.clone() };
        into.optimizer.load_state_of(&part, &is_wanted)?;
        into.engine.settle_state(&*into.optimizer)?;
    }
    Ok(())
}

ranks_test!(state_resumes_with_and_without_offload, 1, timeout = super::BRIEF, {
    let group = join()?;
    for case in CASES {
        let options = || [to_host(Stage::Zero0, 1.0), on_gpu(Stage::Zero0), to_host(Stage::Zero0, 0.5)];
        for (from, into) in [(0, 1), (1, 0), (0, 2), (2, 0)] {
            let mut options = options().map(Some);
            let mut first = Training::new(&group, options[from].take().unwrap(), case)?;
            first.losses(0..3)?;
            let mut second = Training::new(&group, options[into].take().unwrap(), case)?;
            resumes(&first, &mut second)?;
            assert_close(&second.weights()?, &first.weights()?, 0.0, "loaded");
            first.losses(3..5)?;
            second.losses(3..5)?;
            let what = format!("{} from {from} to {into}", case.name);
            assert_close(&second.weights()?, &first.weights()?, case.close, &what);
        }
    }
});

ranks_test!(units_step_in_backward, 1, timeout = super::BRIEF, {
    let group = join()?;
    for case in CASES {
        for ratio in [1.0, 0.5] {
            let mut runs = Vec::new();
            for is_in_backward in [true, false] {
                let mut training = Training::new(&group, to_host(Stage::Zero0, ratio), case)?;
                for step in 0..STEPS {
                    training.optimizer.zero_grad()?;
                    for (micro_batch, sync) in
                        [GradSync::Accumulate, GradSync::Reduce].into_iter().enumerate()
                    {
                        let step = step + 100 * micro_batch as i64;
                        let loss = training.engine.forward_with(sync, || training.loss(step, 1.0))?;
                        if is_in_backward && sync == GradSync::Reduce {
                            training.engine.backward_and_step(&loss, &mut *training.optimizer)?;
                        } else {
                            training.engine.backward(&loss, sync)?;
                        }
                    }
                    if !is_in_backward {
                        training.engine.step(&mut *training.optimizer)?;
                    }
                }
                runs.push(training.weights()?);
            }
            assert_close(&runs[0], &runs[1], 0.0, &format!("{} {ratio}", case.name));
        }
    }
});

ranks_test!(what_fits_stays_on_the_gpu, 1, timeout = super::BRIEF, {
    let group = join()?;
    let auto = Offload { optimizer: Place::Auto(".".into()), ..Offload::default() };
    let mut fits = Training::new(&group, with(Stage::Zero0, auto), CASES[2])?;
    let note = fits.engine.offload_note().unwrap();
    assert!(note.contains("host       0 units"), "{note}");
    let mut resident = Training::new(&group, on_gpu(Stage::Zero0), CASES[2])?;
    assert_eq!(fits.losses(0..3)?, resident.losses(0..3)?);
});

ranks_test!(files_are_refused_before_training, 1, timeout = super::BRIEF, {
    let group = join()?;
    let disk = Offload { optimizer: Place::Disk(".".into()), ..Offload::default() };
    let error = Training::new(&group, with(Stage::Zero1, disk), CASES[0]).err().unwrap().to_string();
    assert!(error.ends_with("try `Place::Host` (PARALLEL.OFFLOAD host)"), "{error}");
    let rows = Offload { parameters: Place::Host, ..Offload::default() };
    let error = Training::new(&group, with(Stage::Zero3, rows), CASES[0]).err().unwrap().to_string();
    assert!(error.contains("PARALLEL.OFFLOAD_PARAMS none"), "{error}");
});

ranks_test!(state_in_host_memory_takes_none_of_the_gpu, 1, timeout = super::BRIEF, {
    let group = join()?;
    let held = |options: ShardOptions| -> Result<u64> {
        let before = memory(0)?.allocated;
        let mut training = Training::new(&group, options, CASES[2])?;
        training.losses(0..2)?;
        training.optimizer.zero_grad()?;
        Ok(memory(0)?.allocated - before)
    };
    let (resident, offloaded) = (held(on_gpu(Stage::Zero0))?, held(to_host(Stage::Zero0, 1.0))?);
    let state = 6 * (WIDTH * WIDTH * 12) as u64;
    assert!(resident >= offloaded + state, "{resident} and {offloaded} bytes, and the state has {state}");
});

ranks_test!(an_engine_that_ends_right_after_a_step_waits_for_its_copies, 1, timeout = super::BRIEF, {
    let group = join()?;
    for _ in 0..20 {
        let mut training = Training::new(&group, to_host(Stage::Zero0, 1.0), CASES[2])?;
        training.accumulate(0, 1.0)?;
        training.engine.step(&mut *training.optimizer)?;
        // Weights are still being copied to the GPU from twins, whose memory ends here.
        let Training { vs, engine, optimizer, .. } = training;
        drop((engine, optimizer));
        drumline_torch::cuda::synchronize(0)?;
        let is_finite = |named: &Named| named.tensor.isfinite().all().int64_value(&[]) == 1;
        assert!(parameters(&vs).iter().all(is_finite));
    }
});

ranks_test!(pinned_memory_is_as_large_as_asked, 1, timeout = super::BRIEF, {
    join()?;
    let asked = 300 << 20;
    let pages = Pages::pinned(asked + 1)?;
    assert_eq!(pages.num_bytes(), asked + PAGE);
    let host = pages.tensor(0, Kind::Float, 1 << 20)?;
    let source = Tensor::arange(1 << 20, (Kind::Float, GPU));
    drumline_torch::cuda::copy_async(&mut host.shallow_clone(), &source)?;
    drumline_torch::cuda::synchronize(0)?;
    assert!(host.equal(&source.to_device(Device::Cpu)));
    drop(pages);
    assert_eq!(host.double_value(&[7]), 7.0, "the last tensor keeps the memory");
    drop(host);
    // Pinning it again fails if it was not unpinned.
    drop(Pages::pinned(asked)?);
});
