//! A window's gradient is that of one big batch, however many ranks and turns it is made of.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use drumline::comm::TensorCollectives;
use drumline::data::{MapDataset, Sample};
use drumline::engine::{AllReduce, CommHook, GradBucket, UnevenTurn};
use drumline::optim::{Optimizer, buffers};
use drumline::torch::TorchError;
use drumline::{Accelerator, DdpOptions, ProcessGroup};
use rank_test::ranks_test;
use tch::nn::{Module, VarStore, batch_norm1d, linear, seq_t};
use tch::{Device, Kind, Reduction, Tensor};

use super::super::trainer::{CLASSES, INPUTS};
use super::*;

const EPOCHS: u64 = 2;

/// The same, with a loop of an evaluation between turns, and with gradients cleared before the forward instead of after
/// the step.
fn disturbed_epoch<D: Dataset<Batch = Pair> + 'static>(
    training: &mut Training<D>,
    epoch: u64,
) -> anyhow::Result<()> {
    let dev = training.accelerator.prepare_loader(whole(data(7), 2)?)?;
    for batch in training.loader.epoch(epoch) {
        let batch = batch?;
        training.optimizer.zero_grad()?;
        training.backward(&batch)?;
        let mut seen = 0;
        for batch in dev.epoch(0) {
            let output = tch::no_grad(|| training.model.forward_t(&batch.unwrap().0, false));
            seen += training.accelerator.gather_for_metrics(&output)?.size()[0];
        }
        assert_eq!(seen, 7);
        training.optimizer.step()?;
    }
    Ok(())
}

fn equals_one_big_batch() -> anyhow::Result<()> {
    let group = ProcessGroup::from_env()?;
    let expected = reference(EPOCHS)?;
    for window in [1, 2, 4].into_iter().filter(|n| BIG_BATCH.is_multiple_of(n * group.size())) {
        for is_disturbed in [false, true] {
            let batch_size = BIG_BATCH / window / group.size();
            let builder = Accelerator::builder().group(&group).gradient_accumulation_steps(window);
            let mut training = training(builder, data(SAMPLES), batch_size)?;
            for epoch in 0..EPOCHS {
                if is_disturbed { disturbed_epoch(&mut training, epoch)? } else { training.epoch(epoch)? }
            }
            assert_eq!(training.optimizer.steps(), 8);
            let difference = difference(&weights(&training.store), &expected);
            println!("{} ranks, {window} turns of {batch_size}: {difference:e}", group.size());
            assert!(difference < 1e-6, "{window} turns of {batch_size}: {difference:e}");
            same_on_all_ranks(&group, &training.store)?;
        }
    }
    Ok(())
}

ranks_test!(one_rank_makes_the_steps_of_one_big_batch, 1, { equals_one_big_batch()? });
ranks_test!(two_ranks_make_the_steps_of_one_big_batch, 2, { equals_one_big_batch()? });
ranks_test!(four_ranks_make_the_steps_of_one_big_batch, 4, { equals_one_big_batch()? });

ranks_test!(the_control_means_of_ranks_that_weigh_the_same_are_not_one_big_batch, 2, {
    let group = ProcessGroup::from_env()?;
    let builder = Accelerator::builder().group(&group);
    let mut training = training(builder, data(SAMPLES), BIG_BATCH / 2)?;
    // Outside the loop nobody knows what a batch counts for: 29 samples are 4, 4, 4 and 3 on rank 0, 4, 4, 4 and 2 on
    // rank 1.
    let batches: Vec<_> = training.loader.epoch(0).collect::<Result<_, _>>()?;
    for batch in &batches {
        training.turn(batch)?;
    }
    let difference = difference(&weights(&training.store), &reference(1)?);
    assert!(difference > 1e-5, "{difference:e}");
});

/// Counts reductions.
struct Counted(Arc<AtomicUsize>);

impl CommHook for Counted {
    fn reduce(&mut self, bucket: &GradBucket, group: &ProcessGroup) -> Result<(), TorchError> {
        self.0.fetch_add(1, Ordering::SeqCst);
        AllReduce.reduce(bucket, group)
    }
}

ranks_test!(nothing_is_reduced_before_the_last_turn, 2, {
    let group = ProcessGroup::from_env()?;
    for (window, expected) in [(4, vec![0, 0, 0, 1, 1, 1, 1, 2, 3]), (1, (1..=9).collect::<Vec<_>>())] {
        let accelerator = Accelerator::builder().group(&group).gradient_accumulation_steps(window).build()?;
        let store = VarStore::new(Device::Cpu);
        let count = Arc::new(AtomicUsize::new(0));
        let options = DdpOptions { hook: Box::new(Counted(count.clone())), ..DdpOptions::default() };
        let model = accelerator.prepare_model(Net::new(&store), &store, options)?;
        let loader = accelerator.prepare_loader(whole(data(36), 2)?)?;
        let mut counts = Vec::new();
        for batch in loader.epoch(0) {
            let (x, y) = batch?;
            accelerator.backward(&model.forward(&x)?.cross_entropy_for_logits(&y))?;
            counts.push(count.load(Ordering::SeqCst));
        }
        assert_eq!(counts, expected, "the model fits into one bucket");
    }
});

