//! The callbacks that are supplied, each with what it is for.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use drumline::ProcessGroup;
use drumline::engine::Clip;
use drumline::schedule::{At, Schedule, Warmup};
use drumline::trainer::{
    Callback, CallbackResult, Checkpoint, EarlyStop, End, EvaluateEvery, Evaluation, Every, LoadBestModel,
    Precision, TimeLimit, TrainState,
};
use rank_test::ranks_test;
use tch::nn::VarStore;
use tch::{Device, Kind};

use super::{Net, data, difference, same_on_all_ranks, trainer, weights};

/// Notes a figure of each step.
struct Each<F>(Arc<Mutex<Vec<f64>>>, F);

impl<F: Fn(&TrainState) -> f64> Callback for Each<F> {
    fn on_step_end(&mut self, state: &mut TrainState) -> CallbackResult {
        self.0.lock().unwrap().push((self.1)(state));
        Ok(())
    }
}

/// Notes the steps at which was evaluated.
struct EvaluatedAt(Arc<Mutex<Vec<u64>>>);

impl Callback for EvaluatedAt {
    fn on_valid_end(&mut self, state: &mut TrainState, _: &Evaluation) -> CallbackResult {
        self.0.lock().unwrap().push(state.step());
        Ok(())
    }
}

ranks_test!(learning_rates_follow_warm_up_and_schedule, 2, {
    let group = ProcessGroup::from_env()?;
    let rates = |schedule: Box<dyn Schedule>| -> anyhow::Result<Vec<f64>> {
        let store = VarStore::new(Device::Cpu);
        let net = Net::new(&store);
        let noted = Arc::default();
        let trainer = trainer(&group, &net, &store, 16)?.batch_size_per_gpu(2).schedule(schedule);
        trainer.callback(Each(Arc::clone(&noted), TrainState::lr)).train(LoadBestModel::No)?;
        Ok(noted.lock().unwrap().clone())
    };
    let close = |rates: Vec<f64>, expected: [f64; 4]| {
        assert!(
            rates.len() == 4 && rates.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-12),
            "{rates:?}"
        );
    };
    close(rates(Box::new(Warmup::steps(4)))?, [0.025, 0.05, 0.075, 0.1]);
    close(rates(Box::new(Warmup::fraction(0.5).then_linear()))?, [0.05, 0.1, 0.05, 0.0]);
    let growing = |at: At| 1.0 + at.step as f64 + at.epoch;
    close(rates(Box::new(growing))?, [1.0, 2.25, 3.5, 4.75]);
    close(rates(Box::new(Warmup::steps(4).then(growing)))?, [0.25, 1.125, 2.625, 4.75]);
});

ranks_test!(gradients_are_clipped_after_the_reduction, 2, {
    let group = ProcessGroup::from_env()?;
    let norm = |state: &TrainState| {
        let squares = state
            .parameters()
            .iter()
            .map(|named| named.tensor.grad().square().sum(Kind::Double).double_value(&[]));
        squares.sum::<f64>().sqrt()
    };
    let norms = |clip: Option<Clip>| -> anyhow::Result<Vec<f64>> {
        let store = VarStore::new(Device::Cpu);
        let net = Net::new(&store);
        let noted = Arc::default();
        let mut trainer = trainer(&group, &net, &store, 16)?.batch_size_per_gpu(2);
        trainer = match clip {
            Some(Clip::Norm(most)) => trainer.clip_norm(most),
            Some(Clip::Value(most)) => trainer.clip_value(most),
            None => trainer,
        };
        trainer.callback(Each(Arc::clone(&noted), norm)).train(LoadBestModel::No)?;
        same_on_all_ranks(&group, &store)?;
        Ok(noted.lock().unwrap().clone())
    };
    assert!(norms(None)?.iter().all(|norm| *norm > 0.011), "the control is not clipped");
    assert!(norms(Some(Clip::Norm(0.01)))?.iter().all(|norm| (norm - 0.01).abs() < 1e-4));
    // 12 x 6 + 12 + 12 x 3 + 3 elements of at most that.
    assert!(norms(Some(Clip::Value(1e-4)))?.iter().all(|norm| *norm <= 1e-4 * 123f64.sqrt() * 1.001));
});

ranks_test!(training_stops_early_when_it_does_not_get_better, 2, {
    let group = ProcessGroup::from_env()?;
    let store = VarStore::new(Device::Cpu);
    let net = Net::new(&store);
    let trainer = trainer(&group, &net, &store, 16)?.dev_data(data(5)).n_epochs(50);
    // The learning rate is 0: the first evaluation stays the best.
    let trainer = trainer.schedule(|_: At| 0.0).callback(EarlyStop::patience(3));
    let outcome = trainer.train(LoadBestModel::No)?;
    assert_eq!((outcome.epochs, outcome.best_epoch), (4, Some(1)));
    let reason = "early stop: no better loss in 3 evaluations (rank 0)".to_owned();
    assert_eq!(outcome.end, End::EarlyStopped { reason });
});

