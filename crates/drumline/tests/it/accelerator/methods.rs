//! The rest of what an accelerator does for a loop.

use drumline::optim::clip_grad_norm;
use drumline::schedule::At;
use drumline::trainer::Precision;
use rank_test::ranks_test;
use tch::Kind;

use super::*;

#[test]
fn without_a_launcher_it_is_one_process() {
    // A rank of this test binary has a launcher, and is not asked.
    if std::env::var_os("RANK").is_some() {
        return;
    }
    let mut training = training(Accelerator::builder(), data(SAMPLES), BIG_BATCH).unwrap();
    assert_eq!((training.accelerator.num_processes(), training.accelerator.is_main_process()), (1, true));
    training.epoch(0).unwrap();
    assert_eq!(difference(&weights(&training.store), &reference(1).unwrap()), 0.0, "the same bits");
}

ranks_test!(
    what_is_of_the_main_process_is_done_once,
    3,
    {
        let accelerator = Accelerator::new()?;
        let rank = accelerator.process_index();
        assert_eq!((accelerator.num_processes(), accelerator.local_process_index()), (3, rank));
        assert_eq!(
            (accelerator.is_main_process(), accelerator.is_local_main_process()),
            (rank == 0, rank == 0)
        );
        assert_eq!(accelerator.on_main_process(|| 7), (rank == 0).then_some(7));
        assert_eq!(accelerator.on_local_main_process(|| 7), (rank == 0).then_some(7));
        accelerator.print(format_args!("said by {rank}"));
        assert_eq!(accelerator.main_process_first("looking", || Ok(rank))?, rank);
        let items = [0, 1, 2, 3, 4, 5, 6];
        let expected: [&[i32]; 3] = [&[0, 1, 2], &[3, 4], &[5, 6]];
        assert_eq!(accelerator.split_between_processes(&items), expected[rank]);
        assert_eq!(accelerator.split_between_processes(&items[..2]).len(), usize::from(rank < 2));
        let expected: [&[i32]; 3] = [&[0, 1, 2], &[3, 4, 6], &[5, 6, 6]];
        assert_eq!(accelerator.split_between_processes_padded(&items), Vec::from_iter(expected[rank]));
        assert_eq!(accelerator.split_between_processes_padded(&items[..2]), [&[0, 1, 1][rank]]);
        assert!(accelerator.split_between_processes_padded::<i32>(&[]).is_empty());
        accelerator.wait_for_everyone()?;
    },
    |ranks| {
        let report = ranks.pass()?;
        let output: Vec<_> =
            report.ranks.iter().map(|rank| rank.stdout_text().matches("said by").count()).collect();
        assert_eq!(output, [1, 0, 0]);
    }
);

ranks_test!(gradients_are_clipped_when_a_window_is_complete, 2, {
    let builder = Accelerator::builder().gradient_accumulation_steps(2);
    let Training { accelerator, model, optimizer, loader, .. } = training(builder, data(8), 2)?;
    let store = VarStore::new(Device::Cpu);
    let net = Net::new(&store);
    let (x, y) = collate(order(8, 0).into_iter().map(sample).collect()).unwrap();
    net.forward(&x).cross_entropy_for_logits(&y).backward();
    let expected = clip_grad_norm(&drumline::optim::parameters(&store), 0.01)?;
    let mut norms = Vec::new();
    for batch in loader.epoch(0) {
        let (x, y) = batch?;
        accelerator.backward(&model.forward_t(&x, true).cross_entropy_for_logits(&y))?;
        norms.push(accelerator.clip_grad_norm(&optimizer.parameters(), 0.01)?);
    }
    assert_eq!((norms.len(), norms[0]), (2, None));
    assert!((norms[1].unwrap() - expected).abs() < 1e-6, "{norms:?}, expected {expected}");
    let clipped: Vec<_> = model.parameters().iter().map(|named| named.tensor.grad()).collect();
    let by_hand: Vec<_> =
        drumline::optim::parameters(&store).iter().map(|named| named.tensor.grad()).collect();
    assert!(difference(&clipped, &by_hand) < 1e-7);
    assert_eq!(accelerator.unwrap_model(&model).forward(&x).size(), net.forward(&x).size());
});

ranks_test!(a_schedule_advances_with_the_optimizers_steps, 2, {
    let builder = Accelerator::builder().gradient_accumulation_steps(2);
    let Training { accelerator, model, mut optimizer, loader, .. } = training(builder, data(12), 2)?;
    let mut schedule =
        accelerator.prepare_schedule(&optimizer, |at: At| 1.0 + at.step as f64 + at.epoch / 10.0);
    let mut rates = vec![optimizer.lr()];
    for epoch in 0..2 {
        for batch in loader.epoch(epoch) {
            let (x, y) = batch?;
            accelerator.backward(&model.forward_t(&x, true).cross_entropy_for_logits(&y))?;
            optimizer.step()?;
            schedule.step();
            optimizer.zero_grad()?;
            rates.push(schedule.lr());
        }
    }
    let expected = [1.0, 1.0, 2.0 + 0.2 / 3.0, 3.1, 3.1, 4.1 + 0.2 / 3.0, 5.2];
    assert_eq!(rates.len(), expected.len());
    assert!(rates.iter().zip(expected).all(|(rate, expected)| (rate - expected).abs() < 1e-9), "{rates:?}");
});

ranks_test!(a_schedule_may_advance_after_each_epoch, 2, {
    let mut training = training(Accelerator::builder(), data(12), 2)?;
    let mut schedule = training.accelerator.prepare_schedule(&training.optimizer, |at: At| 1.0 + at.epoch);
    let mut rates = vec![schedule.lr()];
    for epoch in 0..3 {
        training.epoch(epoch)?;
        // An evaluation counts no epochs.
        let dev = training.accelerator.prepare_loader(whole(data(4), 2)?)?;
        assert_eq!(dev.epoch(7).count(), 1);
        schedule.step();
        rates.push(schedule.lr());
    }
    assert_eq!(rates, [1.0, 2.0, 3.0, 4.0]);
});

ranks_test!(fewer_bits_are_for_the_forward_alone, 2, {
    let mut training = training(Accelerator::builder().precision(Precision::Bf16), data(8), 4)?;
    let exact = {
        let store = VarStore::new(Device::Cpu);
        Net::new(&store).forward(&big_batches(8, 0)[0].0)
    };
    let output = training.model.forward_t(&big_batches(8, 0)[0].0, false);
    assert_eq!(output.kind(), Kind::Float);
    let off = difference(&[output], &[exact]);
    assert!(off > 0.0 && off < 0.05, "{off:e}");
    training.epoch(0)?;
    assert!(weights(&training.store).iter().all(|weight| weight.kind() == Kind::Float));
    same_on_all_ranks(training.accelerator.group(), &training.store)?;
});

ranks_test!(seeds_differ_by_rank, 2, {
    let draw = || -> anyhow::Result<Tensor> {
        let accelerator = Accelerator::builder().seed(5).build()?;
        Ok(accelerator.gather(&Tensor::rand([1], (Kind::Float, Device::Cpu)))?)
    };
    let first = draw()?;
    assert_ne!(first.double_value(&[0]), first.double_value(&[1]));
    tch::manual_seed(5);
    assert_eq!(first.double_value(&[0]), Tensor::rand([1], (Kind::Float, Device::Cpu)).double_value(&[0]));
});
