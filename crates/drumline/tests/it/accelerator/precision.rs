//! Loops in fp16: the loss is scaled behind the program's back, and a step that overflows is left out.

use drumline::optim::{DynamicScale, Named, ScalePolicy};
use drumline::schedule::At;
use drumline::trainer::Precision;
use drumline::{DdpOptions, ProcessGroup};
use rank_test::ranks_test;

use super::super::trainer::shared_folder;
use super::*;

const HIGH: ScalePolicy = ScalePolicy::Dynamic(DynamicScale {
    init_scale: 262_144.0,
    growth_factor: 2.0,
    backoff_factor: 0.5,
    growth_interval: 3,
});

fn new(group: &ProcessGroup) -> anyhow::Result<Training<impl Dataset<Batch = Pair> + 'static + use<>>> {
    let builder = Accelerator::builder().group(group).gradient_accumulation_steps(2).seed(1);
    training(builder.precision(Precision::Fp16).loss_scale(HIGH), data(SAMPLES), 4)
}

/// The parameters' gradients together, after a step.
fn clipped_turn<D: Dataset<Batch = Pair> + 'static>(
    training: &mut Training<D>,
    batch: &Pair,
) -> anyhow::Result<Option<f64>> {
    training.backward(batch)?;
    let parameters = training.model.parameters();
    let norm = training.accelerator.clip_grad_norm(&parameters, 0.05)?;
    training.optimizer.step()?;
    training.optimizer.zero_grad()?;
    Ok(norm)
}

ranks_test!(steps_that_overflow_are_left_out_and_schedules_wait, 2, {
    let group = ProcessGroup::from_env()?;
    let mut training = new(&group)?;
    let mut schedule =
        training.accelerator.prepare_schedule(&training.optimizer, |at: At| 1.0 / (at.step + 1) as f64);
    let (mut windows, mut skipped) = (0, 0);
    let epochs: Vec<_> = (0..5).map(|epoch| training.loader.epoch(epoch)).collect();
    for batch in epochs.into_iter().flatten() {
        let before = (weights(&training.store), schedule.lr());
        let Some(norm) = clipped_turn(&mut training, &batch?)? else { continue };
        schedule.step();
        windows += 1;
        let was_skipped = training.optimizer.step_was_skipped();
        skipped += u64::from(was_skipped);
        assert_eq!(norm.is_finite(), !was_skipped, "{norm}");
        assert!(was_skipped || norm < 10.0, "that of the loss itself: {norm}");
        assert_eq!(difference(&weights(&training.store), &before.0) == 0.0, was_skipped);
        assert_eq!(schedule.lr() == before.1, was_skipped);
    }
    assert!(skipped > 0 && skipped < windows, "{skipped} of {windows}");
    assert_eq!(
        (training.optimizer.skipped_steps(), training.optimizer.steps()),
        (skipped, windows - skipped)
    );
    assert!(training.accelerator.loss_scale()? < 262_144.0);
    same_on_all_ranks(&group, &training.store)?;
});

ranks_test!(a_loop_in_fp16_resumes_with_the_same_bits, 2, {
    let group = ProcessGroup::from_env()?;
    let (_temp, path) = shared_folder(&group)?;
    let mut whole = new(&group)?;
    (0..6).try_for_each(|epoch| whole.epoch(epoch))?;
    assert!(whole.optimizer.skipped_steps() > 0 && whole.optimizer.steps() > 0);
    let mut first = new(&group)?;
    first.epoch(0)?;
    first.accelerator.save_state(&path)?;
    let mut second = new(&group)?;
    let from = second.accelerator.load_state(&path)?.unwrap();
    (from.epoch..6).try_for_each(|epoch| second.epoch(epoch))?;
    assert_eq!(difference(&weights(&whole.store), &weights(&second.store)), 0.0);
    assert_eq!(whole.optimizer.skipped_steps(), second.optimizer.skipped_steps());
    group.barrier()?;
});

ranks_test!(gradients_are_unscaled_once, 2, {
    let group = ProcessGroup::from_env()?;
    let training = || training(Accelerator::builder().group(&group).precision(Precision::Fp16), data(16), 4);
    let mut twice = training()?;
    let batch = &big_batches(16, 0)[0];
    twice.backward(batch)?;
    twice.optimizer.step()?;
    let message = twice.optimizer.step().unwrap_err().to_string();
    assert!(message.contains("there was no backward since the optimizer's last step"), "{message}");
    let mut added = training()?;
    added.backward(batch)?;
    added.accelerator.clip_grad_norm(&added.model.parameters(), 1.0)?;
    added.backward(batch)?;
    let message = added.optimizer.step().unwrap_err().to_string();
    assert!(
        message.contains("to those that were clipped already; try backward, clip_grad_norm, step"),
        "{message}"
    );
    added.optimizer.zero_grad()?;
    added.turn(batch)?;
});

