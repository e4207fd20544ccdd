//! Units of twins whose gradients are incomplete, sparse or infinite: their steps are those without offload.

use anyhow::Result;
use drumline_comm::{Mesh, ProcessGroup};
use drumline_parallel::{Engine, EngineOptions, EngineSetup, GradSync, ShardOptions};
use drumline_plan::Stage;
use drumline_torch::{
    AdamOptions, AdamW, GradHook, LossScaler, Named, Optimizer, ScalePolicy, StepMade, grad, parameters,
};
use rank_test::ranks_test;
use tch::nn::{Init, Path, VarStore};
use tch::{Device, Kind, Tensor};

use super::net::values;
use super::offload::{MASTERS, Training, assert_same, beside};

const WIDTH: i64 = 24;

/// Units with parameters that are frozen, unused in some steps, or empty, and a table whose gradient is sparse.
struct Mixed {
    vs: VarStore,
    engine: Box<dyn Engine>,
    optimizer: AdamW,
    /// Whether the gradient of the table is sparse, which optimizers refuse without twins.
    is_sparse: bool,
}

impl Mixed {
    fn new(group: &ProcessGroup, options: ShardOptions) -> Result<Self> {
        tch::set_num_threads(1);
        tch::manual_seed(11);
        let vs = VarStore::new(Device::Cpu);
        let normal = Init::Randn { mean: 0.0, stdev: 0.2 };
        let root = vs.root();
        let make = |path: Path<'_>, name: &str, size: &[i64]| drop(path.var(name, size, normal));
        make(&root / "table" / 0, "weight", &[10, WIDTH]);
        for block in 0..3 {
            let sizes: [(&str, &[i64]); 5] = [
                ("weight", &[WIDTH, WIDTH]),
                ("frozen", &[WIDTH, WIDTH]),
                ("sometimes", &[WIDTH]),
                ("never", &[WIDTH, 3]),
                ("empty", &[0, WIDTH]),
            ];
            sizes.into_iter().for_each(|(name, size)| make(&root / "h" / block, name, size));
        }
        // One is frozen before the engine is made, and others are later.
        let last = (&root / "h" / 3).var("frozen", &[WIDTH, WIDTH], normal).set_requires_grad(false);
        assert!(!last.requires_grad());
        let mut variables: Vec<Named> =
            vs.variables().into_iter().map(|(name, tensor)| Named { name, tensor }).collect();
        variables.sort_by(|one, other| one.name.cmp(&other.name));
        let options_of_adam = AdamOptions { lr: 0.01, ..AdamOptions::default() };
        let mut optimizer = AdamW::new(variables, options_of_adam)?;
        let mesh = Mesh::new(group, options.mesh_shape(group.size())?)?;
        let engine = Box::new(options).engine(EngineSetup::new(&vs, &mesh))?;
        engine.adopt(&mut optimizer)?;
        for Named { name, tensor } in parameters(&vs) {
            if name.ends_with("frozen") {
                let _ = tensor.shallow_clone().set_requires_grad(false);
            }
        }
        Ok(Self { vs, engine, optimizer, is_sparse: false })
    }

    fn loss(&self, step: i64) -> Tensor {
        let variables = self.vs.variables();
        let of = |name: &str| variables[name].shallow_clone();
        let words = Tensor::from_slice(&[step % 10, (step * 3 + 1) % 10, 2]);
        let mut x = Tensor::embedding(&of("table.0.weight"), &words, -1, false, self.is_sparse);
        for block in 0..3 {
            x = x.matmul(&of(&format!("h.{block}.weight"))).matmul(&of(&format!("h.{block}.frozen"))).tanh();
            if (step + block) % 2 == 0 {
                x = &x + of(&format!("h.{block}.sometimes"));
            }
        }
        let empty = of("h.1.empty").sum(Kind::Float);
        x.matmul(&of("h.3.frozen")).square().mean(Kind::Float) + empty
    }

    fn step(&mut self, step: i64, is_in_backward: bool) -> Result<()> {
        self.optimizer.zero_grad()?;
        let loss = self.engine.forward_with(GradSync::Reduce, || self.loss(step))?;
        if is_in_backward {
            return Ok(self.engine.backward_and_step(&loss, &mut self.optimizer)?);
        }
        self.engine.backward(&loss, GradSync::Reduce)?;
        Ok(self.engine.step(&mut self.optimizer)?)
    }

    fn bits(&self) -> Vec<Tensor> {
        let mut all: Vec<(String, Tensor)> = self.vs.variables().into_iter().collect();
        all.sort_by(|one, other| one.0.cmp(&other.0));
        let mut bits: Vec<Tensor> = all.into_iter().map(|(_, tensor)| tensor.detach().copy()).collect();
        bits.extend(values(&self.optimizer.state().tensors));
        bits
    }
}

