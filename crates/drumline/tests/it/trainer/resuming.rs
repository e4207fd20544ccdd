//! A training that resumes from a checkpoint ends as one that never stopped.

use std::time::{Duration, Instant};

use drumline::checkpoint::Checkpoints;
use drumline::launch::Signal;
use drumline::metrics::TopK;
use drumline::schedule::At;
use drumline::trainer::{
    Callback, CallbackResult, Checkpoint, CrossEntropy, CsvFiles, DistTrainer, EarlyStop, End, Every,
    LoadBestModel, TrainState, was_evaluated,
};
use drumline::{ProcessGroup, StopRequest};
use rank_test::{Ranks, ranks_test};
use tch::Device;
use tch::nn::VarStore;

use super::windows::{BIG_BATCH, EPOCHS, SAMPLES, reference};
use super::{
    FOLDER, Net, Pair, data, difference, folder, same_on_all_ranks, sgd, shared_folder, trainer, weights,
};

/// Asks for the end after so many steps.
pub(super) struct StopAt(pub(super) u64);

impl Callback for StopAt {
    fn on_batch_end(&mut self, state: &mut TrainState) -> CallbackResult {
        if state.step() == self.0 {
            state.request_stop("enough");
        }
        Ok(())
    }
}

fn new<'a>(
    group: &ProcessGroup,
    net: &'a Net,
    store: &'a VarStore,
) -> anyhow::Result<DistTrainer<'a, Net, Pair>> {
    let schedule = |at: At| 0.1 / (1.0 + at.epoch + at.step as f64);
    let trainer = trainer(group, net, store, 30)?.batch_size_per_gpu(2).update_every(2).n_epochs(3);
    Ok(trainer
        .dev_data(data(7))
        .metric("acc", TopK::new(1))
        .schedule(schedule)
        .callback(EarlyStop::patience(9)))
}

ranks_test!(a_training_that_was_stopped_resumes_with_the_same_bits, 2, {
    let group = ProcessGroup::from_env()?;
    let whole = VarStore::new(Device::Cpu);
    let outcome = new(&group, &Net::new(&whole), &whole)?.train(LoadBestModel::No)?;
    // In the middle of the second epoch, after its end, and after the first.
    for stop in [6, 8, 4] {
        let (_temp, path) = shared_folder(&group)?;
        let first = VarStore::new(Device::Cpu);
        let net = Net::new(&first);
        let stopped =
            new(&group, &net, &first)?.callback(StopAt(stop)).save_path(&path).train(LoadBestModel::No)?;
        assert_eq!((stopped.steps, stopped.end), (stop, End::Stopped { reason: "enough (rank 0)".into() }));
        let second = VarStore::new(Device::Cpu);
        let net = Net::new(&second);
        let trainer = new(&group, &net, &second)?.callback(StopAt(stop)).save_path(&path).resume_from(&path);
        let resumed = trainer.train(LoadBestModel::No)?;
        assert_eq!((resumed.steps, resumed.epochs, &resumed.end), (12, 3, &End::Finished));
        assert_eq!((resumed.best_metric, resumed.best_step), (outcome.best_metric, outcome.best_step));
        assert_eq!(difference(&weights(&second), &weights(&whole)), 0.0, "stopped after {stop}");
        same_on_all_ranks(&group, &second)?;
        group.barrier()?;
    }
});

/// A signal in the middle of the evaluation after this step, received before the next batch.
struct SignalInEvaluation {
    step: u64,
    heard: StopRequest,
}

