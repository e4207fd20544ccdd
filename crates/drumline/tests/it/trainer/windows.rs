//! A step is that of one big batch, however many ranks and micro-batches it is made of.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use drumline::data::{
    DistributedSampler, MapDataset, Sample, Sampler, SamplerError, SamplerOptions, SamplerPosition,
};
use drumline::engine::{AllReduce, CommHook, GradBucket, SyncBatchNorm, SyncGroup};
use drumline::optim::Optimizer;
use drumline::torch::TorchError;
use drumline::trainer::{CrossEntropy, DistTrainer, LoadBestModel};
use drumline::{Ddp, DdpOptions, ProcessGroup};
use rank_test::ranks_test;
use tch::nn::{BatchNormConfig, Module, ModuleT, VarStore, batch_norm1d, embedding, linear, seq, seq_t};
use tch::{Device, Kind, Reduction, Tensor};

use super::{
    CLASSES, INPUTS, Net, Pair, collate, data, difference, same_on_all_ranks, sample, sgd, trainer, weights,
};

/// Not a multiple of the big batch, nor of the number of ranks.
pub(super) const SAMPLES: usize = 29;
pub(super) const BIG_BATCH: usize = 8;
pub(super) const EPOCHS: u64 = 2;

/// The big batches of all epochs.
fn big_batches() -> Vec<Vec<usize>> {
    let options = SamplerOptions { num_samples: SAMPLES, ..Default::default() };
    let sampler = DistributedSampler::new(options).unwrap();
    (0..EPOCHS)
        .flat_map(|epoch| sampler.indices(epoch).chunks(BIG_BATCH).map(<[_]>::to_vec).collect::<Vec<_>>())
        .collect()
}

/// One process, one batch a step, and no trainer.
pub(super) fn reference() -> anyhow::Result<Vec<Tensor>> {
    let store = VarStore::new(Device::Cpu);
    let net = Net::new(&store);
    let mut optimizer = sgd(&store)?;
    for batch in big_batches() {
        let (x, y) = collate(batch.into_iter().map(sample).collect()).unwrap();
        optimizer.zero_grad()?;
        net.forward(&x).cross_entropy_for_logits(&y).backward();
        optimizer.step()?;
    }
    Ok(weights(&store))
}

fn equals_one_big_batch() -> anyhow::Result<()> {
    let group = ProcessGroup::from_env()?;
    let expected = reference()?;
    for update_every in [1, 2, 4, 8].into_iter().filter(|n| BIG_BATCH.is_multiple_of(n * group.size())) {
        let store = VarStore::new(Device::Cpu);
        let net = Net::new(&store);
        let batch = BIG_BATCH / update_every / group.size();
        let trainer =
            trainer(&group, &net, &store, SAMPLES)?.batch_size_per_gpu(batch).update_every(update_every);
        let outcome = trainer.n_epochs(EPOCHS).train(LoadBestModel::No)?;
        assert_eq!((outcome.steps, outcome.epochs), (8, EPOCHS));
        let difference = difference(&weights(&store), &expected);
        println!("{} ranks, {update_every} micro-batches of {batch}: {difference:e}", group.size());
        assert!(difference < 1e-6, "{update_every} micro-batches of {batch}: {difference:e}");
        same_on_all_ranks(&group, &store)?;
    }
    Ok(())
}

ranks_test!(one_rank_makes_the_steps_of_one_big_batch, 1, { equals_one_big_batch()? });
ranks_test!(two_ranks_make_the_steps_of_one_big_batch, 2, { equals_one_big_batch()? });
ranks_test!(four_ranks_make_the_steps_of_one_big_batch, 4, { equals_one_big_batch()? });

/// Counts reductions.
struct Counted(Arc<AtomicUsize>);

impl CommHook for Counted {
    fn reduce(&mut self, bucket: &GradBucket, group: &ProcessGroup) -> Result<(), TorchError> {
        self.0.fetch_add(1, Ordering::SeqCst);
        AllReduce.reduce(bucket, group)
    }
}

fn counted() -> (Arc<AtomicUsize>, DdpOptions) {
    let count = Arc::new(AtomicUsize::new(0));
    (count.clone(), DdpOptions { hook: Box::new(Counted(count)), ..DdpOptions::default() })
}

ranks_test!(there_is_one_reduction_for_all_micro_batches, 2, {
    let group = ProcessGroup::from_env()?;
    let store = VarStore::new(Device::Cpu);
    let net = Net::new(&store);
    let (count, options) = counted();
    let trainer = trainer(&group, &net, &store, 32)?.batch_size_per_gpu(2).update_every(4).engine(options);
    assert_eq!(trainer.train(LoadBestModel::No)?.steps, 2);
    assert_eq!(count.load(Ordering::SeqCst), 2, "the model fits into one bucket");
    // The control: a loop that reduces each micro-batch.
    let (count, options) = counted();
    let ddp = Ddp::new(&net, &store, &group, options)?;
    for index in 0..8 {
        let (x, y) = collate(vec![sample(index)]).unwrap();
        ddp.backward(&ddp.forward_with(|net| net.forward(&x))?.cross_entropy_for_logits(&y))?;
    }
    assert_eq!(count.load(Ordering::SeqCst), 8);
});

