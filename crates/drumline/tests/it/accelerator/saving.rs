//! A saved loop resumes with the same bits.

use drumline::{DdpOptions, ProcessGroup};
use rank_test::ranks_test;

use super::super::trainer::FOLDER;
use super::*;

const EPOCHS: u64 = 3;
/// Turns of the second epoch, of 8 in windows of 2, that are done when it is saved.
const SAVED_AT: usize = 4;

fn new_training(
    group: &ProcessGroup,
) -> anyhow::Result<Training<impl Dataset<Batch = Pair> + 'static + use<>>> {
    let builder = Accelerator::builder().group(group).gradient_accumulation_steps(2).seed(1);
    training(builder, data(SAMPLES), 4 / group.size())
}

/// Trains to the middle of the second epoch, and saves.
fn train_and_save(group: &ProcessGroup) -> anyhow::Result<()> {
    let mut training = new_training(group)?;
    training.epoch(0)?;
    for (turn, batch) in (1..).zip(training.loader.epoch(1)) {
        let batch = batch?;
        training.backward(&batch)?;
        if turn == 3 {
            let message = training.accelerator.save_state(folder()?).unwrap_err().to_string();
            assert!(message.contains("would lose its gradients"), "{message}");
        }
        training.optimizer.step()?;
        training.optimizer.zero_grad()?;
        if turn == SAVED_AT {
            let path = training.accelerator.save_state(folder()?)?;
            assert!(path.ends_with("step-00000006"), "{}", path.display());
            break;
        }
    }
    Ok(())
}

/// Resumes to the end, and compares with a loop that never stopped.
fn resume_to_the_end(group: &ProcessGroup) -> anyhow::Result<f64> {
    let mut straight = new_training(group)?;
    (0..EPOCHS).try_for_each(|epoch| straight.epoch(epoch))?;
    assert_eq!(straight.optimizer.steps(), 12);
    let mut resumed = new_training(group)?;
    assert!(resumed.accelerator.load_state(folder()?.join("nothing"))?.is_none());
    let from = resumed.accelerator.load_state(folder()?)?.unwrap();
    assert_eq!((from.epoch, from.step), (1, 6));
    (from.epoch..EPOCHS).try_for_each(|epoch| resumed.epoch(epoch))?;
    assert_eq!(resumed.optimizer.steps(), 12);
    same_on_all_ranks(resumed.accelerator.group(), &resumed.store)?;
    Ok(difference(&weights(&straight.store), &weights(&resumed.store)))
}

ranks_test!(
    it_resumes_with_the_same_bits,
    2,
    {
        let group = ProcessGroup::from_env()?;
        train_and_save(&group)?;
        assert_eq!(resume_to_the_end(&group)?, 0.0);
    },
    |ranks| {
        let folder = tempfile::tempdir()?;
        ranks.env([(FOLDER, folder.path())]).pass()?;
    }
);

ranks_test!(
    another_number_of_ranks_resumes,
    2,
    {
        let group = ProcessGroup::from_env()?;
        match group.size() {
            2 => train_and_save(&group)?,
            _ => assert!(resume_to_the_end(&group)? < 1e-6),
        }
    },
    |ranks| {
        let folder = tempfile::tempdir()?;
        let ranks = ranks.env([(FOLDER, folder.path())]);
        ranks.pass()?;
        ranks.nproc(1).pass()?;
    }
);

/// Two models with an optimizer each, trained for so many steps from what is saved, if anything is; their weights then.
fn two_models(group: &ProcessGroup, steps: usize) -> anyhow::Result<Vec<Tensor>> {
    let accelerator = Accelerator::builder().group(group).build()?;
    let stores = [VarStore::new(Device::Cpu), VarStore::new(Device::Cpu)];
    let model = |store| accelerator.prepare_model(Net::new(store), store, DdpOptions::default());
    let models = [model(&stores[0])?, model(&stores[1])?];
    let adam = drumline::optim::Adam::new(drumline::optim::parameters(&stores[1]), Default::default())?;
    let (mut sgd, mut adam) =
        (accelerator.prepare_optimizer(sgd(&stores[0])?), accelerator.prepare_optimizer(adam));
    let done = accelerator.load_state(folder()?)?.map_or(0, |from| from.step);
    assert_eq!((sgd.steps(), adam.steps()), (done, done));
    for index in done as usize..done as usize + steps {
        let (x, y) = collate(vec![sample(index * 2 + group.rank())]).unwrap();
        for model in &models {
            model.backward(&model.forward_t(&x, true).cross_entropy_for_logits(&y))?;
        }
        sgd.step()?;
        adam.step()?;
        sgd.zero_grad()?;
        adam.zero_grad()?;
    }
    accelerator.save_state(folder()?)?;
    Ok(stores.iter().flat_map(weights).collect())
}

ranks_test!(
    several_models_and_optimizers_resume_with_the_same_bits,
    2,
    {
        let group = ProcessGroup::from_env()?;
        let straight = two_models(&group, 6)?;
        group.barrier()?;
        if group.rank() == 0 {
            std::fs::remove_dir_all(folder()?)?;
        }
        group.barrier()?;
        let half = two_models(&group, 3)?;
        assert!(difference(&half, &straight) > 0.0, "the control");
        assert_eq!(difference(&two_models(&group, 3)?, &straight), 0.0);
        // One model and one optimizer are not what was saved.
        let message = new_training(&group)?.accelerator.load_state(folder()?).unwrap_err().to_string();
        assert!(message.contains("`0.first.bias` is not in the model"), "{message}");
    },
    |ranks| {
        let folder = tempfile::tempdir()?;
        ranks.env([(FOLDER, folder.path().join("states"))]).pass()?;
    }
);

