//! What a training says of itself: why and where it stopped, which rank is slow, and where in the program ranks wait.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use drumline::ProcessGroup;
use drumline::trainer::{
    Callback, CallbackResult, Checkpoint, EarlyStop, End, Every, LoadBestModel, TimeLimit, TrainOutcome,
    TrainState,
};
use drumline_torch::Optimizer;
use rank_test::ranks_test;
use tch::Device;
use tch::nn::VarStore;

use super::{FOLDER, Net, data, end_as_a_program, folder, sgd, trainer};

/// A training whose loss is constant, so that no evaluation is better than the first.
fn stale(group: &ProcessGroup, folder: &Path, patience: u64) -> anyhow::Result<TrainOutcome> {
    let store = VarStore::new(Device::Cpu);
    let net = Net::new(&store);
    let mut optimizer = sgd(&store)?;
    // Too small for any weight to change.
    optimizer.set_lr(1e-30);
    let trainer = trainer(group, &net, &store, 16)?.optimizer(optimizer).dev_data(data(4)).n_epochs(9);
    let trainer = trainer.save_path(folder).resume_from(folder).print_every(1).use_tqdm(false);
    Ok(trainer.callback(EarlyStop::patience(patience)).train(LoadBestModel::No)?)
}

ranks_test!(
    a_training_that_stopped_early_says_so_and_is_over,
    2,
    {
        let group = ProcessGroup::from_env()?;
        let folder = folder()?;
        for (patience, epochs) in [(2, 3), (2, 3), (4, 5)] {
            let outcome = stale(&group, &folder, patience)?;
            assert_eq!(outcome.epochs, epochs, "patience {patience}: {outcome:?}");
            assert!(
                matches!(&outcome.end, End::EarlyStopped { reason } if reason.starts_with("early stop: ")),
                "{outcome:?}"
            );
            let checkpoint = outcome.checkpoint.unwrap();
            assert!(
                checkpoint.join("manifest.json").is_file() && checkpoint.starts_with(&folder),
                "{checkpoint:?}"
            );
            println!("ended in {}", checkpoint.display());
            group.barrier()?;
        }
    },
    |ranks| {
        let temp = tempfile::tempdir()?;
        let report = ranks.env([(FOLDER, temp.path().to_str().unwrap())]).pass()?;
        let output = report.ranks[0].stdout_text();
        let lines = |words: &str| {
            output.lines().filter(|line| line.contains(words)).map(str::to_owned).collect::<Vec<_>>()
        };
        let (stops, ends) = (lines("[stop] == early stop: no better"), lines("ended in "));
        assert_eq!((stops.len(), ends.len()), (3, 3), "{output}");
        for (stop, end) in stops.iter().zip(&ends) {
            let folder = end.strip_prefix("ended in ").unwrap();
            assert!(
                stop.contains(&format!("checkpoint {folder}, from which resume_from continues")),
                "{stop}"
            );
        }
        assert!(stops[0].contains("| after step 3, in epoch 4 of 9 |"), "{output}");
        let (first, rest) = output.split_once("[stop] ==").unwrap();
        assert!(first.contains("== step: [1/1] [3/9]") && rest.contains("before the checkpoint"), "{output}");
        let second = rest.split("[stop] ==").next().unwrap();
        assert!(!second.contains("== step:"), "the second makes no step: {second}");
    }
);

ranks_test!(
    a_time_limit_says_where_it_stopped,
    2,
    {
        let group = ProcessGroup::from_env()?;
        let store = VarStore::new(Device::Cpu);
        let net = Net::new(&store);
        let trainer = trainer(&group, &net, &store, 64)?.print_every(1).use_tqdm(false);
        let outcome = trainer.callback(TimeLimit::new(Duration::from_millis(1))).train(LoadBestModel::No)?;
        assert_eq!((outcome.steps, outcome.checkpoint), (1, None));
    },
    |ranks| {
        let report = ranks.pass()?;
        let output = report.ranks[0].stdout_text();
        let line = "[stop] == time limit: 1ms (rank 0) | after step 1, in epoch 1 of 1 | no checkpoint, as there is no save_path ==";
        assert!(output.contains(line), "{output}");
        assert!(!report.ranks[1].stdout_text().contains("[stop]"), "rank 0 alone");
    }
);

/// Makes the weights no numbers after the second step.
struct Spoil;

impl Callback for Spoil {
    fn on_step_end(&mut self, state: &mut TrainState) -> CallbackResult {
        if state.step() == 2 {
            let _ = tch::no_grad(|| state.parameters()[0].tensor.shallow_clone().fill_(f64::NAN));
        }
        Ok(())
    }
}

