//! Twins of each optimizer that can be offloaded: their steps have the bits of state where the model trains.

use anyhow::Result;
use drumline_comm::ProcessGroup;
use drumline_parallel::ShardOptions;
use drumline_plan::Stage;
use drumline_torch::{
    Adagrad, AdagradOptions, AdamOptions, AdamW, Lion, LionOptions, MasterWeights, Moments, Named, Optimizer,
    OptimizerState, StepTensors, TorchError,
};
use rank_test::ranks_test;
use tch::{Kind, Tensor};

use super::offload::{ADAM, Case, STEPS, Training, adam, assert_same, beside, step_without_clipping};

fn lion(params: Vec<Named>) -> Result<Box<dyn Optimizer>> {
    Ok(Box::new(Lion::new(params, LionOptions { lr: 1e-3, weight_decay: 0.1, ..LionOptions::default() })?))
}

fn adagrad(params: Vec<Named>) -> Result<Box<dyn Optimizer>> {
    let options = AdagradOptions { lr: 0.05, lr_decay: 0.1, ..AdagradOptions::default() };
    Ok(Box::new(Adagrad::new(params, options)?))
}

fn adam_with(params: Vec<Named>, moments: Moments) -> Result<Box<dyn Optimizer>> {
    Ok(Box::new(AdamW::new(params, AdamOptions { lr: 0.01, moments, ..AdamOptions::default() })?))
}

fn bf16_moments(params: Vec<Named>) -> Result<Box<dyn Optimizer>> {
    adam_with(params, Moments::Bf16 { seed: 3 })
}

fn eight_bit_moments(params: Vec<Named>) -> Result<Box<dyn Optimizer>> {
    adam_with(params, Moments::EightBit)
}

fn copied(params: Vec<Named>) -> Result<Box<dyn Optimizer>> {
    let options = AdamOptions { lr: 1e-3, ..AdamOptions::default() };
    Ok(Box::new(MasterWeights::new(params, |copies| AdamW::new(copies, options))?))
}

const CASES: [(&str, Case); 7] = [
    ("Lion", Case { kind: Kind::Float, optimizer: lion }),
    ("Adagrad", Case { kind: Kind::Float, optimizer: adagrad }),
    ("bf16 moments", Case { kind: Kind::Float, optimizer: bf16_moments }),
    ("8-bit moments", Case { kind: Kind::Float, optimizer: eight_bit_moments }),
    ("bf16 parameters", Case { kind: Kind::BFloat16, optimizer: adam }),
    ("fp16 parameters", Case { kind: Kind::Half, optimizer: adam }),
    ("f32 copies of fp16 parameters", Case { kind: Kind::Half, optimizer: copied }),
];

fn each_optimizer_has_twins() -> Result<()> {
    let group = ProcessGroup::from_env()?;
    for (name, case) in CASES {
        for (stage, ratio) in [(Stage::Zero1, 1.0), (Stage::Zero2, 0.4)] {
            let what = format!("{name}, {stage}, ratio {ratio}");
            let mut resident = Training::new(&group, ShardOptions::new(stage), case)?;
            let mut offloaded = Training::new(&group, beside(stage, ratio), case)?;
            assert!(offloaded.engine.is_recordable().is_err(), "{what}");
            let begin = resident.bits().0;
            assert_eq!(offloaded.run(0..STEPS)?, resident.run(0..STEPS)?, "{what}: norms");
            assert_same(&offloaded, &resident, &what);
            let has_changed = |(one, other): (&Tensor, &Tensor)| !one.equal(other);
            assert!(begin.iter().zip(&resident.bits().0).all(has_changed), "{what}: it trains");
        }
    }
    Ok(())
}

ranks_test!(each_optimizer_of_one_rank_has_twins, 1, { each_optimizer_has_twins()? });
ranks_test!(each_optimizer_of_two_ranks_has_twins, 2, { each_optimizer_has_twins()? });

ranks_test!(each_optimizer_steps_units_in_backward, 1, {
    let group = ProcessGroup::from_env()?;
    for (name, case) in CASES {
        let mut resident = Training::new(&group, ShardOptions::new(Stage::Zero1), case)?;
        let mut offloaded = Training::new(&group, beside(Stage::Zero1, 0.6), case)?;
        for step in 0..STEPS {
            step_without_clipping(&mut resident, step, false)?;
            step_without_clipping(&mut offloaded, step, true)?;
            assert_same(&offloaded, &resident, &format!("{name} {step}"));
        }
    }
});

/// An optimizer of a program, which has twins and does not limit its steps to them.
struct Unlimited(AdamW);

impl Optimizer for Unlimited {
    fn step_with(&mut self, tensors: StepTensors<'_>) -> Result<(), TorchError> {
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

    fn step_twins(&mut self, twins: &mut dyn FnMut(&Named) -> Option<Tensor>) -> Result<(), TorchError> {
        self.0.step_twins(twins)
    }

    fn state(&self) -> OptimizerState {
        self.0.state()
    }

    fn load_state(&mut self, state: &OptimizerState) -> Result<(), TorchError> {
        self.0.load_state(state)
    }

    fn state_bytes(&self, parameter: &Named) -> Option<usize> {
        self.0.state_bytes(parameter)
    }
}

ranks_test!(an_optimizer_that_cannot_be_limited_to_twins_is_refused_before_training, 2, {
    let group = ProcessGroup::from_env()?;
    let unlimited = |params| -> Result<Box<dyn Optimizer>> {
        Ok(Box::new(Unlimited(AdamW::new(params, AdamOptions::default())?)))
    };
    let case = Case { kind: Kind::Float, optimizer: unlimited };
    for ratio in [1.0, 0.4] {
        let error = Training::new(&group, beside(Stage::Zero1, ratio), case).err().unwrap().to_string();
        assert!(error.starts_with("rank 0 cannot offload: "), "{error}");
        assert!(error.contains("does not implement `limit_to_twins`; try"), "{error}");
    }
    // The control: without offload it trains, and another one is offloaded.
    Training::new(&group, ShardOptions::new(Stage::Zero1), case)?.run(0..1)?;
    Training::new(&group, beside(Stage::Zero1, 0.4), ADAM)?.run(0..1)?;
});
