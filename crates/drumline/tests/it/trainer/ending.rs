//! Ranks that are asked to stop, that die, or whose program panics: all end, and one tells.

use std::time::Duration;

use drumline::ProcessGroup;
use drumline::checkpoint::Checkpoints;
use drumline::comm::LocalGroup;
use drumline::launch::Signal;
use drumline::trainer::{Callback, CallbackResult, End, LoadBestModel, MasterCallback, TrainState};
use rank_test::{Exit, ranks_test};
use tch::Device;
use tch::nn::VarStore;

use super::{FOLDER, Net, end_as_a_program, folder, trainer};

const PROMPT: Duration = Duration::from_secs(40);

/// Says when training is under way, and makes it last.
struct Slow;

impl Callback for Slow {
    fn on_batch_end(&mut self, state: &mut TrainState) -> CallbackResult {
        if state.step() == 3 {
            println!("training");
        }
        std::thread::sleep(Duration::from_millis(5));
        Ok(())
    }
}

fn slow_training() -> anyhow::Result<()> {
    let group = ProcessGroup::from_env()?;
    let store = VarStore::new(Device::Cpu);
    let net = Net::new(&store);
    let trainer = trainer(&group, &net, &store, 64)?.n_epochs(100_000).save_path(folder()?);
    let outcome = trainer.callback(Slow).train(LoadBestModel::No);
    if let Ok(outcome) = &outcome {
        let End::Stopped { reason } = &outcome.end else { anyhow::bail!("{outcome:?}") };
        println!("stopped after {} by {reason}", outcome.steps);
    }
    end_as_a_program(outcome)
}

ranks_test!(a_signal_to_one_rank_saves_and_ends_all, 3, { slow_training()? }, |ranks| {
    for (asked, signal) in [(0, Signal::INT), (2, Signal::TERM)] {
        let temp = tempfile::tempdir()?;
        let running = ranks.clone().env([(FOLDER, temp.path().to_str().unwrap())]).start()?;
        running.wait_for_line(asked, "training", PROMPT)?;
        running.signal(asked, signal)?;
        let report = running.wait_all(PROMPT)?;
        assert!(report.is_success(), "{report}");
        let saved = LocalGroup::run(1, |group| Ok(Checkpoints::new(temp.path()).load_latest(&group)))?;
        let step = saved.into_iter().next().unwrap()?.unwrap().state.step;
        for rank in &report.ranks {
            let line = format!("stopped after {step} by SIG");
            assert!(rank.stdout_text().contains(&line), "{line}: {report}");
            assert!(rank.stdout_text().contains(&format!("(rank {asked})")), "{report}");
        }
    }
});

ranks_test!(a_rank_that_dies_ends_all_and_one_reports_it, 3, { slow_training()? }, |ranks| {
    for lost in [0, 1] {
        let temp = tempfile::tempdir()?;
        let running = ranks.clone().env([(FOLDER, temp.path().to_str().unwrap())]).start()?;
        running.wait_for_line(lost, "training", PROMPT)?;
        running.kill(lost)?;
        let report = running.wait_all(PROMPT)?;
        assert_eq!(report.ranks[lost].exit, Exit::Signal(9));
        let others = report.ranks.iter().filter(|rank| rank.rank != lost);
        let reported: Vec<_> =
            others.map(|rank| (rank.exit, rank.stderr_text().matches("lost rank").count())).collect();
        assert!(reported.iter().all(|(exit, _)| *exit == Exit::Code(1)), "{report}");
        assert_eq!(reported.iter().map(|(_, reported)| reported).sum::<usize>(), 1, "{report}");
    }
});

/// On the master: says what went wrong.
struct Witness;

impl MasterCallback for Witness {
    fn on_exception(&mut self, _: &TrainState, error: &drumline::trainer::TrainerError) -> CallbackResult {
        println!("exception: {error}");
        Ok(())
    }
}

/// A model that panics on rank 1.
struct Panicking(Net, usize);

impl drumline::trainer::Model<super::Pair> for Panicking {
    type Output = tch::Tensor;

    fn forward_batch(
        &self,
        batch: &super::Pair,
        _mode: drumline::trainer::Mode,
    ) -> Result<tch::Tensor, drumline::data::Cause> {
        use tch::nn::Module;
        assert!(self.1 != 1 || batch.0.double_value(&[0, 0]) < 0.9, "no such word");
        Ok(self.0.forward(&batch.0))
    }
}

ranks_test!(
    a_panic_in_one_ranks_forward_is_reported_once_and_known_to_all,
    3,
    {
        let group = ProcessGroup::from_env()?;
        let store = VarStore::new(Device::Cpu);
        let net = Panicking(Net::new(&store), group.rank());
        let trainer = drumline::DistTrainer::new(&group, &net, &store, super::data(60)).batch_size_per_gpu(1);
        let trainer = trainer.loss(drumline::trainer::CrossEntropy::default()).print_every(0);
        end_as_a_program(trainer.master_callback(Witness).train(LoadBestModel::No))
    },
    |ranks| {
        let report = ranks.start()?.wait_all(PROMPT)?;
        super::assert_reported_once(&report, "no such word");
        assert!(report.ranks[1].stderr_text().contains("no such word"), "{report}");
        let master = report.ranks[0].stdout_text();
        assert!(
            master.contains("exception: rank 1: step ") && master.contains("panicked: no such word"),
            "{report}"
        );
    }
);