/// Words of a sentence of 1 to 5, padded with 0, and their classes.
fn sentence(index: usize) -> (Tensor, i64) {
    (sample(index).0, 1 + index as i64 * 3 % 5)
}

ranks_test!(losses_per_token_are_divided_by_all_tokens, 2, {
    // A batch's loss is the mean over its tokens, of which the second tensor has the number for each sample.
    let loss = |output: &Tensor, tokens: &Tensor| {
        let tokens = tokens.to_kind(Kind::Float);
        (output.square().sum_dim_intlist([1i64].as_slice(), false, Kind::Float) * &tokens).sum(Kind::Float)
            / tokens.sum(Kind::Float)
    };
    let group = ProcessGroup::from_env()?;
    let gradients = |is_weighing: bool| -> anyhow::Result<Vec<Tensor>> {
        let accelerator = Accelerator::builder().group(&group).gradient_accumulation_steps(2).build()?;
        let store = VarStore::new(Device::Cpu);
        let sentences = MapDataset::new(7, |at: Sample| Ok(sentence(at.index)), collate);
        let (model, optimizer, mut loader) =
            accelerator.prepare(Net::new(&store), &store, sgd(&store)?, whole(sentences, 2)?)?;
        if is_weighing {
            loader = loader.weighing(|(_, tokens)| tokens.sum(Kind::Double).double_value(&[]));
        }
        for batch in loader.epoch(0) {
            let (x, tokens) = batch?;
            accelerator.backward(&loss(&model.forward_t(&x, true), &tokens))?;
        }
        assert_eq!(optimizer.steps(), 0);
        Ok(model.parameters().iter().map(|named| named.tensor.grad().copy()).collect())
    };
    let store = VarStore::new(Device::Cpu);
    let net = Net::new(&store);
    let (x, tokens) = collate((0..7).map(sentence).collect()).unwrap();
    loss(&net.forward(&x), &tokens).backward();
    let expected: Vec<_> =
        drumline::optim::parameters(&store).iter().map(|named| named.tensor.grad()).collect();
    let (tokens, samples) =
        (difference(&gradients(true)?, &expected), difference(&gradients(false)?, &expected));
    assert!(tokens < 1e-6, "{tokens:e}");
    assert!(samples > 1e-3, "the control: {samples:e}");
});

ranks_test!(ranks_without_any_sample_take_part_with_nothing, 4, {
    let group = ProcessGroup::from_env()?;
    let mut training = training(Accelerator::builder().group(&group), data(2), 4)?;
    training.epoch(0)?;
    assert_eq!(training.optimizer.steps(), 1);
    let store = VarStore::new(Device::Cpu);
    let (net, mut optimizer) = (Net::new(&store), sgd(&store)?);
    let (x, y) = collate(order(2, 0).into_iter().map(sample).collect()).unwrap();
    net.forward(&x).cross_entropy_for_logits(&y).backward();
    Optimizer::step(&mut optimizer)?;
    assert!(difference(&weights(&training.store), &weights(&store)) < 1e-6);
    same_on_all_ranks(&group, &training.store)?;
});

ranks_test!(fillers_teach_norms_nothing_and_all_ranks_end_with_one_ranks_buffers, 2, {
    let group = ProcessGroup::from_env()?;
    let accelerator = Accelerator::builder().group(&group).build()?;
    let store = VarStore::new(Device::Cpu);
    let root = store.root();
    let norm = batch_norm1d(&root / "norm", INPUTS, Default::default());
    let net = seq_t().add(norm).add(linear(&root / "out", INPUTS, CLASSES, Default::default()));
    // 9 samples in batches of 4: rank 0 has 4 and 1, rank 1 has 4 and a filler.
    let model = accelerator.prepare_model(net, &store, DdpOptions::default())?;
    let loader = accelerator.prepare_loader(whole(data(9), 4)?)?;
    let mut turns = 0;
    for batch in loader.epoch(0) {
        let (x, y) = batch?;
        if turns == 1 && group.rank() == 1 {
            let mean = |buffer: usize| buffers(&store)[buffer].tensor.copy();
            let before = mean(0);
            let _ = model.forward_t(&x, true);
            let after = mean(0);
            assert_ne!(before, after, "it began with the buffers of rank 0");
            let _ = model.forward_t(&x, true);
            assert_eq!(after, mean(0), "a filler leaves them alone");
        } else {
            let x = if turns == 1 { x.repeat([2, 1]) } else { x };
            let _ = model.forward_t(&x, true);
        }
        accelerator.backward(&(model.parameters()[0].tensor.sum(Kind::Float) + y.sum(Kind::Float)))?;
        turns += 1;
    }
    assert_eq!(turns, 2);
    for buffer in buffers(&store) {
        let all = group.all_gather_tensor(&buffer.tensor)?;
        assert_eq!(all[0], all[1], "{}", buffer.name);
    }
});