impl Callback for SignalInEvaluation {
    fn on_valid_batch_end(&mut self, state: &mut TrainState) -> CallbackResult {
        if (state.rank(), state.step()) == (1, self.step) {
            rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::TERM)?;
            let begin = Instant::now();
            while !self.heard.is_requested() && begin.elapsed() < Duration::from_secs(20) {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        Ok(())
    }
}

ranks_test!(an_evaluation_that_was_cut_is_made_when_training_resumes, 2, {
    let group = ProcessGroup::from_env()?;
    // The last one, so that nothing else is left: of the last epoch, of `max_steps` within an epoch of 4 steps, and at
    // its end.
    for last in [12, 6, 8] {
        let whole = VarStore::new(Device::Cpu);
        let undisturbed = StopRequest::listen_for(&[Signal::USR1])?;
        let net = Net::new(&whole);
        let trainer = new(&group, &net, &whole)?.max_steps(last).stop_request(undisturbed.clone());
        let outcome = trainer.train(LoadBestModel::No)?;
        let (_temp, path) = shared_folder(&group)?;
        let latest = || Checkpoints::new(&path).load_latest(&group).map(Option::unwrap);
        let store = VarStore::new(Device::Cpu);
        let net = Net::new(&store);
        let trainer = new(&group, &net, &store)?.max_steps(last).dev_batch_size(1).save_path(&path);
        let heard = StopRequest::listen_for(&[Signal::TERM])?;
        let trainer = trainer.stop_request(heard.clone()).callback(SignalInEvaluation { step: last, heard });
        let stopped = trainer.train(LoadBestModel::No)?;
        assert_eq!((stopped.steps, stopped.epochs), (last, (last - 1) / 4), "the epoch is not over");
        assert_eq!(stopped.end, End::Stopped { reason: "SIGTERM (rank 1)".into() });
        assert!(!was_evaluated(&latest()?), "after {last}");
        let store = VarStore::new(Device::Cpu);
        let net = Net::new(&store);
        let trainer = new(&group, &net, &store)?.max_steps(last).dev_batch_size(1).save_path(&path);
        let trainer = trainer.resume_with(latest()?).stop_request(undisturbed);
        let resumed = trainer.train(LoadBestModel::No)?;
        assert_eq!((resumed.steps, resumed.epochs, &resumed.end), (last, last / 4, &End::Finished));
        assert_eq!((resumed.best_metric, resumed.best_step), (outcome.best_metric, outcome.best_step));
        assert_eq!(difference(&weights(&store), &weights(&whole)), 0.0);
        assert!(was_evaluated(&latest()?), "after {last}");
        group.barrier()?;
    }
});

ranks_test!(the_best_model_of_before_is_found_where_it_was_saved, 2, {
    let group = ProcessGroup::from_env()?;
    let ((_first, first), (_second, second)) = (shared_folder(&group)?, shared_folder(&group)?);
    let store = VarStore::new(Device::Cpu);
    let net = Net::new(&store);
    let trainer = new(&group, &net, &store)?.metric_key("-loss").n_epochs(1).save_path(&first);
    let best = trainer.train(LoadBestModel::Yes)?;
    let weights_of_best = weights(&store);
    // Uphill, so that nothing gets better.
    let store = VarStore::new(Device::Cpu);
    let net = Net::new(&store);
    let trainer =
        DistTrainer::new(&group, &net, &store, data(30)).loss(CrossEntropy::default()).dev_data(data(7));
    let trainer = trainer.optimizer(sgd(&store)?).schedule(|_: At| -0.5).metric_key("-loss");
    let trainer = trainer.batch_size_per_gpu(2).update_every(2).n_epochs(3).print_every(0);
    let resumed = trainer.resume_from(&first).save_path(&second).train(LoadBestModel::Yes)?;
    assert_eq!((resumed.best_step, resumed.steps), (best.best_step, 12), "the control: nothing was better");
    assert_eq!(difference(&weights(&store), &weights_of_best), 0.0);
    group.barrier()?;
});

ranks_test!(an_epoch_is_saved_once, 2, {
    let group = ProcessGroup::from_env()?;
    let (_temp, path) = shared_folder(&group)?;
    let store = VarStore::new(Device::Cpu);
    let net = Net::new(&store);
    let trainer = new(&group, &net, &store)?.metric_key("-loss").save_path(&path);
    trainer.callback(Checkpoint::every(Every::Epochs(1)).keep_last(9)).train(LoadBestModel::No)?;
    if group.rank() == 0 {
        let names = std::fs::read_dir(&path)?.map(|entry| Ok(entry?.file_name().into_string().unwrap()));
        let mut names = names.collect::<std::io::Result<Vec<_>>>()?;
        names.retain(|name| name.starts_with("step-"));
        names.sort();
        assert_eq!(names, ["step-00000004", "step-00000008", "step-00000012"]);
    }
    group.barrier()?;
});

ranks_test!(a_training_ends_after_max_steps_and_resumes_with_more, 2, {
    let group = ProcessGroup::from_env()?;
    let whole = VarStore::new(Device::Cpu);
    new(&group, &Net::new(&whole), &whole)?.train(LoadBestModel::No)?;
    // In the middle of an epoch of 4 steps, and at its end.
    for most in [6, 8] {
        let (_temp, path) = shared_folder(&group)?;
        let first = VarStore::new(Device::Cpu);
        let net = Net::new(&first);
        let trainer = new(&group, &net, &first)?.save_path(&path).max_steps(most);
        let ended = trainer.train(LoadBestModel::No)?;
        assert_eq!((ended.steps, ended.epochs, ended.end), (most, most / 4, End::Finished));
        let second = VarStore::new(Device::Cpu);
        let net = Net::new(&second);
        let found = Checkpoints::new(&path).load_latest(&group)?.unwrap();
        let trainer = new(&group, &net, &second)?.save_path(&path).resume_with(found).max_steps(1000);
        let resumed = trainer.train(LoadBestModel::No)?;
        assert_eq!((resumed.steps, resumed.epochs, resumed.end), (12, 3, End::Finished));
        assert_eq!(difference(&weights(&second), &weights(&whole)), 0.0, "ended after {most}");
        group.barrier()?;
    }
});

ranks_test!(checkpoints_are_saved_in_time_and_the_last_and_the_best_stay, 2, {
    let group = ProcessGroup::from_env()?;
    let (_temp, path) = shared_folder(&group)?;
    let store = VarStore::new(Device::Cpu);
    let net = Net::new(&store);
    let trainer = new(&group, &net, &store)?.save_path(&path).metric_key("-loss");
    let outcome =
        trainer.callback(Checkpoint::every(Every::Steps(5)).keep_last(3)).train(LoadBestModel::Yes)?;
    let best = Checkpoints::new(&path).load_best(&group)?.unwrap().state;
    assert_eq!((best.best, Some(best.step)), (outcome.best_metric, outcome.best_step));
    let saved: Vec<_> = best.model.iter().map(|named| named.tensor.shallow_clone()).collect();
    assert_eq!(difference(&weights(&store), &saved), 0.0, "the best model's weights are the model's");
    if group.rank() == 0 {
        let mut names: Vec<_> = std::fs::read_dir(&path)?
            .map(|entry| Ok(entry?.file_name().into_string().unwrap()))
            .collect::<anyhow::Result<_>>()?;
        names.sort();
        println!("{names:?}");
        assert!(
            names.contains(&"step-00000010".to_owned()) && names.contains(&"step-00000012".to_owned()),
            "{names:?}"
        );
        assert!(names.iter().filter(|name| name.starts_with("step-")).count() <= 4, "{names:?}");
    }
    group.barrier()?;
});

ranks_test!(without_a_folder_the_best_weights_are_kept_in_memory, 2, {
    let group = ProcessGroup::from_env()?;
    /// Notes the weights of the best evaluation.
    struct Noting(std::sync::Arc<std::sync::Mutex<Vec<tch::Tensor>>>);
    impl Callback for Noting {
        fn on_valid_end(
            &mut self,
            state: &mut TrainState,
            evaluation: &drumline::trainer::Evaluation,
        ) -> CallbackResult {
            if evaluation.is_better {
                *self.0.lock().unwrap() =
                    state.parameters().iter().map(|named| named.tensor.detach().copy()).collect();
            }
            // From here on it gets worse.
            state.set_lr(if state.epoch() == 1 { -0.5 } else { state.lr() });
            Ok(())
        }
    }
    let noted = std::sync::Arc::default();
    let store = VarStore::new(Device::Cpu);
    let net = Net::new(&store);
    let trainer = trainer(&group, &net, &store, 30)?
        .n_epochs(3)
        .dev_data(data(30))
        .callback(Noting(std::sync::Arc::clone(&noted)));
    let outcome = trainer.train(LoadBestModel::Yes)?;
    assert_eq!(outcome.best_epoch, Some(1));
    assert_eq!(difference(&weights(&store), &noted.lock().unwrap()), 0.0);
});

/// Two ranks stop after some steps of the whole training, one rank resumes and stops, and four ranks complete it.
pub(super) fn stop_and_resume(ranks: &Ranks, stops: [&str; 2]) -> anyhow::Result<()> {
    let temp = tempfile::tempdir()?;
    let run = |nproc, stop| {
        let env = [(FOLDER, temp.path().to_str().unwrap()), ("DRUMLINE_TEST_STOP", stop)];
        ranks.clone().nproc(nproc).env(env).pass()
    };
    run(2, stops[0])?;
    run(1, stops[1])?;
    let report = run(4, "9")?;
    assert!(report.ranks[0].stdout_text().contains("as one process"), "{report}");
    Ok(())
}

ranks_test!(
    other_numbers_of_ranks_resume_as_if_nothing_had_happened,
    2,
    {
        let group = ProcessGroup::from_env()?;
        let store = VarStore::new(Device::Cpu);
        let net = Net::new(&store);
        let stop: u64 = std::env::var("DRUMLINE_TEST_STOP")?.parse()?;
        let trainer = trainer(&group, &net, &store, SAMPLES)?.batch_size_per_gpu(BIG_BATCH / group.size());
        let trainer =
            trainer.n_epochs(EPOCHS).save_path(folder()?).resume_from(folder()?).callback(StopAt(stop));
        let outcome = trainer.train(LoadBestModel::No)?;
        assert_eq!(outcome.steps, stop.min(8));
        same_on_all_ranks(&group, &store)?;
        if outcome.end == End::Finished {
            let difference = difference(&weights(&store), &reference()?);
            assert!(difference < 1e-6, "{difference:e}");
            println!("as one process");
        }
    },
    |ranks| { stop_and_resume(&ranks, ["3", "5"])? }
);

ranks_test!(
    csv_files_of_other_numbers_of_ranks_lose_and_repeat_no_line,
    2,
    {
        let group = ProcessGroup::from_env()?;
        let store = VarStore::new(Device::Cpu);
        let net = Net::new(&store);
        let stop: u64 = std::env::var("DRUMLINE_TEST_STOP")?.parse()?;
        let csv = CsvFiles::in_folder(folder()?.join("csv")).samples_per_step(2 * group.size() as u64);
        let trainer = trainer(&group, &net, &store, SAMPLES)?.batch_size_per_gpu(2).n_epochs(EPOCHS);
        let trainer =
            trainer.save_path(folder()?).resume_from(folder()?).callback(StopAt(stop)).callback(csv);
        assert_eq!(trainer.train(LoadBestModel::No)?.steps, stop);
    },
    |ranks| {
        let temp = tempfile::tempdir()?;
        let file = temp.path().join("csv/Train_Samples_lr.csv");
        let run = |nproc, stop: u64| {
            let stop = stop.to_string();
            let env = [(FOLDER, temp.path().to_str().unwrap()), ("DRUMLINE_TEST_STOP", &stop)];
            ranks.clone().nproc(nproc).env(env).pass().map(drop)
        };
        let samples = || -> anyhow::Result<Vec<u64>> {
            let text = std::fs::read_to_string(&file)?;
            text.lines().skip(1).map(|line| Ok(line.split(',').next().unwrap().parse()?)).collect()
        };
        run(2, 3)?;
        assert_eq!(samples()?, [4, 8, 12]);
        // A step after the last checkpoint, which the next run makes again.
        let more = std::fs::read_to_string(&file)? + "16,0.5\n";
        std::fs::write(&file, more)?;
        run(1, 5)?;
        assert_eq!(samples()?, [4, 8, 12, 14, 16]);
        run(4, 6)?;
        assert_eq!(samples()?, [4, 8, 12, 14, 16, 24]);
    }
);

ranks_test!(the_best_by_another_metric_is_not_compared, 2, {
    let group = ProcessGroup::from_env()?;
    let (_temp, path) = shared_folder(&group)?;
    let run = |key: &str, epochs: u64| {
        let store = VarStore::new(Device::Cpu);
        let net = Net::new(&store);
        let trainer = new(&group, &net, &store)?.n_epochs(epochs).metric_key(key);
        trainer.save_path(&path).resume_from(&path).train(LoadBestModel::No).map_err(anyhow::Error::from)
    };
    let by_loss = run("loss", 1)?;
    let by_accuracy = run("acc", 2)?;
    // No accuracy is larger than that loss, so that none would be better than it.
    assert!(by_accuracy.best_metric < by_loss.best_metric, "{by_loss:?} {by_accuracy:?}");
    assert!(by_accuracy.best_step > by_loss.best_step);
    // The control: the same metric is compared.
    assert_eq!(run("acc", 2)?.best_metric, by_accuracy.best_metric);
});
