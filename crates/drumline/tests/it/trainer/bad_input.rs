//! What makes no sense, or fails on one rank: one clear error, all ranks end, and what was reached is saved.

use std::cell::Cell;
use std::time::Duration;

use drumline::ProcessGroup;
use drumline::checkpoint::Checkpoints;
use drumline::comm::LocalGroup;
use drumline::data::Cause;
use drumline::optim::{ScalePolicy, Sgd, SgdOptions, parameters};
use drumline::trainer::{
    Callback, CallbackResult, Checkpoint, CrossEntropy, DistTrainer, EarlyStop, EvaluateEvery, Every,
    LoadBestModel, Loss, MasterCallback, Precision, TrainState,
};
use rank_test::{Ranks, ranks_test};
use tch::nn::{Module, VarStore, linear};
use tch::{Device, Tensor};

use super::{FOLDER, Net, assert_reported_once, data, data_seen, end_as_a_program, folder, trainer};

const PROMPT: Duration = Duration::from_secs(40);
const CASE: &str = "DRUMLINE_TEST_CASE";

/// Every rank gets the same error.
fn assert_refused(
    group: &ProcessGroup,
    trainer: DistTrainer<'_, Net, super::Pair>,
    words: &str,
) -> anyhow::Result<()> {
    let message = trainer.train(LoadBestModel::No).unwrap_err().to_string();
    assert!(message.contains(words), "expected `{words}`, got `{message}`");
    let all = group.all_gather_object(&message)?;
    assert!(
        all.iter().all(|other| *other == message),
        "the same on all ranks, which can still talk: {all:?}"
    );
    Ok(())
}

ranks_test!(what_makes_no_sense_is_an_error_before_anything_is_done, 2, {
    let group = ProcessGroup::from_env()?;
    let store = VarStore::new(Device::Cpu);
    let net = Net::new(&store);
    let new = || trainer(&group, &net, &store, 8);
    assert_refused(&group, new()?.metric_key("ppl"), "there is no metric `ppl`; try one of `loss`")?;
    assert_refused(&group, trainer(&group, &net, &store, 0)?, "train_data is empty")?;
    assert_refused(&group, new()?.dev_data(data(0)), "dev_data is empty")?;
    assert_refused(&group, DistTrainer::new(&group, &net, &store, data(8)), "there is no loss; try")?;
    assert_refused(&group, new()?.update_every(0), "update_every is 0")?;
    let scaled = new()?.precision(Precision::Fp16).loss_scale(ScalePolicy::Static(0.0));
    assert_refused(&group, scaled, "the loss scale policy is Static(0.0)")?;
    assert_refused(
        &group,
        new()?.device(Device::Cuda(7)),
        "the device is Cuda(7), and 0 GPUs can be used here",
    )?;
    assert_refused(
        &group,
        new()?.batch_size_per_gpu(9).drop_last(true),
        "fills no batch of 9 on each of 2 ranks",
    )?;
    assert_refused(
        &group,
        new()?.callback(Checkpoint::every(Every::Epochs(1))),
        "no folder to save in; try",
    )?;
    let file = std::env::current_exe()?;
    assert_refused(&group, new()?.save_path(&file), "cannot save a checkpoint")?;
    assert_refused(&group, new()?.validate_every(Every::Steps(0)), "validate_every is every 0 steps")?;
    assert_refused(&group, new()?.callback(EarlyStop::patience(0)), "patience is 0")?;
    assert_refused(&group, new()?.callback(EvaluateEvery::steps(0)), "an evaluation is every 0 steps")?;
    let differs =
        |name: &str, value: &str| format!("rank 1 was given another trainer than rank 0: {name} is {value}");
    let more = 8 + group.rank();
    let other_data = trainer(&group, &net, &store, more)?;
    assert_refused(&group, other_data, &differs("the number of train_data's samples", "9"))?;
    assert_refused(&group, new()?.dev_data(data(more)), &differs("the number of dev_data's samples", "9"))?;
    let options = SgdOptions { lr: 0.1 * more as f64, ..SgdOptions::default() };
    let other_rate = new()?.optimizer(Sgd::new(parameters(&store), options)?);
    assert_refused(&group, other_rate, &differs("the learning rate", "0.9"))?;
    let alone = if group.rank() == 0 { new()?.save_path("/nonexistent") } else { new()? };
    assert_refused(&group, alone, &differs("save_path", "null"))?;
    let epochs = group.rank() as u64 + 1;
    assert_refused(
        &group,
        new()?.n_epochs(epochs),
        "rank 1 was given another trainer than rank 0: n_epochs is 2",
    )?;
});

ranks_test!(ranks_with_different_models_get_an_error, 2, {
    let group = ProcessGroup::from_env()?;
    let store = VarStore::new(Device::Cpu);
    let net = Net::new(&store);
    let _more = (group.rank() == 1).then(|| linear(store.root() / "more", 2, 2, Default::default()));
    let trainer = trainer(&group, &net, &store, 8)?;
    assert_refused(&group, trainer, "rank 1 has another model than rank 0: it has `more.bias`")?;
});

/// Fails on rank 1, after two steps.
struct Failing;