const LONGEST: i64 = 5;

/// A sentence of 1 to 5 words, padded with 0.
fn sentence(index: usize) -> Tensor {
    let length = 1 + index as i64 * 3 % LONGEST;
    let words: Vec<i64> = (0..LONGEST)
        .map(|place| if place < length { 1 + (index as i64 * 5 + place * 3) % 8 } else { 0 })
        .collect();
    Tensor::from_slice(&words)
}

pub(super) fn sentences(indices: &[usize]) -> Pair {
    let words = Tensor::stack(&indices.iter().map(|index| sentence(*index)).collect::<Vec<_>>(), 0);
    (words.shallow_clone(), words.roll([1], [1]) * words.ne(0).to_kind(Kind::Int64))
}

/// The same weights as everywhere.
pub(super) fn speaker(store: &VarStore) -> impl Module + use<> {
    let words = embedding(store.root() / "words", 9, 4, Default::default());
    let out = linear(store.root() / "out", 4, 9, Default::default());
    for named in drumline::optim::parameters(store) {
        let values = Tensor::arange(named.tensor.numel() as i64, (Kind::Float, Device::Cpu));
        tch::no_grad(|| named.tensor.shallow_clone().copy_(&(values.sin() * 0.5).view_as(&named.tensor)));
    }
    seq().add_fn(move |x| words.forward(x)).add(out)
}

fn losses_are_divided_by_the_tokens_of_all() -> anyhow::Result<()> {
    tch::set_num_threads(1);
    let group = ProcessGroup::from_env()?;
    let alone = VarStore::new(Device::Cpu);
    let net = speaker(&alone);
    let mut optimizer = sgd(&alone)?;
    for batch in big_batches() {
        let (x, y) = sentences(&batch);
        let logits = net.forward(&x).view([-1, 9]);
        let loss = logits.cross_entropy_loss::<Tensor>(&y.view([-1]), None, Reduction::Mean, 0, 0.0);
        optimizer.zero_grad()?;
        loss.backward();
        optimizer.step()?;
    }
    for update_every in [1, 2] {
        let store = VarStore::new(Device::Cpu);
        let net = speaker(&store);
        let words = MapDataset::new(SAMPLES, |at: Sample| Ok(at.index), |at: Vec<usize>| Ok(sentences(&at)));
        let trainer = DistTrainer::new(&group, &net, &store, words)
            .loss(CrossEntropy { ignored: Some(0), ..CrossEntropy::default() })
            .optimizer(sgd(&store)?)
            .batch_size_per_gpu(BIG_BATCH / update_every / group.size())
            .update_every(update_every)
            .n_epochs(EPOCHS)
            .print_every(0);
        trainer.train(LoadBestModel::No)?;
        let difference = difference(&weights(&store), &weights(&alone));
        assert!(difference < 1e-6, "{update_every} micro-batches: {difference:e}");
    }
    Ok(())
}

ranks_test!(one_rank_divides_by_tokens, 1, { losses_are_divided_by_the_tokens_of_all()? });
ranks_test!(two_ranks_divide_by_all_their_tokens, 2, { losses_are_divided_by_the_tokens_of_all()? });
ranks_test!(four_ranks_divide_by_all_their_tokens, 4, { losses_are_divided_by_the_tokens_of_all()? });

/// Rank r takes the first 3r samples: none, 3, 6, …
struct Stairs {
    rank: usize,
    ranks: usize,
}

impl Sampler for Stairs {
    fn num_samples(&self) -> usize {
        SAMPLES
    }

    fn num_replicas(&self) -> usize {
        self.ranks
    }

    fn count_from(&self, _: &SamplerPosition) -> usize {
        self.rank * 3
    }

    fn indices_from(&self, _: &SamplerPosition) -> Result<Vec<usize>, SamplerError> {
        Ok((0..self.rank * 3).collect())
    }
}

ranks_test!(ranks_with_other_numbers_of_batches_end_together_and_alike, 3, {
    let group = ProcessGroup::from_env()?;
    let (rank, ranks) = (group.rank(), group.size());
    let store = VarStore::new(Device::Cpu);
    let net = Net::new(&store);
    let trainer = trainer(&group, &net, &store, SAMPLES)?.sampler(Stairs { rank, ranks });
    let outcome = trainer.batch_size_per_gpu(2).dev_data(data(5)).n_epochs(2).train(LoadBestModel::No)?;
    assert_eq!(outcome.steps, 6, "as many as the last rank has batches");
    same_on_all_ranks(&group, &store)?;
    // In one process: batches of both ranks, then of the last alone.
    let alone = VarStore::new(Device::Cpu);
    let net = Net::new(&alone);
    let mut optimizer = sgd(&alone)?;
    let epoch: [&[usize]; 3] = [&[0, 1, 0, 1], &[2, 2, 3], &[4, 5]];
    for batch in epoch.repeat(2) {
        let (x, y) = collate(batch.iter().copied().map(sample).collect()).unwrap();
        optimizer.zero_grad()?;
        net.forward(&x).cross_entropy_for_logits(&y).backward();
        optimizer.step()?;
    }
    assert!(difference(&weights(&store), &weights(&alone)) < 1e-6);
});

