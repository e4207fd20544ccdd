//! What callbacks, data sets and models may do beside a step that is made by graphs.

use std::sync::{Arc, Mutex};

use drumline::data::{Dataset, Sample, SampleError};
use drumline::tch::{Kind, Tensor, no_grad};
use drumline::trainer::{Callback, CallbackResult, TrainState};
use drumline_torch::set_grad;
use rank_test::ranks_test;

use super::trained::{BRIEF, Case, GPU, WARM_UPS, Waves, assert_same_losses, join, train_on};

struct Nothing;

impl Callback for Nothing {}

/// Two batches that lie on the GPU, handed out as they are.
struct Resident(Arc<Mutex<[(Tensor, Tensor); 2]>>);

fn two_batches() -> [(Tensor, Tensor); 2] {
    [0.0, 40.0].map(|from| {
        let input = (Tensor::arange(16 * 16, (Kind::Float, GPU)) * 0.9 + from).sin().view([16, 16]);
        (input, (Tensor::arange(16, (Kind::Int64, GPU)) * 7).remainder(5).remainder(3))
    })
}

impl Resident {
    fn new() -> Self {
        Self(Arc::new(Mutex::new(two_batches())))
    }
}

impl Dataset for Resident {
    type Batch = (Tensor, Tensor);

    fn len(&self) -> usize {
        32
    }

    fn batch(&self, samples: &[Sample]) -> Result<Self::Batch, SampleError> {
        let (input, target) = &self.0.lock().unwrap()[samples[0].index % 2];
        Ok((input.shallow_clone(), target.shallow_clone()))
    }
}

ranks_test!(a_data_set_on_the_gpu_is_left_unchanged, 1, timeout = BRIEF, {
    let group = join()?;
    let case = Case { data: (32, 16), workers: 0, pin_memory: false, epochs: 12, ..Case::default() };
    let data = Resident::new();
    let graphed = train_on(&group, case, Resident(Arc::clone(&data.0)), Nothing)?;
    assert_eq!(graphed.forwards, WARM_UPS + 1, "by graphs");
    for (place, (found, made)) in data.0.lock().unwrap().iter().zip(&two_batches()).enumerate() {
        assert!(found.0.equal(&made.0) && found.1.equal(&made.1), "batch {place} was written over");
    }
    let eager = train_on(&group, Case { graphs: false, ..case }, data, Nothing)?;
    assert_same_losses(&eager, &graphed, 1e-5);
});

/// Loads the optimizer's own state again, now and then: what it keeps are other tensors after that.
struct Reloading;

impl Callback for Reloading {
    fn on_step_end(&mut self, state: &mut TrainState) -> CallbackResult {
        if state.step() % 5 == 4 {
            let kept = state.optimizer().state();
            let halved = kept.tensors.iter().map(|named| drumline::optim::Named {
                name: named.name.clone(),
                tensor: if named.name.ends_with("step") {
                    named.tensor.copy()
                } else {
                    no_grad(|| &named.tensor * 0.5)
                },
            });
            let kept = drumline::optim::OptimizerState { tensors: halved.collect(), ..kept.clone() };
            state.optimizer_mut().load_state(&kept)?;
        }
        Ok(())
    }
}

ranks_test!(an_optimizer_that_is_changed_is_recorded_again, 1, timeout = BRIEF, {
    let group = join()?;
    for adam in [false, true] {
        let case = Case { adam, ..Case::default() };
        let eager = train_on(&group, Case { graphs: false, ..case }, Resident::new(), Reloading)?;
        assert_same_losses(&eager, &train_on(&group, case, Resident::new(), Reloading)?, 1e-5);
        let other = train_on(&group, case, Resident::new(), Nothing)?;
        let last = |trained: &super::trained::Trained| trained.steps.last().unwrap().loss;
        assert!((last(&other) - last(&eager)).abs() > 1e-4, "the control: it does change something");
    }
});

ranks_test!(a_model_that_fills_the_gpu_is_reported_with_who_has_its_memory, 1, timeout = BRIEF, {
    let group = join()?;
    let case = Case { fills: true, ..Case::default() };
    let message = train_on(&group, case, Resident::new(), Nothing).unwrap_err().to_string();
    for part in ["GPU 0 (NVIDIA", "is out of memory", "this process's tensors have", "try a smaller batch"] {
        assert!(message.contains(part), "{part}: {message}");
    }
});

/// Takes gradients away once, between two steps that are graphs.
struct Clearing;

impl Callback for Clearing {
    fn on_step_end(&mut self, state: &mut TrainState) -> CallbackResult {
        if state.step() == 9 {
            state.optimizer_mut().zero_grad()?;
        }
        if state.step() == 14 {
            state.parameters().iter().try_for_each(|named| set_grad(&named.tensor, None))?;
        }
        Ok(())
    }
}

ranks_test!(gradients_that_a_callback_takes_away_come_again, 1, timeout = BRIEF, {
    let group = join()?;
    let case = Case::default();
    let data = || Waves { len: case.data.0, width: case.data.1 };
    let graphed = train_on(&group, case, data(), Clearing)?;
    assert_eq!(graphed.forwards, WARM_UPS + 1, "by graphs");
    let eager = train_on(&group, Case { graphs: false, ..case }, data(), Clearing)?;
    assert_same_losses(&eager, &graphed, 1e-5);
});
