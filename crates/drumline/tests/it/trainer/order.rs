//! Callbacks: in which order, on which ranks.

use std::sync::{Arc, Mutex};

use drumline::ProcessGroup;
use drumline::trainer::{Callback, CallbackResult, Evaluation, LoadBestModel, MasterCallback, TrainState};
use rank_test::ranks_test;
use tch::Device;
use tch::nn::VarStore;

use super::{Net, data, trainer};

type Notes = Arc<Mutex<Vec<String>>>;

struct Noting(Notes);

impl Noting {
    fn note(&self, hook: &str) -> CallbackResult {
        self.0.lock().unwrap().push(hook.to_owned());
        Ok(())
    }
}

/// Every hook notes its name.
macro_rules! hooks {
    ($mark:literal, $state:ty, $($hook:ident)*) => {
        $(fn $hook(&mut self, _: $state) -> CallbackResult {
            self.note(concat!($mark, stringify!($hook)))
        })*
        fn on_valid_end(&mut self, _: $state, evaluation: &Evaluation) -> CallbackResult {
            self.note(&format!("{}on_valid_end {}", $mark, evaluation.samples))
        }
    };
}

impl Callback for Noting {
    hooks!("", &mut TrainState, on_train_begin on_epoch_begin on_batch_begin on_loss_begin on_backward_begin on_backward_end
        on_step_end on_batch_end on_valid_begin on_epoch_end on_train_end);
}

struct MasterNoting(Notes);

impl MasterNoting {
    fn note(&self, hook: &str) -> CallbackResult {
        Noting(self.0.clone()).note(hook)
    }
}

impl MasterCallback for MasterNoting {
    hooks!("master ", &TrainState, on_train_begin on_step_end on_train_end);
}

const STEP: &str = "on_batch_begin on_loss_begin on_backward_begin on_batch_begin on_loss_begin on_backward_begin \
                    on_backward_end on_step_end *on_step_end on_batch_end";

/// The documented order; a star stands before what the master's callback does.
fn documented(is_master: bool) -> Vec<String> {
    let whole = format!(
        "on_train_begin *on_train_begin on_epoch_begin {STEP} {STEP} on_valid_begin on_valid_end *on_valid_end on_epoch_end \
         on_train_end *on_train_end"
    );
    let hooks = whole.split_whitespace().filter(|hook| is_master || !hook.starts_with('*'));
    let name = |hook: &str| match hook.strip_prefix('*') {
        Some(hook) => format!("master {hook}"),
        None => hook.to_owned(),
    };
    hooks.map(|hook| name(hook).replace("on_valid_end", "on_valid_end 5")).collect()
}

ranks_test!(callbacks_come_in_the_documented_order, 2, {
    let group = ProcessGroup::from_env()?;
    let store = VarStore::new(Device::Cpu);
    let net = Net::new(&store);
    let notes = Notes::default();
    let trainer = trainer(&group, &net, &store, 16)?.batch_size_per_gpu(2).update_every(2).dev_data(data(5));
    let trainer = trainer.callback(Noting(notes.clone())).master_callback(MasterNoting(notes.clone()));
    trainer.train(LoadBestModel::No)?;
    assert_eq!(*notes.lock().unwrap(), documented(group.rank() == 0));
});

/// What a callback sees is what is true of all ranks.
struct Seeing;

impl Callback for Seeing {
    fn on_step_end(&mut self, state: &mut TrainState) -> CallbackResult {
        let figures =
            (state.step(), state.epoch(), state.samples(), state.loss().to_bits(), state.lr().to_bits());
        let all = state.group().all_gather_object(&figures)?;
        assert!(all.iter().all(|other| *other == figures), "{all:?}");
        assert_eq!((state.samples(), state.world_size(), state.steps_per_epoch()), (8, 2, 2));
        assert!(state.loss() > 0.0 && state.samples_per_s() > 0.0 && state.lr() == 0.1);
        assert_eq!(state.total_steps(), 4);
        assert!(state.config_text().contains("update_every: 2\n"), "{}", state.config_text());
        Ok(())
    }

    fn on_valid_end(&mut self, state: &mut TrainState, evaluation: &Evaluation) -> CallbackResult {
        assert_eq!(state.evaluation(), Some(evaluation));
        assert_eq!((evaluation.epoch, evaluation.step), (state.epoch(), state.step()));
        assert!(evaluation.metric("loss").is_some() && evaluation.metric("acc").is_none());
        Ok(())
    }
}

ranks_test!(the_state_is_that_of_all_ranks, 2, {
    let group = ProcessGroup::from_env()?;
    let store = VarStore::new(Device::Cpu);
    let net = Net::new(&store);
    let trainer = trainer(&group, &net, &store, 16)?.batch_size_per_gpu(2).update_every(2).dev_data(data(5));
    let outcome = trainer.n_epochs(2).callback(Seeing).train(LoadBestModel::No)?;
    assert!(outcome.best_metric.is_some() && outcome.seconds > 0.0);
});
