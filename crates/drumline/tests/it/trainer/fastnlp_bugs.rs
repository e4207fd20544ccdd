//! What is known to be wrong in fastNLP's DistTrainer is right here. Its loss that is divided twice, and its reduction
//! of each micro-batch, are in `windows`.

use std::sync::{Arc, Mutex};

use drumline::data::{Cause, Dataset};
use drumline::metrics::{Metric, TopK};
use drumline::trainer::{CrossEntropy, DistTrainer, LoadBestModel, Mode, Model};
use drumline::{ProcessGroup, is_master};
use rank_test::ranks_test;
use tch::nn::{Linear, Module, VarStore, linear};
use tch::{Device, Tensor};

use super::{CLASSES, INPUTS, Net, Pair, collate, data, data_seen, same_on_all_ranks, sample, sgd, trainer};

/// So many samples, and which of them this rank has loaded.
fn noted(len: usize) -> (Arc<Mutex<Vec<usize>>>, impl Dataset<Batch = Pair> + 'static) {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let note = seen.clone();
    let data = data_seen(len, move |index| {
        note.lock().unwrap().push(index);
        Ok(())
    });
    (seen, data)
}

ranks_test!(each_epoch_has_an_order_of_its_own, 2, {
    let group = ProcessGroup::from_env()?;
    let store = VarStore::new(Device::Cpu);
    let net = Net::new(&store);
    let (seen, data) = noted(20);
    let trainer = DistTrainer::new(&group, &net, &store, data).loss(CrossEntropy::default());
    trainer
        .optimizer(sgd(&store)?)
        .n_epochs(2)
        .batch_size_per_gpu(5)
        .print_every(0)
        .train(LoadBestModel::No)?;
    let seen = seen.lock().unwrap().clone();
    let (first, second) = seen.split_at(10);
    assert_ne!(first, second, "the order changes");
    let mut all: Vec<usize> = group.all_gather_object(&first.to_vec())?.concat();
    all.sort_unstable();
    assert!(all.into_iter().eq(0..20), "each sample once an epoch");
});

ranks_test!(all_ranks_evaluate_and_figures_are_exact, 3, {
    let group = ProcessGroup::from_env()?;
    let store = VarStore::new(Device::Cpu);
    let net = Net::new(&store);
    let (seen, dev) = noted(10);
    let trainer = trainer(&group, &net, &store, 9)?.dev_data(dev).dev_batch_size(3);
    let outcome = trainer.metric("acc", TopK::new(1)).metric_key("acc").train(LoadBestModel::No)?;
    let all = group.all_gather_object(&*seen.lock().unwrap())?;
    assert_eq!(
        all.iter().map(Vec::len).collect::<Vec<_>>(),
        [4, 3, 3],
        "none twice, none on the master alone"
    );
    let (x, y) = collate((0..10).map(sample).collect()).unwrap();
    let mut exact = TopK::new(1);
    exact.update(&net.forward(&x), &y)?;
    assert_eq!(outcome.best_metric, Some(exact.value()));
});

ranks_test!(rank_zero_knows_itself, 2, {
    let group = ProcessGroup::from_env()?;
    let store = VarStore::new(Device::Cpu);
    let net = Net::new(&store);
    let trainer = trainer(&group, &net, &store, 8)?;
    let rank: usize = std::env::var("RANK")?.parse()?;
    assert_eq!((trainer.is_master(), trainer.local_rank()), (rank == 0, rank));
    assert_eq!(is_master(&group), rank == 0);
    trainer.barrier()?;
});

/// A layer that no loss sees, and one that only rank 1's losses see.
struct Idle {
    net: Net,
    extra: Linear,
    _unused: Linear,
    uses_extra: bool,
}

impl Model<Pair> for Idle {
    type Output = Tensor;

    fn forward_batch(&self, batch: &Pair, _mode: Mode) -> Result<Tensor, Cause> {
        let output = self.net.forward(&batch.0);
        Ok(if self.uses_extra { self.extra.forward(&output) } else { output })
    }
}

ranks_test!(parameters_without_gradients_need_no_option, 2, {
    let group = ProcessGroup::from_env()?;
    let store = VarStore::new(Device::Cpu);
    let layer = |name: &str, from| linear(store.root() / name, from, CLASSES, Default::default());
    let net = Net::new(&store);
    let (extra, _unused) = (layer("extra", CLASSES), layer("unused", INPUTS));
    let idle = Idle { net, extra, _unused, uses_extra: group.rank() == 1 };
    let trainer = DistTrainer::new(&group, &idle, &store, data(16)).loss(CrossEntropy::default());
    assert_eq!(trainer.optimizer(sgd(&store)?).print_every(0).train(LoadBestModel::No)?.steps, 1);
    same_on_all_ranks(&group, &store)?;
});
