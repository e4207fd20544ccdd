//! What is left for people and programs to look at.

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use drumline::ProcessGroup;
use drumline::metrics::TopK;
use drumline::trainer::{
    Callback, CallbackResult, EventFile, LoadBestModel, Plots, RankFiles, TensorBoard, TrainState,
};
use drumline_observe::events::{self, Event, Reason};
use drumline_observe::status::{self, RankStatus, State};
use rank_test::ranks_test;
use tch::nn::{Module, VarStore};
use tch::{Device, Kind};

use super::{Net, collate, data, sample, shared_folder, trainer};

ranks_test!(a_training_leaves_its_story_its_ranks_and_its_curves, 2, {
    let group = ProcessGroup::from_env()?;
    let (_temp, out) = shared_folder(&group)?;
    let out = PathBuf::from(out);
    let store = VarStore::new(Device::Cpu);
    let net = Net::new(&store);
    let trainer = trainer(&group, &net, &store, 16)?
        .dev_data(data(6))
        .batch_size_per_gpu(2)
        .n_epochs(2)
        .callback(RankFiles::in_folder(&out))
        .master_callback(EventFile::in_folder(&out))
        .master_callback(TensorBoard::in_folder(out.join("tensorboard")).gradients_every(4))
        .master_callback(Plots::in_folder(&out));
    trainer.train(LoadBestModel::No)?;
    group.barrier()?;

    let ranks = status::read(&out);
    assert_eq!(ranks.iter().map(|rank| (rank.rank, rank.step)).collect::<Vec<_>>(), [(0, 8), (1, 8)]);
    assert!(ranks.iter().all(|rank| rank.state == State::Ended && rank.compute_s > 0.0), "{ranks:?}");
    if group.rank() == 0 {
        let story = events::read(&out.join("metrics.jsonl"))?;
        let kind = |event: &Event| match event {
            Event::Run(_) => 'r',
            Event::Epoch(_) => 'E',
            Event::Step(_) => 's',
            Event::Eval(_) => 'e',
            Event::End(_) => '.',
        };
        assert_eq!(story.iter().map(kind).collect::<String>(), "rEsssseEsssse.");
        let Some(Event::Epoch(second)) = story.get(7) else { anyhow::bail!("{story:?}") };
        assert_eq!((second.step, second.epoch, second.epochs), (4, 1, 2));
        assert_eq!((second.step_in_epoch, second.steps_per_epoch, second.total_steps), (0, 4, 8));
        let times = story.iter().filter_map(|event| match event {
            Event::Step(step) => Some(step.time),
            Event::Eval(eval) => Some(eval.time.filter(|_| eval.metric_key.is_some())),
            _ => None,
        });
        let times = times.collect::<Option<Vec<_>>>().unwrap_or_default();
        assert!(times.len() == 10 && times.is_sorted(), "{times:?}");
        assert!(matches!(&story[6], Event::Eval(first) if first.is_best), "the first is the best so far");
        assert!(
            matches!(story.last(), Some(Event::End(end)) if end.reason == Reason::Finished && end.step == 8)
        );
        assert!(std::fs::read_to_string(out.join("curves.svg"))?.contains("<svg"));
        assert_eq!(std::fs::read_dir(out.join("tensorboard"))?.count(), 1);
    }
    group.barrier()?;
});

/// Keeps what a step's metric was, and how far evaluations have come.
#[derive(Default)]
struct Seen {
    acc: Vec<f64>,
    batches: Vec<(u64, u64)>,
}

struct See<'a>(&'a RefCell<Seen>);

impl Callback for See<'_> {
    fn on_step_end(&mut self, state: &mut TrainState) -> CallbackResult {
        let [(name, value)] = state.train_metrics() else { return Err("one metric".into()) };
        self.0.borrow_mut().acc.push(if name == "acc" { *value } else { f64::NAN });
        Ok(())
    }

    fn on_valid_batch_end(&mut self, state: &mut TrainState) -> CallbackResult {
        self.0.borrow_mut().batches.push(state.valid_batches());
        Ok(())
    }
}

ranks_test!(metrics_of_a_step_are_those_of_all_its_samples, 2, {
    let group = ProcessGroup::from_env()?;
    // The whole epoch is one step: 4 + 4 + 2 samples on rank 0, 4 + 4 + 1 on rank 1. Its metric is that of the first
    // weights.
    let store = VarStore::new(Device::Cpu);
    let net = Net::new(&store);
    let everything: Vec<_> = (0..19).map(sample).collect();
    let (inputs, classes) = collate(everything).unwrap();
    let right = net.forward(&inputs).argmax(1, false).eq_tensor(&classes).sum(Kind::Double).double_value(&[]);
    let seen = RefCell::new(Seen::default());
    let trainer = trainer(&group, &net, &store, 19)?
        .dev_data(data(7))
        .train_metric("acc", TopK::new(1))
        .callback(See(&seen))
        .batch_size_per_gpu(4)
        .dev_batch_size(2)
        .update_every(3);
    trainer.train(LoadBestModel::No)?;
    let seen = seen.into_inner();
    assert_eq!(seen.acc, [right / 19.0]);
    assert_eq!(seen.batches, [(1, 2), (2, 2)], "4 or 3 samples of evaluation by twos");
});