#[track_caller]
fn assert_same_bits(ours: &Mixed, theirs: &Mixed, what: &str) {
    let (ours, theirs) = (ours.bits(), theirs.bits());
    assert_eq!(ours.len(), theirs.len(), "{what}");
    for (place, (one, other)) in ours.iter().zip(&theirs).enumerate() {
        assert!(one.equal(other), "{what}: tensor {place}");
    }
}

ranks_test!(units_of_unused_frozen_empty_and_sparse_parameters_make_the_same_steps, 1, {
    let group = ProcessGroup::from_env()?;
    for ratio in [1.0, 0.5] {
        for is_in_backward in [false, true] {
            let mut resident = Mixed::new(&group, ShardOptions::new(Stage::Zero1))?;
            let mut offloaded = Mixed::new(&group, beside(Stage::Zero1, ratio))?;
            // With the smaller ratio the table has no twin.
            offloaded.is_sparse = ratio == 1.0;
            let begin = offloaded.vs.variables()["table.0.weight"].detach().copy();
            for step in 0..5 {
                resident.step(step, false)?;
                offloaded.step(step, is_in_backward)?;
                assert_same_bits(&offloaded, &resident, &format!("{ratio} {is_in_backward} {step}"));
            }
            assert!(!begin.equal(&offloaded.vs.variables()["table.0.weight"]), "the control: it trains");
        }
    }
});

ranks_test!(a_hook_of_the_program_stays_and_is_no_end, 1, {
    let group = ProcessGroup::from_env()?;
    let mut training = Mixed::new(&group, beside(Stage::Zero1, 1.0))?;
    let weight = training.vs.variables()["h.1.weight"].shallow_clone();
    let hook = GradHook::new(&weight, || Ok(()))?;
    let error = training.step(0, true).unwrap_err().to_string();
    assert!(error.starts_with("`h.1.weight` has a GradHook of the program"), "{error}");
    assert!(GradHook::is_on(&weight)? && grad(&weight)?.is_none(), "it stays, and nothing was computed");
    // Steps continue, in backward as well once the hook is gone.
    training.step(0, false)?;
    drop(hook);
    training.step(1, true)?;
    assert!(!GradHook::is_on(&weight)?);
});

/// A step with a scaled loss, whose gradients may be infinite.
fn scaled_step(training: &mut Training, step: i64, factor: f64) -> Result<StepMade> {
    let rank = training.engine.mesh().whole().rank();
    let scaler = LossScaler::new(ScalePolicy::Static(256.0), Device::Cpu)?;
    training.optimizer.zero_grad()?;
    let engine = &training.engine;
    let loss = engine.forward_with(GradSync::Reduce, || training.model.loss(step, rank) * factor)?;
    let _grads = scaler.backward_with(&loss, |scaled| engine.backward(scaled, GradSync::Reduce))?;
    let unscaled = engine.unscale(&scaler, training.optimizer.parameters())?;
    Ok(engine.step_unless_overflowed(&unscaled, &mut *training.optimizer)?)
}

fn a_skipped_step_changes_nothing() -> Result<()> {
    let group = ProcessGroup::from_env()?;
    for ratio in [1.0, 0.4] {
        let mut training = Training::new(&group, beside(Stage::Zero1, ratio), MASTERS)?;
        let mut resident = Training::new(&group, ShardOptions::new(Stage::Zero1), MASTERS)?;
        for one in [&mut training, &mut resident] {
            for step in 0..2 {
                assert_eq!(scaled_step(one, step, 1.0)?, StepMade::Yes);
            }
        }
        assert_same(&training, &resident, "before");
        let before = training.bits();
        // One rank alone overflows, and all skip.
        let factor = if group.rank() == 0 { f64::INFINITY } else { 1.0 };
        assert_eq!(scaled_step(&mut training, 2, factor)?, StepMade::Skipped);
        let after = training.bits();
        let is_same = |(one, other): (&Tensor, &Tensor)| one.equal(other);
        assert!(before.0.iter().zip(&after.0).all(is_same), "weights");
        assert!(before.1.iter().zip(&after.1).all(|(one, other)| one.tensor.equal(&other.tensor)), "state");
        // The twins are as before, too: the next steps are those of a training that had no such step.
        for one in [&mut training, &mut resident] {
            assert_eq!(scaled_step(one, 3, 1.0)?, StepMade::Yes);
        }
        assert_same(&training, &resident, "after a skipped step");
        assert!(!before.0[0].equal(&training.bits().0[0]), "the control: a step changes weights");
    }
    Ok(())
}

ranks_test!(a_step_that_is_skipped_changes_no_twin, 1, { a_skipped_step_changes_nothing()? });
ranks_test!(a_step_that_all_ranks_skip_changes_no_twin, 2, { a_skipped_step_changes_nothing()? });