/// The learning rate of the first step after a state was loaded, with the schedule prepared before or after that.
fn first_rate(group: &ProcessGroup, is_early: bool) -> anyhow::Result<f64> {
    let Training { accelerator, optimizer, .. } = new_training(group)?;
    let rate = |at: drumline::schedule::At| 1.0 + at.step as f64 + at.epoch / 10.0;
    let early = is_early.then(|| accelerator.prepare_schedule(&optimizer, rate));
    accelerator.load_state(folder()?)?;
    let schedule = early.unwrap_or_else(|| accelerator.prepare_schedule(&optimizer, rate));
    Ok(schedule.lr())
}

ranks_test!(
    a_schedule_resumes_where_it_was,
    2,
    {
        let group = ProcessGroup::from_env()?;
        train_and_save(&group)?;
        // After 6 steps, and 16 of 29 samples of the second epoch.
        let expected = 7.0 + (1.0 + 16.0 / 29.0) / 10.0;
        for is_early in [true, false] {
            let rate = first_rate(&group, is_early)?;
            assert!((rate - expected).abs() < 1e-12, "{rate}, expected {expected}");
        }
    },
    |ranks| {
        let folder = tempfile::tempdir()?;
        ranks.env([(FOLDER, folder.path())]).pass()?;
    }
);

ranks_test!(first_batches_are_skipped_and_not_loaded, 2, {
    let loaded = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    let see = loaded.clone();
    let dataset = data_seen(SAMPLES, move |index| {
        see.lock().unwrap().push(index);
        Ok(())
    });
    let accelerator = Accelerator::new()?;
    let loader = accelerator.prepare_loader(whole(dataset, 4)?)?;
    let rest: Vec<_> = accelerator.skip_first_batches(&loader, 2, 3).collect::<Result<_, _>>()?;
    let rank = accelerator.process_index();
    let expected: Vec<_> = order(SAMPLES, 2)[24..].iter().skip(rank).step_by(2).copied().collect();
    assert_eq!(*loaded.lock().unwrap(), expected);
    assert_eq!(rest.len(), 1);
    assert_eq!(loader.epoch(2).count(), loader.num_batches(), "the control");
    assert_eq!(accelerator.skip_first_batches(&loader, 2, 9).count(), 0);
    assert_eq!(accelerator.skip_first_batches(&loader, 2, usize::MAX).count(), 0);
});

ranks_test!(
    a_state_of_other_data_is_refused_unless_it_is_accepted,
    2,
    {
        let group = ProcessGroup::from_env()?;
        train_and_save(&group)?;
        let load = |accept| {
            let builder = Accelerator::builder().group(&group).gradient_accumulation_steps(2);
            let builder = builder.seed(1).accept_new_data(accept);
            let training = training(builder, data(SAMPLES - 4), 4 / group.size())?;
            Ok::<_, anyhow::Error>(training.accelerator.load_state(folder()?).map(Option::unwrap))
        };
        let message = load(false)?.unwrap_err().to_string();
        let both = format!("a data set of {SAMPLES} samples, but this one has {} samples", SAMPLES - 4);
        assert!(message.starts_with("cannot resume from") && message.contains(&both), "{message}");
        assert_eq!(load(true)?.unwrap().step, 6);
        assert_eq!(new_training(&group)?.accelerator.load_state(folder()?)?.unwrap().step, 6, "control");
    },
    |ranks| {
        let folder = tempfile::tempdir()?;
        ranks.env([(FOLDER, folder.path())]).pass()?;
    }
);

ranks_test!(
    a_good_state_stays_when_its_folder_is_spelled_in_two_ways,
    2,
    {
        let group = ProcessGroup::from_env()?;
        let absolute = folder()?;
        let mut training = new_training(&group)?;
        for epoch in 0..2 {
            training.epoch(epoch)?;
            training.accelerator.save_state(&absolute)?;
        }
        if group.rank() == 0 {
            std::fs::write(absolute.join("step-00000008/model.safetensors"), "")?;
        }
        group.barrier()?;
        std::env::set_current_dir(absolute.parent().unwrap())?;
        let mut resumed = new_training(&group)?;
        let from = resumed.accelerator.load_state(&absolute)?.unwrap();
        assert_eq!(from.step, 4, "the one before the damaged one");
        (from.epoch..EPOCHS).try_for_each(|epoch| resumed.epoch(epoch))?;
        let saved = resumed.accelerator.save_state(absolute.file_name().unwrap())?;
        assert!(saved.ends_with("step-00000012"), "{}", saved.display());
        let is_there = |name: &str| absolute.join(name).is_dir();
        assert!(is_there("step-00000004") && is_there("step-00000012"), "the last two that are whole");
        assert!(is_there("bad-step-00000008") && !is_there("step-00000008"), "the damaged one is renamed");
    },
    |ranks| {
        let folder = tempfile::tempdir()?;
        ranks.env([(FOLDER, folder.path().join("states"))]).pass()?;
    }
);