ranks_test!(training_stops_at_its_time_limit_on_all_ranks, 2, {
    let group = ProcessGroup::from_env()?;
    let store = VarStore::new(Device::Cpu);
    let net = Net::new(&store);
    // Rank 1 alone looks at its clock in time.
    let limit = Duration::from_millis(if group.rank() == 1 { 200 } else { 100_000 });
    let outcome = trainer(&group, &net, &store, 16)?
        .n_epochs(u64::MAX)
        .callback(TimeLimit::new(limit))
        .train(LoadBestModel::No)?;
    assert_eq!(outcome.end, End::Stopped { reason: "time limit: 200ms (rank 1)".into() });
    let steps = group.all_gather_object(&outcome.steps)?;
    assert!(steps[0] == steps[1] && outcome.seconds < 30.0, "{steps:?}");
});

/// Breaks the weights after a step, on all ranks.
struct Break;

impl Callback for Break {
    fn on_step_end(&mut self, state: &mut TrainState) -> CallbackResult {
        if state.step() == 2 {
            tch::no_grad(|| drop(state.parameters()[0].tensor.shallow_clone().fill_(f64::NAN)));
        }
        Ok(())
    }
}

ranks_test!(a_loss_that_is_no_number_ends_the_training, 2, {
    let group = ProcessGroup::from_env()?;
    let store = VarStore::new(Device::Cpu);
    let net = Net::new(&store);
    let trainer = trainer(&group, &net, &store, 64)?.callback(Break);
    let message = trainer.batch_size_per_gpu(4).train(LoadBestModel::No).unwrap_err().to_string();
    assert!(message.starts_with("the loss is NaN at step 3 (epoch 1, lr 0.1)"), "{message}");
});

ranks_test!(evaluations_come_when_they_are_asked_for_and_once_a_step, 2, {
    let group = ProcessGroup::from_env()?;
    let evaluated = |every: Every, steps: Option<u64>| -> anyhow::Result<Vec<u64>> {
        let store = VarStore::new(Device::Cpu);
        let net = Net::new(&store);
        let noted = Arc::default();
        let mut trainer = trainer(&group, &net, &store, 16)?.batch_size_per_gpu(2).n_epochs(2);
        trainer = trainer.dev_data(data(3)).validate_every(every).callback(EvaluatedAt(Arc::clone(&noted)));
        if let Some(steps) = steps {
            trainer = trainer.callback(EvaluateEvery::steps(steps));
        }
        trainer.train(LoadBestModel::No)?;
        Ok(noted.lock().unwrap().clone())
    };
    assert_eq!(evaluated(Every::Epochs(1), None)?, [4, 8]);
    assert_eq!(evaluated(Every::Epochs(2), None)?, [8]);
    assert_eq!(evaluated(Every::Steps(3), None)?, [3, 6]);
    assert!(evaluated(Every::Never, None)?.is_empty());
    assert_eq!(evaluated(Every::Epochs(1), Some(2))?, [2, 4, 6, 8]);
});

ranks_test!(bfloat16_trains_nearly_as_well, 2, {
    let group = ProcessGroup::from_env()?;
    let trained = |precision| -> anyhow::Result<_> {
        let store = VarStore::new(Device::Cpu);
        let net = Net::new(&store);
        let trainer = trainer(&group, &net, &store, 32)?.n_epochs(5).dev_data(data(32)).precision(precision);
        let loss = trainer.train(LoadBestModel::No)?.best_metric.unwrap();
        same_on_all_ranks(&group, &store)?;
        Ok((loss, weights(&store)))
    };
    let ((full, ours), (short, theirs)) = (trained(Precision::F32)?, trained(Precision::Bf16)?);
    assert!((full - short).abs() < 0.02 && full < 1.1, "{full} {short}");
    let difference = difference(&ours, &theirs);
    assert!(difference > 0.0 && difference < 0.1, "{difference}");
});

ranks_test!(without_the_stop_the_last_finite_checkpoint_stays, 2, {
    let group = ProcessGroup::from_env()?;
    let (_temp, path) = super::shared_folder(&group)?;
    let store = VarStore::new(Device::Cpu);
    let net = Net::new(&store);
    let trainer = trainer(&group, &net, &store, 64)?.callback(Break).stop_on_nan(false);
    let trainer = trainer.callback(Checkpoint::every(Every::Steps(1))).save_path(&path);
    let outcome = trainer.batch_size_per_gpu(4).train(LoadBestModel::No)?;
    assert_eq!(outcome.steps, 8, "it trains on");
    if group.rank() == 0 {
        let mut kept: Vec<_> = std::fs::read_dir(&path)?.map(|entry| entry.unwrap().file_name()).collect();
        kept.sort();
        // The weights were broken in step 2. After step 8 a checkpoint was asked for, and another was saved at the end
        // of the epoch.
        assert_eq!(kept, ["latest", "step-00000001", "step-00000008", "step-00000008-2"]);
    }
    group.barrier()?;
});
