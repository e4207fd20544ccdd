//! Averaged weights: evaluated and saved instead of the trained ones, with which training continues.

use std::sync::{Arc, Mutex};

use drumline::ProcessGroup;
use drumline::checkpoint::Checkpoints;
use drumline::optim::Named;
use drumline::trainer::{
    Callback, CallbackResult, Checkpoint, DistTrainer, Evaluation, Every, LoadBestModel, MovingAverage,
    TrainState,
};
use rank_test::ranks_test;
use tch::nn::VarStore;
use tch::{Device, Tensor};

use super::resuming::StopAt;
use super::shared_folder;
use super::{Net, Pair, data, difference, same_on_all_ranks, trainer, weights};

/// Of 2 epochs of 30 samples over two ranks.
const STEPS: u64 = 8;

fn new<'a>(
    group: &ProcessGroup,
    net: &'a Net,
    store: &'a VarStore,
) -> anyhow::Result<DistTrainer<'a, Net, Pair>> {
    let trainer = trainer(group, net, store, 30)?.batch_size_per_gpu(4).n_epochs(2).dev_data(data(9));
    Ok(trainer.validate_every(Every::Steps(3)).metric_key("-loss"))
}

type Noted = Arc<Mutex<Vec<Vec<Tensor>>>>;

/// Notes the weights after each step, and those that are evaluated.
#[derive(Clone, Default)]
struct Noting {
    trained: Noted,
    evaluated: Noted,
}

fn values(state: &TrainState) -> Vec<Tensor> {
    state.parameters().iter().map(|named| named.tensor.detach().copy()).collect()
}

impl Callback for Noting {
    fn on_train_begin(&mut self, state: &mut TrainState) -> CallbackResult {
        self.trained.lock().unwrap().push(values(state));
        Ok(())
    }

    fn on_step_end(&mut self, state: &mut TrainState) -> CallbackResult {
        self.trained.lock().unwrap().push(values(state));
        Ok(())
    }

    fn on_valid_end(&mut self, state: &mut TrainState, _: &Evaluation) -> CallbackResult {
        self.evaluated.lock().unwrap().push(values(state));
        Ok(())
    }
}

/// In closed form: what each of the weights so far, oldest first, counts for.
fn mean(of: &[Vec<Tensor>], counts_for: impl Fn(usize) -> f64) -> Vec<Tensor> {
    let sum =
        |place: usize| of.iter().enumerate().map(|(time, weights)| &weights[place] * counts_for(time)).sum();
    (0..of[0].len()).map(sum).collect()
}

ranks_test!(averages_are_evaluated_and_saved_and_training_does_not_know_of_them, 2, {
    let group = ProcessGroup::from_env()?;
    let plain = VarStore::new(Device::Cpu);
    new(&group, &Net::new(&plain), &plain)?.train(LoadBestModel::No)?;
    for alpha in [None, Some(0.3)] {
        let (_temp, path) = shared_folder(&group)?;
        let store = VarStore::new(Device::Cpu);
        let net = Net::new(&store);
        let noting = Noting::default();
        let average = alpha.map_or_else(MovingAverage::sma, MovingAverage::ema);
        let trainer = new(&group, &net, &store)?.callback(average).callback(noting.clone()).save_path(&path);
        assert_eq!(trainer.train(LoadBestModel::No)?.steps, STEPS);
        assert_eq!(
            difference(&weights(&store), &weights(&plain)),
            0.0,
            "training continues with its own weights"
        );
        let (trained, evaluated) = (noting.trained.lock().unwrap(), noting.evaluated.lock().unwrap());
        assert_eq!((trained.len(), evaluated.len()), (9, 2));
        for (evaluated, step) in evaluated.iter().zip([3, 6]) {
            let expected = match alpha {
                None => mean(&trained[..=step], |_| 1.0 / (step + 1) as f64),
                Some(alpha) => mean(&trained[..=step], |time| {
                    (1.0f64 - alpha).powi((step - time) as i32) * if time == 0 { 1.0 } else { alpha }
                }),
            };
            assert!(difference(evaluated, &expected) < 1e-6, "{alpha:?} at step {step}");
            assert!(difference(evaluated, &trained[step]) > 1e-4, "the control");
        }
        let best = Checkpoints::new(&path).load_best(&group)?.unwrap().state;
        let tensors =
            |named: &[Named]| named.iter().map(|named| named.tensor.shallow_clone()).collect::<Vec<_>>();
        assert!(evaluated.iter().any(|evaluated| difference(evaluated, &tensors(&best.model)) == 0.0));
        assert_eq!(difference(&tensors(&best.trained), &trained[best.step as usize]), 0.0);
        same_on_all_ranks(&group, &store)?;
        group.barrier()?;
    }
});