ranks_test!(
    a_loss_that_is_no_number_says_where_the_last_checkpoint_is,
    2,
    {
        let group = ProcessGroup::from_env()?;
        let store = VarStore::new(Device::Cpu);
        let net = Net::new(&store);
        let trainer = trainer(&group, &net, &store, 64)?.print_every(1).use_tqdm(false).save_path(folder()?);
        // The checkpoint of step 1 is asked for before the weights are spoilt.
        let trainer = trainer.callback(Checkpoint::every(Every::Steps(1))).callback(Spoil);
        end_as_a_program(trainer.train(LoadBestModel::No))
    },
    |ranks| {
        let temp = tempfile::tempdir()?;
        let running = ranks.env([(FOLDER, temp.path().to_str().unwrap())]).start()?;
        let report = running.wait_all(Duration::from_secs(40))?;
        let output = report.ranks[0].stdout_text();
        let line = output.lines().find(|line| {
            line.starts_with("[stop] == failed after step 2, in epoch 1 of 1 | last checkpoint ")
        });
        let line = line.unwrap_or_else(|| panic!("{report}"));
        let folder = line.rsplit_once("last checkpoint ").unwrap().1.trim_end_matches(" ==");
        assert!(Path::new(folder).join("manifest.json").is_file(), "{folder}");
        let reported: usize = report
            .ranks
            .iter()
            .map(|rank| rank.stderr_text().matches("the loss is NaN at step 3").count())
            .sum();
        assert_eq!(reported, 1, "{report}");
    }
);

#[test]
fn one_process_without_a_launcher_trains() {
    let group = ProcessGroup::from_env().unwrap();
    assert_eq!((group.rank(), group.size()), (0, 1));
    let store = VarStore::new(Device::Cpu);
    let net = Net::new(&store);
    let outcome = trainer(&group, &net, &store, 16).unwrap().n_epochs(2).train(LoadBestModel::No).unwrap();
    assert_eq!((outcome.end, outcome.epochs), (End::Finished, 2));
}

/// Takes its time in each step.
struct Busy(Duration);

impl Callback for Busy {
    fn on_batch_begin(&mut self, _: &mut TrainState) -> CallbackResult {
        std::thread::sleep(self.0);
        Ok(())
    }
}

const SLOW: &str = "DRUMLINE_TEST_SLOW";

ranks_test!(
    a_slow_rank_is_named_while_it_trains_and_at_the_end,
    2,
    {
        let group = ProcessGroup::from_env()?;
        let is_slow = group.rank() == 1 || std::env::var_os(SLOW).is_none();
        let store = VarStore::new(Device::Cpu);
        let net = Net::new(&store);
        let trainer = trainer(&group, &net, &store, 40)?.batch_size_per_gpu(1).max_steps(20);
        let work = Duration::from_millis(if is_slow { 300 } else { 130 });
        let outcome = trainer.print_every(5).use_tqdm(false).callback(Busy(work)).train(LoadBestModel::No)?;
        println!("slow: {:?}", outcome.slow_ranks.iter().map(|slow| slow.rank).collect::<Vec<_>>());
    },
    |ranks| {
        let report = ranks.clone().env([(SLOW, "1")]).pass()?;
        let output = report.ranks[0].stdout_text();
        assert_eq!(
            output.matches("[ranks] == rank 1 is slower than the others: its work of a step took 2.").count(),
            1,
            "{output}"
        );
        assert_eq!(output.matches("[ranks] == rank 1 was slower than the others in ").count(), 1, "{output}");
        assert!(report.ranks.iter().all(|rank| rank.stdout_text().contains("slow: [1]")), "{report}");
        // Control: both take as long.
        let control = ranks.pass()?;
        assert!(!control.ranks[0].stdout_text().contains("[ranks]"), "{control}");
        assert!(control.ranks.iter().all(|rank| rank.stdout_text().contains("slow: []")), "{control}");
    }
);

/// Rank 1 comes late to the backward of the third step.
struct Late;

impl Callback for Late {
    fn on_backward_begin(&mut self, state: &mut TrainState) -> CallbackResult {
        if state.step() == 2 && state.rank() == 1 {
            std::thread::sleep(Duration::from_millis(700));
        }
        Ok(())
    }
}

ranks_test!(a_wait_inside_a_training_names_the_line_of_the_program, 2, {
    let group = ProcessGroup::from_env()?;
    let store = VarStore::new(Device::Cpu);
    let net = Net::new(&store);
    let trainer = trainer(&group, &net, &store, 64)?.callback(Late);
    let is_done = AtomicBool::new(false);
    let seen = std::thread::scope(|scope| {
        let looking = scope.spawn(|| {
            let mut seen: Vec<String> = Vec::new();
            while !is_done.load(Ordering::Relaxed) {
                seen.extend(group.calls_under_way().iter().map(ToString::to_string));
                std::thread::sleep(Duration::from_millis(20));
            }
            seen
        });
        let (line, outcome) = (line!(), trainer.train(LoadBestModel::No));
        is_done.store(true, Ordering::Relaxed);
        outcome.map(|_| (line, looking.join().unwrap()))
    });
    let (line, seen) = seen?;
    if group.rank() == 0 {
        let place = format!("saying.rs:{line}");
        // It was seen there again and again, while the other was late.
        assert!(seen.iter().filter(|call| call.ends_with(&place)).count() > 5, "{place}: {seen:?}");
        assert!(!seen.iter().any(|call| call.contains("lane.rs")), "{seen:?}");
    }
});