/// A norm over all ranks between two layers.
fn normed(store: &VarStore, sync: &SyncGroup) -> impl ModuleT + use<> {
    let layer = |name: &str, from, to| linear(store.root() / name, from, to, Default::default());
    let norm = SyncBatchNorm::new(store.root() / "norm", 4, BatchNormConfig::default(), sync);
    seq_t().add(layer("a", INPUTS, 4)).add(norm).add_fn(|x| x.tanh()).add(layer("b", 4, CLASSES))
}

ranks_test!(running_means_are_the_same_on_all_ranks_where_some_have_fewer_batches, 3, {
    tch::set_num_threads(1);
    let group = ProcessGroup::from_env()?;
    let store = VarStore::new(Device::Cpu);
    let layer = |name: &str, from, to| linear(store.root() / name, from, to, Default::default());
    let norm = batch_norm1d(store.root() / "norm", 4, Default::default());
    let net = seq_t().add(layer("a", INPUTS, 4)).add(norm).add(layer("b", 4, CLASSES));
    // Rank 0 has 2 batches of 2 in the last step, the others one.
    let trainer =
        DistTrainer::new(&group, &net, &store, data(36)).loss(CrossEntropy::default()).print_every(0);
    let trainer =
        trainer.batch_size_per_gpu(2).update_every(3).n_epochs(2).sampler(Long { rank: group.rank() });
    assert_eq!(trainer.train(LoadBestModel::No)?.steps, 4);
    same_on_all_ranks(&group, &store)?;
    let means: Vec<f32> = Vec::try_from(&store.variables()["norm.running_mean"])?;
    let all = group.all_gather_object(&means)?;
    assert!(all.iter().all(|other| *other == means) && means[0] != 0.0, "{all:?}");
});

/// Rank 0 takes 10 samples, the others 8.
struct Long {
    rank: usize,
}

impl Sampler for Long {
    fn num_samples(&self) -> usize {
        36
    }

    fn num_replicas(&self) -> usize {
        3
    }

    fn count_from(&self, _: &SamplerPosition) -> usize {
        if self.rank == 0 { 10 } else { 8 }
    }

    fn indices_from(&self, position: &SamplerPosition) -> Result<Vec<usize>, SamplerError> {
        Ok((0..self.count_from(position)).map(|place| place * 3 + self.rank).collect())
    }
}

ranks_test!(norms_over_all_ranks_need_a_first_batch_on_each, 3, {
    let group = ProcessGroup::from_env()?;
    let sync = SyncGroup::new(&group)?;
    let store = VarStore::new(Device::Cpu);
    let net = normed(&store, &sync);
    let trainer = DistTrainer::new(&group, &net, &store, data(4)).loss(CrossEntropy::default());
    let options = DdpOptions { sync_group: Some(sync), ..DdpOptions::default() };
    let trainer =
        trainer.batch_size_per_gpu(2).print_every(0).engine(options).sampler(NoneForRank2(group.rank()));
    let message = trainer.train(LoadBestModel::No).unwrap_err().to_string();
    assert!(message.starts_with("rank 2 has no batch in the first step"), "{message}");
});

/// Four samples for each of ranks 0 and 1.
struct NoneForRank2(usize);

impl Sampler for NoneForRank2 {
    fn num_samples(&self) -> usize {
        4
    }

    fn num_replicas(&self) -> usize {
        3
    }

    fn count_from(&self, _: &SamplerPosition) -> usize {
        if self.0 == 2 { 0 } else { 4 }
    }

    fn indices_from(&self, position: &SamplerPosition) -> Result<Vec<usize>, SamplerError> {
        Ok((0..self.count_from(position)).collect())
    }
}

ranks_test!(norms_over_all_ranks_work_where_some_have_fewer_batches, 3, {
    tch::set_num_threads(1);
    let group = ProcessGroup::from_env()?;
    // In the last step rank 2 has one batch where the others have two, and none where they have one.
    for samples in [32, 26] {
        let sync = SyncGroup::new(&group)?;
        let store = VarStore::new(Device::Cpu);
        let net = normed(&store, &sync);
        let trainer = DistTrainer::new(&group, &net, &store, data(samples)).loss(CrossEntropy::default());
        let trainer = trainer.batch_size_per_gpu(2).update_every(2).n_epochs(2).print_every(0);
        let options = DdpOptions { sync_group: Some(sync), ..DdpOptions::default() };
        assert_eq!(trainer.engine(options).train(LoadBestModel::No)?.steps, 6);
        same_on_all_ranks(&group, &store)?;
    }
});
