//! `evaluate`: the trainer's evaluation without a training, on any number of ranks.

use std::cell::RefCell;
use std::collections::BTreeMap;

use drumline::metrics::TopK;
use drumline::trainer::{CrossEntropy, DistTrainer, Evaluation, LoadBestModel, Precision};
use drumline::{ProcessGroup, StopRequest};
use rank_test::{Signal, ranks_test};
use tch::Device;
use tch::nn::VarStore;

use super::{Net, Pair, data, trainer};

const SAMPLES: usize = 23;

fn evaluator<'a>(group: &ProcessGroup, net: &'a Net, store: &'a VarStore) -> DistTrainer<'a, Net, Pair> {
    let evaluator = DistTrainer::for_evaluation(group, net, store, data(SAMPLES)).dev_batch_size(3);
    evaluator.loss(CrossEntropy::default()).metric("acc", TopK::new(1))
}

fn figures(evaluation: Option<Evaluation>) -> BTreeMap<String, u64> {
    let metrics = evaluation.expect("no signal came").metrics;
    metrics.into_iter().map(|(name, value)| (name, value.to_bits())).collect()
}

ranks_test!(weights_are_evaluated_as_in_a_training, 3, {
    let group = ProcessGroup::from_env()?;
    for precision in [Precision::F32, Precision::Bf16] {
        let store = VarStore::new(Device::Cpu);
        let net = Net::new(&store);
        let last = RefCell::new(BTreeMap::new());
        let trainer = trainer(&group, &net, &store, 16)?.dev_data(data(SAMPLES)).dev_batch_size(3);
        let trainer = trainer.metric("acc", TopK::new(1)).precision(precision).callback(Last(&last));
        trainer.train(LoadBestModel::No)?;
        let tested = figures(evaluator(&group, &net, &store).precision(precision).evaluate()?);
        assert_eq!(tested, *last.borrow(), "{precision:?}, bit for bit");
        assert_eq!(tested.keys().collect::<Vec<_>>(), ["acc", "loss"]);
    }
});

/// Keeps the figures of the last evaluation.
struct Last<'a>(&'a RefCell<BTreeMap<String, u64>>);

impl drumline::trainer::Callback for Last<'_> {
    fn on_valid_end(
        &mut self,
        _: &mut drumline::trainer::TrainState,
        evaluation: &Evaluation,
    ) -> drumline::trainer::CallbackResult {
        *self.0.borrow_mut() = figures(Some(evaluation.clone()));
        Ok(())
    }
}

ranks_test!(each_output_is_seen_once, 2, {
    let group = ProcessGroup::from_env()?;
    let store = VarStore::new(Device::Cpu);
    let net = Net::new(&store);
    let seen = RefCell::new(0);
    let evaluation = evaluator(&group, &net, &store).evaluate_with(|(inputs, _), output| {
        assert_eq!(inputs.size()[0], output.size()[0]);
        *seen.borrow_mut() += inputs.size()[0];
        Ok(())
    })?;
    assert_eq!(evaluation.map(|evaluation| evaluation.samples), Some(SAMPLES as u64));
    let all: Vec<i64> = group.all_gather_object(&*seen.borrow())?;
    assert_eq!(all.iter().sum::<i64>(), SAMPLES as i64, "{all:?}");
    // What goes wrong there ends it on all ranks, with one text.
    let rank = group.rank();
    let failed = evaluator(&group, &net, &store)
        .evaluate_with(|_, _| if rank == 1 { Err("no space left".into()) } else { Ok(()) });
    let output = failed.unwrap_err().to_string();
    assert!(output.starts_with("rank 1: evaluation: ") && output.ends_with("no space left"), "{output}");
});

ranks_test!(a_signal_to_one_rank_stops_all, 2, {
    let group = ProcessGroup::from_env()?;
    let store = VarStore::new(Device::Cpu);
    let net = Net::new(&store);
    let stop = StopRequest::listen()?;
    if group.rank() == 1 {
        rustix::process::kill_process(rustix::process::getpid(), Signal::TERM)?;
        while !stop.is_requested() {
            std::thread::yield_now();
        }
    }
    group.barrier()?;
    assert!(evaluator(&group, &net, &store).stop_request(stop).evaluate()?.is_none());
});

ranks_test!(without_data_there_is_nothing_to_evaluate, 1, {
    let group = ProcessGroup::from_env()?;
    let store = VarStore::new(Device::Cpu);
    let net = Net::new(&store);
    let output = trainer(&group, &net, &store, 4)?.evaluate().unwrap_err().to_string();
    assert!(output.contains("there is no dev_data to evaluate on; try"), "{output}");
});