ranks_test!(an_average_begins_with_its_epoch, 2, {
    let group = ProcessGroup::from_env()?;
    let store = VarStore::new(Device::Cpu);
    let net = Net::new(&store);
    let noting = Noting::default();
    let trainer = new(&group, &net, &store)?.callback(MovingAverage::sma().from_epoch(1));
    trainer.callback(noting.clone()).train(LoadBestModel::No)?;
    let (trained, evaluated) = (noting.trained.lock().unwrap(), noting.evaluated.lock().unwrap());
    // Four steps an epoch, evaluated after 3 and 6: before it, and after two steps of it.
    assert!(difference(&evaluated[0], &trained[3]) < 1e-6);
    assert!(difference(&evaluated[1], &mean(&trained[4..=6], |_| 1.0 / 3.0)) < 1e-6);
    assert!(difference(&evaluated[1], &trained[6]) > 1e-4, "the control");
});

ranks_test!(the_best_model_is_the_averaged_one, 2, {
    let group = ProcessGroup::from_env()?;
    for has_folder in [false, true] {
        let (_temp, path) = shared_folder(&group)?;
        let store = VarStore::new(Device::Cpu);
        let net = Net::new(&store);
        let noting = Noting::default();
        let trainer = new(&group, &net, &store)?.callback(MovingAverage::sma()).callback(noting.clone());
        let trainer = if has_folder { trainer.save_path(&path) } else { trainer };
        let best = trainer.train(LoadBestModel::Yes)?.best_step.unwrap();
        let evaluated = noting.evaluated.lock().unwrap();
        assert_eq!(difference(&weights(&store), &evaluated[best as usize / 3 - 1]), 0.0);
        group.barrier()?;
    }
});

/// The model of the last checkpoint.
fn last(group: &ProcessGroup, path: &str) -> anyhow::Result<Vec<Tensor>> {
    let found = Checkpoints::new(path).load_latest(group)?.unwrap();
    Ok(found.state.model.into_iter().map(|named| named.tensor).collect())
}

ranks_test!(averages_resume_with_the_same_bits, 2, {
    let group = ProcessGroup::from_env()?;
    let (_temp, path) = shared_folder(&group)?;
    let whole = VarStore::new(Device::Cpu);
    let net = Net::new(&whole);
    new(&group, &net, &whole)?.callback(MovingAverage::sma()).save_path(&path).train(LoadBestModel::No)?;
    let expected = last(&group, &path)?;
    assert!(difference(&expected, &weights(&whole)) > 1e-4, "the control");
    for stop in [2, 3, 5] {
        for goes_on in [true, false] {
            let (_temp, path) = shared_folder(&group)?;
            let train = |store: &VarStore, is_averaged: bool| {
                let net = Net::new(store);
                let trainer = new(&group, &net, store)?.save_path(&path).resume_from(&path);
                let trainer = if is_averaged { trainer.callback(MovingAverage::sma()) } else { trainer };
                let every = Checkpoint::every(Every::Never);
                anyhow::Ok(trainer.callback(every).callback(StopAt(stop)).train(LoadBestModel::No)?.steps)
            };
            assert_eq!(train(&VarStore::new(Device::Cpu), true)?, stop);
            let second = VarStore::new(Device::Cpu);
            assert_eq!(train(&second, goes_on)?, STEPS);
            assert_eq!(
                difference(&weights(&second), &weights(&whole)),
                0.0,
                "also where nobody averages any more"
            );
            let model = last(&group, &path)?;
            if goes_on {
                assert_eq!(difference(&model, &expected), 0.0, "stopped after {stop}")
            } else {
                assert_eq!(difference(&model, &weights(&whole)), 0.0)
            }
            group.barrier()?;
        }
    }
});

ranks_test!(two_averages_and_one_that_never_moves_are_errors, 2, {
    let group = ProcessGroup::from_env()?;
    let store = VarStore::new(Device::Cpu);
    let net = Net::new(&store);
    let twice = new(&group, &net, &store)?.callback(MovingAverage::sma()).callback(MovingAverage::ema(0.5));
    let message = twice.train(LoadBestModel::No).unwrap_err().to_string();
    assert!(
        message.contains("`MovingAverage` and `MovingAverage` both have weights to evaluate; try one"),
        "{message}"
    );
    let still = new(&group, &net, &store)?.callback(MovingAverage::ema(0.0));
    let message = still.train(LoadBestModel::No).unwrap_err().to_string();
    assert!(message.contains("alpha is 0, expected a number between 0 and 1; try"), "{message}");
});