ranks_test!(ranks_join_with_different_numbers_of_batches, 3, {
    let group = ProcessGroup::from_env()?;
    let lens: [&[usize]; 3] = [&[3, 2, 4], &[5], &[]];
    for window in [1, 2] {
        let builder = Accelerator::builder().group(&group).gradient_accumulation_steps(window);
        let Training { accelerator, store, model, mut optimizer, .. } = training(builder, data(1), 1)?;
        let batch = |rank: usize, place: usize| -> Vec<_> {
            (0..lens[rank][place]).map(|index| sample(rank * 100 + place * 10 + index)).collect()
        };
        let own: Vec<_> =
            (0..lens[group.rank()].len()).map(|place| collate(batch(group.rank(), place)).unwrap()).collect();
        for turn in accelerator.join_uneven_inputs(own) {
            match turn? {
                UnevenTurn::Batch((x, y)) => {
                    accelerator.backward(&model.forward_t(&x, true).cross_entropy_for_logits(&y))?;
                }
                UnevenTurn::Empty => accelerator.backward_nothing()?,
            }
            optimizer.step()?;
            optimizer.zero_grad()?;
        }
        assert_eq!(optimizer.steps(), 3usize.div_ceil(window) as u64);
        same_on_all_ranks(&group, &store)?;
        let alone = VarStore::new(Device::Cpu);
        let (net, mut by_hand) = (Net::new(&alone), sgd(&alone)?);
        for first in (0..3).step_by(window) {
            let places = first..3.min(first + window);
            let has = |rank: usize, place: usize| place < lens[rank].len();
            let all = places.flat_map(|place| {
                (0..3).filter(move |rank| has(*rank, place)).map(move |rank| (rank, place))
            });
            let (x, y) = collate(all.flat_map(|(rank, place)| batch(rank, place)).collect()).unwrap();
            Optimizer::zero_grad(&mut by_hand)?;
            net.forward(&x).cross_entropy_for_logits(&y).backward();
            Optimizer::step(&mut by_hand)?;
        }
        let difference = difference(&weights(&store), &weights(&alone));
        assert!(difference < 1e-6, "windows of {window}: {difference:e}");
    }
});

ranks_test!(accumulate_counts_its_calls_in_loops_of_ones_own, 2, {
    let group = ProcessGroup::from_env()?;
    let builder = Accelerator::builder().group(&group).gradient_accumulation_steps(2);
    let Training { accelerator, store, model, mut optimizer, .. } = training(builder, data(1), 1)?;
    for turn in 0..4 {
        let (x, y) =
            collate((0..3).map(|index| sample(turn * 10 + group.rank() * 3 + index)).collect()).unwrap();
        accelerator.accumulate(|| -> anyhow::Result<()> {
            accelerator.backward(&model.forward_t(&x, true).cross_entropy_for_logits(&y))?;
            optimizer.step()?;
            Ok(optimizer.zero_grad()?)
        })?;
        let done = turn as u64 + 1;
        assert_eq!(optimizer.steps(), done / 2);
    }
    let alone = VarStore::new(Device::Cpu);
    let (net, mut by_hand) = (Net::new(&alone), sgd(&alone)?);
    for window in 0..2 {
        let samples =
            (0..2).flat_map(|turn| (0..6).map(move |index| sample((2 * window + turn) * 10 + index)));
        let (x, y) = collate(samples.collect()).unwrap();
        Optimizer::zero_grad(&mut by_hand)?;
        net.forward(&x).cross_entropy_for_logits(&y).backward();
        Optimizer::step(&mut by_hand)?;
    }
    assert!(difference(&weights(&store), &weights(&alone)) < 1e-6);
});

ranks_test!(no_sync_adds_up_and_the_next_backward_reduces, 2, {
    let group = ProcessGroup::from_env()?;
    let Training { accelerator, model, mut optimizer, .. } =
        training(Accelerator::builder().group(&group), data(1), 1)?;
    let (x, y) = collate(vec![sample(group.rank())]).unwrap();
    let loss =
        || model.forward_t(&x, true).mse_loss(&y.one_hot(CLASSES).to_kind(Kind::Float), Reduction::Sum);
    accelerator.backward(&loss())?;
    let once = model.parameters()[0].tensor.grad().copy();
    optimizer.zero_grad()?;
    accelerator.no_sync(|| accelerator.backward(&loss()))?;
    let here = model.parameters()[0].tensor.grad().copy();
    assert_ne!(once, here, "only this rank's");
    let message = optimizer.step().unwrap_err().to_string();
    assert!(message.contains("not reduced over ranks") && message.contains("; try "), "{message}");
    accelerator.backward(&loss())?;
    assert!(difference(&[model.parameters()[0].tensor.grad()], &[once * 2.0]) < 1e-6);
    optimizer.step()?;
});