impl Callback for Failing {
    fn on_backward_end(&mut self, state: &mut TrainState) -> CallbackResult {
        match (state.rank(), state.step()) {
            (1, 2) if std::env::var(CASE)? == "panic" => panic!("no good"),
            (1, 2) => Err("no good".into()),
            _ => Ok(()),
        }
    }
}

/// Fails on the master, after two steps.
struct FullDisk;

impl MasterCallback for FullDisk {
    fn on_batch_end(&mut self, state: &TrainState) -> CallbackResult {
        if state.step() == 2 { Err("no good".into()) } else { Ok(()) }
    }
}

/// Refuses the third step, on the master alone.
struct Refuses;

impl MasterCallback for Refuses {
    fn on_backward_end(&mut self, state: &TrainState) -> CallbackResult {
        if state.step() == 2 { Err("no good".into()) } else { Ok(()) }
    }
}

/// Cannot count the third batch of rank 1.
struct Uncounted {
    rank: usize,
    batches: Cell<usize>,
}

impl Loss<super::Pair, Tensor> for Uncounted {
    fn sum(&self, output: &Tensor, batch: &super::Pair) -> Result<Tensor, Cause> {
        CrossEntropy::default().sum(output, batch)
    }

    fn count(&self, batch: &super::Pair) -> Result<f64, Cause> {
        self.batches.set(self.batches.get() + 1);
        assert!((self.rank, self.batches.get()) != (1, 3), "no good");
        CrossEntropy::default().count(batch)
    }
}

/// Runs the ranks as programs, and finds the checkpoint after the second step when they have ended.
fn fails_and_loses_nothing(ranks: &Ranks, case: &str, words: &str) -> anyhow::Result<()> {
    let temp = tempfile::tempdir()?;
    let report = ranks
        .clone()
        .env([(FOLDER, temp.path().to_str().unwrap()), (CASE, case)])
        .start()?
        .wait_all(PROMPT)?;
    assert_reported_once(&report, words);
    let saved = LocalGroup::run(1, |group| Ok(Checkpoints::new(temp.path()).load_latest(&group)))?;
    assert_eq!(saved.into_iter().next().unwrap()?.unwrap().state.step, 2, "{case}");
    Ok(())
}

ranks_test!(
    what_fails_on_one_rank_ends_all_with_one_error_and_a_checkpoint,
    3,
    {
        let group = ProcessGroup::from_env()?;
        let store = VarStore::new(Device::Cpu);
        let net = Net::new(&store);
        let broken = std::env::var(CASE)? == "data";
        let data =
            data_seen(36, move |index| if broken && index == 17 { Err("no good".into()) } else { Ok(()) });
        let trainer =
            DistTrainer::new(&group, &net, &store, data).optimizer(super::sgd(&store)?).shuffle(false);
        let trainer =
            trainer.loss(CrossEntropy::default()).batch_size_per_gpu(2).save_path(folder()?).print_every(0);
        end_as_a_program(match std::env::var(CASE)?.as_str() {
            "error" | "panic" => trainer.callback(Failing).train(LoadBestModel::No),
            "master" => trainer.master_callback(FullDisk).train(LoadBestModel::No),
            "refuses" => trainer.master_callback(Refuses).train(LoadBestModel::No),
            "count" => {
                trainer.loss(Uncounted { rank: group.rank(), batches: Cell::new(0) }).train(LoadBestModel::No)
            }
            _ => trainer.train(LoadBestModel::No),
        })
    },
    |ranks| {
        fails_and_loses_nothing(&ranks, "error", "rank 1: callback `Failing`, on_backward_end: no good")?;
        fails_and_loses_nothing(&ranks, "panic", "no good")?;
        fails_and_loses_nothing(&ranks, "master", "rank 0: callback `FullDisk`, on_batch_end: no good")?;
        fails_and_loses_nothing(&ranks, "refuses", "rank 0: callback `Refuses`, on_backward_end: no good")?;
        fails_and_loses_nothing(&ranks, "count", "no good")?;
        fails_and_loses_nothing(&ranks, "data", "cannot load sample 17 (#17): no good")?;
    }
);

ranks_test!(a_checkpoint_of_another_model_is_refused_and_kept, 2, {
    let group = ProcessGroup::from_env()?;
    let temp = tempfile::tempdir()?;
    let path: String = group.broadcast_object(Some(&temp.path().to_str().unwrap().to_owned()), 0)?;
    let other = VarStore::new(Device::Cpu);
    let small = linear(other.root() / "small", super::INPUTS, super::CLASSES, Default::default());
    let first = DistTrainer::new(&group, &small, &other, data(8)).loss(CrossEntropy::default());
    first.save_path(&path).print_every(0).train(LoadBestModel::No)?;
    let store = VarStore::new(Device::Cpu);
    let net = Net::new(&store);
    let before = net.forward(&super::sample(0).0);
    let trainer = trainer(&group, &net, &store, 8)?.resume_from(&path).save_path(&path);
    assert_refused(&group, trainer, "`first.bias` is not in the checkpoint")?;
    assert_eq!(net.forward(&super::sample(0).0), before, "the model is as it was");
    let kept = Checkpoints::new(&path).load_latest(&group)?.unwrap();
    assert!(kept.state.step == 1 && kept.state.model.iter().all(|named| named.name.starts_with("small.")));
    group.barrier()?;
});