ranks_test!(optimizers_that_step_after_one_backward_have_gradients_of_one_scale, 2, {
    let group = ProcessGroup::from_env()?;
    // It grows with each good step.
    let scale = DynamicScale { init_scale: 1024.0, growth_interval: 1, ..DynamicScale::default() };
    let builder = Accelerator::builder().group(&group).precision(Precision::Fp16);
    let accelerator = builder.loss_scale(ScalePolicy::Dynamic(scale)).build()?;
    let stores = [VarStore::new(Device::Cpu), VarStore::new(Device::Cpu)];
    let model = |store| accelerator.prepare_model(Net::new(store), store, DdpOptions::default());
    let models = [model(&stores[0])?, model(&stores[1])?];
    let before = weights(&stores[0]);
    assert_eq!(difference(&before, &weights(&stores[1])), 0.0, "they begin alike");
    let mut optimizers = [sgd(&stores[0])?, sgd(&stores[1])?].map(|sgd| accelerator.prepare_optimizer(sgd));
    let (x, y) = &big_batches(16, 0)[0];
    for steps in 1..4 {
        for model in &models {
            model.backward(&model.forward_t(x, true).cross_entropy_for_logits(y))?;
        }
        for optimizer in &mut optimizers {
            optimizer.step()?;
            optimizer.zero_grad()?;
        }
        assert_eq!(
            accelerator.loss_scale()?,
            1024.0 * 2f64.powi(steps),
            "once a step, not once an optimizer"
        );
    }
    assert_eq!(difference(&weights(&stores[0]), &weights(&stores[1])), 0.0);
    assert!(difference(&weights(&stores[0]), &before) > 0.0);
});

ranks_test!(an_overflow_of_one_optimizer_is_its_own_and_the_scale_hears_of_it, 2, {
    let group = ProcessGroup::from_env()?;
    for clips in [false, true] {
        for overflowing in [Some(0), Some(1), None] {
            let builder = Accelerator::builder().group(&group).precision(Precision::Fp16);
            let accelerator = builder.build()?;
            let stores = [VarStore::new(Device::Cpu), VarStore::new(Device::Cpu)];
            let model = |store| accelerator.prepare_model(Net::new(store), store, DdpOptions::default());
            let models = [model(&stores[0])?, model(&stores[1])?];
            let before = weights(&stores[0]);
            let mut optimizers =
                [sgd(&stores[0])?, sgd(&stores[1])?].map(|sgd| accelerator.prepare_optimizer(sgd));
            let (x, y) = &big_batches(16, 0)[0];
            for (index, model) in models.iter().enumerate() {
                let factor = if overflowing == Some(index) { 1e38 } else { 1.0 };
                model.backward(&(model.forward_t(x, true).cross_entropy_for_logits(y) * factor))?;
            }
            if clips {
                let parameters: Vec<Named> = models.iter().flat_map(|model| model.parameters()).collect();
                accelerator.clip_grad_norm(&parameters, 1.0)?;
            }
            let case = format!("{overflowing:?} overflows, clips: {clips}");
            for (index, optimizer) in optimizers.iter_mut().enumerate() {
                optimizer.step()?;
                let is_skipped = overflowing == Some(index);
                assert_eq!(optimizer.step_was_skipped(), is_skipped, "optimizer {index}, {case}");
                assert_eq!(
                    difference(&weights(&stores[index]), &before) == 0.0,
                    is_skipped,
                    "{index}, {case}"
                );
            }
            let scale = if overflowing.is_some() { 32768.0 } else { 65536.0 };
            assert_eq!(accelerator.loss_scale()?, scale, "{case}");
        }
    }
});

ranks_test!(models_take_turns_each_with_its_backward_its_clipping_and_its_step, 2, {
    let group = ProcessGroup::from_env()?;
    let accelerator = Accelerator::builder().group(&group).precision(Precision::Fp16).build()?;
    let stores = [VarStore::new(Device::Cpu), VarStore::new(Device::Cpu)];
    let model = |store| accelerator.prepare_model(Net::new(store), store, DdpOptions::default());
    let models = [model(&stores[0])?, model(&stores[1])?];
    let mut optimizers = [sgd(&stores[0])?, sgd(&stores[1])?].map(|sgd| accelerator.prepare_optimizer(sgd));
    let (x, y) = &big_batches(16, 0)[0];
    for model in &models {
        model.backward(&model.forward_t(x, true).cross_entropy_for_logits(y))?;
        accelerator.clip_grad_norm(&model.parameters(), 1.0)?;
    }
    for optimizer in &mut optimizers {
        optimizer.step()?;
        optimizer.zero_grad()?;
    }
    assert_eq!(difference(&weights(&stores[0]), &weights(&stores[1])), 0.0);
    models[1].backward(&models[1].forward_t(x, true).cross_entropy_for_logits(y))?;
    let message = optimizers[0].step().unwrap_err().to_string();
    assert!(message.contains("there was no backward since the optimizer's last step"), "{message}");
});
