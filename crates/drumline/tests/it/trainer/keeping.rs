//! Which checkpoints stay, and a learning rate that evaluations reduce.

use std::cell::Cell;
use std::sync::{Arc, Mutex};

use drumline::ProcessGroup;
use drumline::data::Cause;
use drumline::metrics::MeanLoss;
use drumline::optim::Optimizer;
use drumline::schedule::ReduceOnPlateau;
use drumline::trainer::{
    BatchMetric, Callback, CallbackResult, Checkpoint, EarlyStop, Evaluation, Every, LoadBestModel,
    TrainState,
};
use rank_test::ranks_test;
use tch::nn::VarStore;
use tch::{Device, Tensor};

use super::resuming::StopAt;
use super::shared_folder;
use super::{Net, Pair, data, sgd, trainer};

/// Gives these values, one for each evaluation.
struct Scripted(&'static [f64], Cell<usize>);

impl BatchMetric<Pair, Tensor> for Scripted {
    fn update(&mut self, _: &Tensor, _: &Pair) -> Result<(), Cause> {
        Ok(())
    }

    fn sums(&self) -> Vec<f64> {
        Vec::new()
    }

    fn value_of(&self, _: &[f64]) -> f64 {
        self.0[self.1.replace(self.1.get() + 1)]
    }

    fn reset(&mut self) {}
}

/// Evaluates after each step.
fn train(
    group: &ProcessGroup,
    path: &str,
    script: &'static [f64],
    checkpoint: Checkpoint,
) -> anyhow::Result<u64> {
    let store = VarStore::new(Device::Cpu);
    let net = Net::new(&store);
    let trainer = trainer(group, &net, &store, 16)?.batch_size_per_gpu(1).dev_data(data(2));
    let trainer = trainer.metric("score", Scripted(script, Cell::new(0))).validate_every(Every::Steps(1));
    let trainer = trainer.n_epochs(2).max_steps(script.len() as u64).callback(checkpoint);
    Ok(trainer.save_path(path).train(LoadBestModel::No)?.best_step.unwrap())
}

/// Checkpoints and links, by their steps.
type Kept = (Vec<u64>, Vec<(String, u64)>);

fn kept(path: &str) -> anyhow::Result<Kept> {
    let step = |name: &str| name.strip_prefix("step-").and_then(|step| step.parse().ok());
    let (mut steps, mut links) = (Vec::new(), Vec::new());
    for entry in std::fs::read_dir(path)? {
        let entry = entry?;
        let name = entry.file_name().into_string().unwrap();
        match std::fs::read_link(entry.path()) {
            Ok(to) => links.push((name, step(to.to_str().unwrap()).unwrap())),
            Err(_) => steps.extend(step(&name)),
        }
    }
    steps.sort();
    links.sort();
    Ok((steps, links))
}

fn links(of: &[(&str, u64)]) -> Vec<(String, u64)> {
    of.iter().map(|(name, step)| ((*name).to_owned(), *step)).collect()
}

ranks_test!(the_best_checkpoints_stay_in_their_order, 2, {
    let group = ProcessGroup::from_env()?;
    const SCORES: &[f64] = &[3.0, 5.0, 1.0, 4.0, 5.0, 2.0, 4.5, 0.0];
    for (keep, steps, expected) in [
        (1, vec![2, 8], vec![("best", 2), ("latest", 8)]),
        (2, vec![2, 5, 8], vec![("best", 2), ("best-2", 5), ("latest", 8)]),
        (3, vec![2, 5, 7, 8], vec![("best", 2), ("best-2", 5), ("best-3", 7), ("latest", 8)]),
    ] {
        let (_temp, path) = shared_folder(&group)?;
        let checkpoint = Checkpoint::every(Every::Never).keep_last(1).keep_best(keep);
        assert_eq!(train(&group, &path, SCORES, checkpoint)?, 2);
        if group.rank() == 0 {
            assert_eq!(kept(&path)?, (steps, links(&expected)), "the best {keep}");
        }
        group.barrier()?;
    }
});

ranks_test!(a_resumed_run_ranks_with_those_before_and_may_keep_fewer, 2, {
    let group = ProcessGroup::from_env()?;
    let (_temp, path) = shared_folder(&group)?;
    let run = |keep: usize, stop: u64, script: &'static [f64]| {
        let store = VarStore::new(Device::Cpu);
        let net = Net::new(&store);
        let trainer = trainer(&group, &net, &store, 16)?.batch_size_per_gpu(1).dev_data(data(2));
        let trainer = trainer.metric("score", Scripted(script, Cell::new(0))).validate_every(Every::Steps(1));
        let checkpoint = Checkpoint::every(Every::Never).keep_last(1).keep_best(keep);
        let trainer = trainer.max_steps(stop).callback(checkpoint).save_path(&path).resume_from(&path);
        trainer.train(LoadBestModel::No)?;
        group.barrier()?;
        let found = if group.rank() == 0 { kept(&path)? } else { Default::default() };
        group.barrier()?;
        anyhow::Ok(found)
    };
    let first = run(3, 3, &[3.0, 20.0, 4.0])?;
    let second = run(3, 5, &[3.5, 2.0])?;
    let third = run(1, 7, &[1.0, 9.0])?;
    if group.rank() == 0 {
        assert_eq!(
            first,
            (vec![1, 2, 3], links(&[("best", 2), ("best-2", 3), ("best-3", 1), ("latest", 3)]))
        );
        assert_eq!(
            second,
            (vec![2, 3, 4, 5], links(&[("best", 2), ("best-2", 3), ("best-3", 4), ("latest", 5)]))
        );
        assert_eq!(third, (vec![2, 7], links(&[("best", 2), ("latest", 7)])));
    }
    group.barrier()?;
});

