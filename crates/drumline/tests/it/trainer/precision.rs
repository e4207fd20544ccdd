//! Trainings in fp16: the loss is scaled, steps that overflow are left out, and everything else stays as it was.

use std::sync::{Arc, Mutex};

use drumline::ProcessGroup;
use drumline::optim::{DynamicScale, ScalePolicy};
use drumline::schedule::At;
use drumline::trainer::{Callback, CallbackResult, DistTrainer, End, LoadBestModel, Precision, TrainState};
use rank_test::ranks_test;
use tch::nn::VarStore;
use tch::{Device, Kind};

use super::resuming::StopAt;
use super::{Net, Pair, data, difference, same_on_all_ranks, shared_folder, trainer, weights};

/// A scale at which the first steps overflow, and which comes back to one at which some do.
const HIGH: ScalePolicy = ScalePolicy::Dynamic(DynamicScale {
    init_scale: 4_194_304.0,
    growth_factor: 2.0,
    backoff_factor: 0.5,
    growth_interval: 3,
});

/// Windows of two batches, of which rank 1 has one less at the end of an epoch.
fn new<'a>(
    group: &ProcessGroup,
    net: &'a Net,
    store: &'a VarStore,
) -> anyhow::Result<DistTrainer<'a, Net, Pair>> {
    let trainer = trainer(group, net, store, 30)?.batch_size_per_gpu(2).update_every(2).n_epochs(5);
    Ok(trainer.precision(Precision::Fp16).loss_scale(HIGH).dev_data(data(30)))
}

/// What is seen of a step.
#[derive(Debug, Clone, PartialEq)]
struct Seen {
    has_overflowed: bool,
    skipped: u64,
    /// Steps as schedules count them.
    at: u64,
    weights: f64,
    norm: f64,
}

struct Noting(Arc<Mutex<Vec<Seen>>>);

impl Callback for Noting {
    fn on_step_end(&mut self, state: &mut TrainState) -> CallbackResult {
        let sum = |of: &dyn Fn(&tch::Tensor) -> tch::Tensor| -> f64 {
            let sums = state.parameters().iter().map(|named| of(&named.tensor).sum(Kind::Double));
            sums.map(|sum| sum.double_value(&[])).sum()
        };
        self.0.lock().unwrap().push(Seen {
            has_overflowed: state.has_overflowed(),
            skipped: state.skipped_steps(),
            at: state.at().step,
            weights: sum(&|weight| weight.detach()),
            norm: sum(&|weight| weight.grad().square()).sqrt(),
        });
        let message = state.train_metrics().iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>();
        let norm = message.strip_suffix(&["loss_scale", "skipped_steps"]).unwrap();
        assert_eq!(norm, if state.has_overflowed() { &[][..] } else { &["grad_norm"][..] });
        Ok(())
    }
}

ranks_test!(steps_that_overflow_are_left_out_and_counted, 2, {
    let group = ProcessGroup::from_env()?;
    let store = VarStore::new(Device::Cpu);
    let (net, noted) = (Net::new(&store), Arc::default());
    let trainer = new(&group, &net, &store)?.clip_norm(0.05);
    let outcome = trainer.callback(Noting(Arc::clone(&noted))).train(LoadBestModel::No)?;
    same_on_all_ranks(&group, &store)?;
    let seen = noted.lock().unwrap().clone();
    let skipped = seen.iter().filter(|seen| seen.has_overflowed).count() as u64;
    assert!(skipped > 0 && skipped < 15, "{seen:?}");
    for (step, pair) in seen.windows(2).enumerate() {
        assert_eq!(pair[0].weights == pair[1].weights, pair[1].has_overflowed, "step {}: {pair:?}", step + 2);
        assert_eq!(pair[1].at, step as u64 + 2 - pair[1].skipped);
        assert!(pair[1].has_overflowed || pair[1].norm <= 0.05 * 1.0001, "clipped as they are: {pair:?}");
    }
    assert_eq!(seen.last().unwrap().skipped, skipped);
    assert_eq!(outcome.steps, 20);
});

ranks_test!(a_fitting_scale_trains_as_f32_and_one_too_high_changes_nothing, 2, {
    let group = ProcessGroup::from_env()?;
    let trained = |precision, scale| -> anyhow::Result<_> {
        let store = VarStore::new(Device::Cpu);
        let net = Net::new(&store);
        let trainer = new(&group, &net, &store)?.precision(precision).loss_scale(ScalePolicy::Static(scale));
        let loss = trainer.train(LoadBestModel::No)?.best_metric.unwrap();
        Ok((loss, weights(&store)))
    };
    let (full, full_weights) = trained(Precision::F32, 1.0)?;
    let (short, short_weights) = trained(Precision::Fp16, 1024.0)?;
    assert!((full - short).abs() < 0.01, "{full} {short}");
    let off = difference(&full_weights, &short_weights);
    assert!(off > 0.0 && off < 0.05, "{off}");
    let (_, untouched) = trained(Precision::Fp16, 1e30)?;
    assert_eq!(difference(&untouched, &weights_of_a_new_net()), 0.0);
});

fn weights_of_a_new_net() -> Vec<tch::Tensor> {
    let store = VarStore::new(Device::Cpu);
    let _net = Net::new(&store);
    weights(&store)
}

ranks_test!(a_training_in_fp16_resumes_with_the_same_bits, 2, {
    let group = ProcessGroup::from_env()?;
    let schedule = |at: At| 0.1 / (1.0 + at.step as f64);
    let whole = VarStore::new(Device::Cpu);
    new(&group, &Net::new(&whole), &whole)?.schedule(schedule).train(LoadBestModel::No)?;
    for stop in [1, 6] {
        let (_temp, path) = shared_folder(&group)?;
        let first = VarStore::new(Device::Cpu);
        let net = Net::new(&first);
        let trainer = new(&group, &net, &first)?.schedule(schedule).callback(StopAt(stop));
        let stopped = trainer.save_path(&path).train(LoadBestModel::No)?;
        assert_eq!((stopped.steps, stopped.end), (stop, End::Stopped { reason: "enough (rank 0)".into() }));
        let second = VarStore::new(Device::Cpu);
        let net = Net::new(&second);
        let trainer = new(&group, &net, &second)?.schedule(schedule).callback(StopAt(stop));
        trainer.save_path(&path).resume_from(&path).train(LoadBestModel::No)?;
        assert_eq!(difference(&weights(&second), &weights(&whole)), 0.0, "stopped after {stop}");
        group.barrier()?;
    }
});