ranks_test!(steps_are_traced_on_request, 2, {
    let group = ProcessGroup::from_env()?;
    let (store, folder) = (VarStore::new(Device::Cpu), tempfile::tempdir()?);
    let net = Net::new(&store);
    let trainer = trainer(&group, &net, &store, 32)?.batch_size_per_gpu(2).update_every(2);
    trainer.trace_steps(1..3, folder.path()).train(LoadBestModel::No)?;
    let path = folder.path().join(format!("trace/rank-{:05}.json", group.rank()));
    let whole: serde_json::Value = serde_json::from_slice(&std::fs::read(path)?)?;
    let lines = whole["traceEvents"].as_array().unwrap();
    let count = |name: &str| lines.iter().filter(|line| line["ph"] == "X" && line["name"] == name).count();
    // Two of four steps, of two batches each, with one reduction.
    let found = ["batches", "agree", "forward", "backward", "bucket 0", "optimizer"].map(count);
    assert_eq!(found, [2, 2, 4, 4, 2, 2]);
});

/// Rank 1 computes for long before one of its backwards.
struct Slow;

impl Callback for Slow {
    fn on_backward_begin(&mut self, state: &mut TrainState) -> CallbackResult {
        if (state.rank(), state.step()) == (1, 3) {
            std::thread::sleep(Duration::from_secs(3));
        }
        Ok(())
    }
}

/// Rank 1 computes for long before each backward.
struct AlwaysSlow;

impl Callback for AlwaysSlow {
    fn on_backward_begin(&mut self, state: &mut TrainState) -> CallbackResult {
        if state.rank() == 1 {
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }
}

ranks_test!(who_computes_long_and_who_waits_for_it_is_reported, 2, {
    let group = ProcessGroup::from_env()?;
    let (_temp, out) = shared_folder(&group)?;
    let out = PathBuf::from(out);
    let store = VarStore::new(Device::Cpu);
    let net = Net::new(&store);
    let trainer = trainer(&group, &net, &store, 40)?.batch_size_per_gpu(2);
    trainer.callback(RankFiles::in_folder(&out)).callback(AlwaysSlow).train(LoadBestModel::No)?;
    group.barrier()?;
    let ranks = status::read(&out);
    // Ten steps of 50 ms.
    assert!(ranks[0].comm_s > 0.4 && ranks[0].compute_s < 0.4, "{ranks:?}");
    assert!(ranks[1].compute_s > 0.5 && ranks[1].comm_s < 0.4, "{ranks:?}");
    group.barrier()?;
});

ranks_test!(lines_are_added_to_the_log, 2, {
    let group = ProcessGroup::from_env()?;
    let folder = tempfile::tempdir()?;
    let store = VarStore::new(Device::Cpu);
    let net = Net::new(&store);
    let trainer = trainer(&group, &net, &store, 16)?.dev_data(data(6)).batch_size_per_gpu(2).print_every(2);
    trainer.log_path(folder.path()).train(LoadBestModel::No)?;
    let log = std::fs::read_to_string(folder.path().join("log.txt")).unwrap_or_default();
    let lines = [log.matches("   == step: [").count(), log.matches("   == eval: [1/1] | loss: ").count()];
    assert_eq!(lines, if group.rank() == 0 { [2, 1] } else { [0, 0] }, "{log}");
});

/// The ranks at a moment when rank 0 has been in a collective for some time.
fn at_a_long_wait(out: &Path) -> Vec<RankStatus> {
    let begin = Instant::now();
    loop {
        let ranks = status::read(out);
        if ranks.first().is_some_and(|rank| rank.op.is_some() && rank.op_s >= 1.0) {
            return ranks;
        }
        assert!(begin.elapsed() < Duration::from_secs(60), "no wait was seen: {ranks:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

ranks_test!(a_rank_that_waits_for_another_says_in_what, 2, {
    let group = ProcessGroup::from_env()?;
    let (_temp, out) = shared_folder(&group)?;
    let out = PathBuf::from(out);
    let store = VarStore::new(Device::Cpu);
    let net = Net::new(&store);
    let trainer = trainer(&group, &net, &store, 16)?
        .batch_size_per_gpu(2)
        .n_epochs(2)
        .callback(RankFiles::in_folder(&out))
        .callback(Slow);
    let place = out.clone();
    let watcher = (group.rank() == 0).then(|| std::thread::spawn(move || at_a_long_wait(&place)));
    trainer.train(LoadBestModel::No)?;
    if let Some(watcher) = watcher {
        let ranks = watcher.join().expect("a wait was seen");
        let op = ranks[0].op.as_deref().unwrap_or_default();
        // Gradients are reduced by a thread with a group of its own.
        assert!(op.starts_with("all_reduce(") && op.contains(" of world/") && op.contains(" at "), "{op}");
        assert_eq!((&ranks[1].op, ranks[1].step), (&None, 3), "the one that computes is in none");
    }
    group.barrier()?;
    assert!(status::read(&out).iter().all(|rank| rank.op.is_none() && rank.state == State::Ended));
    group.barrier()?;
});