/// A script that has a value for every third evaluation only.
struct Now(Scripted, Cell<usize>);

impl BatchMetric<Pair, Tensor> for Now {
    fn update(&mut self, _: &Tensor, _: &Pair) -> Result<(), Cause> {
        assert!(self.is_due(), "nobody asks for it");
        Ok(())
    }

    fn sums(&self) -> Vec<f64> {
        vec![1.0]
    }

    fn value_of(&self, sums: &[f64]) -> f64 {
        assert!(self.is_due());
        self.0.value_of(sums)
    }

    fn reset(&mut self) {
        self.1.set(self.1.get() + 1);
    }

    fn is_due(&self) -> bool {
        self.1.get().is_multiple_of(3)
    }
}

/// Notes which metrics each evaluation has.
struct Names(Arc<Mutex<Vec<String>>>);

impl Callback for Names {
    fn on_valid_end(&mut self, _: &mut TrainState, evaluation: &Evaluation) -> CallbackResult {
        let names: Vec<_> = evaluation.metrics.iter().map(|(name, _)| name.as_str()).collect();
        self.0.lock().unwrap().push(names.join(" "));
        Ok(())
    }
}

ranks_test!(an_evaluation_without_its_metric_is_no_reason_to_stop, 2, {
    let group = ProcessGroup::from_env()?;
    let store = VarStore::new(Device::Cpu);
    let net = Net::new(&store);
    let names = Arc::default();
    let trainer = trainer(&group, &net, &store, 40)?.batch_size_per_gpu(1).dev_data(data(2));
    let script = Now(Scripted(&[3.0, 5.0, 4.0, 4.0, 9.0], Cell::new(0)), Cell::new(0));
    let outcome = trainer
        .metric("score", script)
        .metric("other", MeanLoss::default())
        .validate_every(Every::Steps(1))
        .callback(EarlyStop::patience(2))
        .callback(Names(Arc::clone(&names)))
        .train(LoadBestModel::No)?;
    assert_eq!((outcome.best_metric, outcome.best_step, outcome.steps), (Some(5.0), Some(6), 12));
    let names = names.lock().unwrap();
    assert_eq!(names[..3], ["loss other", "loss other", "loss score other"]);
});

/// Notes the learning rate after each evaluation.
struct Rates(Arc<Mutex<Vec<f64>>>);

impl Callback for Rates {
    fn on_valid_end(&mut self, state: &mut TrainState, _: &Evaluation) -> CallbackResult {
        self.0.lock().unwrap().push(state.lr());
        Ok(())
    }
}

ranks_test!(a_loss_that_stays_reduces_the_learning_rate_also_after_a_stop, 2, {
    let group = ProcessGroup::from_env()?;
    let (_temp, path) = shared_folder(&group)?;
    let rates = Arc::default();
    // Too small for any weight to change.
    let lr = 1e-30;
    for stop in [4, 100] {
        let store = VarStore::new(Device::Cpu);
        let net = Net::new(&store);
        let mut optimizer = sgd(&store)?;
        optimizer.set_lr(lr);
        let trainer =
            trainer(&group, &net, &store, 16)?.optimizer(optimizer).batch_size_per_gpu(1).dev_data(data(2));
        let trainer = trainer.validate_every(Every::Steps(1)).save_path(&path).resume_from(&path);
        let schedule = ReduceOnPlateau::patience(1).scale(0.1).min_lr(2e-32).warmup(2);
        trainer
            .schedule(schedule)
            .callback(Rates(Arc::clone(&rates)))
            .callback(StopAt(stop))
            .train(LoadBestModel::No)?;
        group.barrier()?;
    }
    // Two evaluations of warm-up, one that is the best, then two that are no better, and so on.
    assert_eq!(*rates.lock().unwrap(), [lr, lr, lr, lr, lr * 0.1, lr * 0.1, 2e-32, 2e-32]);
});
