//! `Accelerator` with ZeRO: the losses and weights of one rank, with windows, fillers, clipping, fp16 and saved states.

use drumline::ProcessGroup;
use drumline::engine::{Accumulation, ShardOptions, Stage};
use drumline::optim::{Named, Optimizer, OptimizerState, clip_grad_norm, parameters};
use drumline::trainer::Precision;
use drumline_torch::{StepTensors, TorchError};
use rank_test::ranks_test;
use tch::{Kind, Reduction};

use super::super::trainer::{FOLDER, shared_folder};
use super::*;

const EPOCHS: u64 = 3;
const MAX_NORM: f64 = 0.2;
const TOLERANCE: f64 = 2e-6;

type Change = fn(AcceleratorBuilder) -> AcceleratorBuilder;

fn divided(stage: Stage) -> ShardOptions {
    ShardOptions { accumulation: Some(Accumulation::All), ..ShardOptions::new(stage) }
}

/// Every way to divide a training; the last one gathers parameters when they are used.
const WAYS: [Change; 4] = [
    |builder| builder.shard(Stage::Zero1),
    |builder| builder.engine(|| divided(Stage::Zero2)),
    |builder| builder.shard(Stage::Zero3),
    |builder| {
        let gathers =
            || ShardOptions { gather_parameters: Some(true), keep_gathered: 20, ..divided(Stage::Zero3) };
        builder.engine(gathers)
    },
];

/// The data of an epoch, and how many samples a step has.
#[derive(Clone, Copy)]
struct Work {
    len: usize,
    big_batch: usize,
}

/// The mean loss of each step, and the weights after the last.
#[derive(Default)]
struct Outcome {
    losses: Vec<f64>,
    weights: Vec<Tensor>,
}

fn losses_of(output: &Tensor, y: &Tensor) -> Tensor {
    output.cross_entropy_loss::<Tensor>(y, None, Reduction::None, -100, 0.0)
}

/// One process, one batch a step, nothing prepared.
fn alone(work: Work) -> anyhow::Result<Outcome> {
    let store = VarStore::new(Device::Cpu);
    let (net, mut optimizer) = (Net::new(&store), sgd(&store)?);
    let mut losses = Vec::new();
    for epoch in 0..EPOCHS {
        for indices in order(work.len, epoch).chunks(work.big_batch) {
            let (x, y) = collate(indices.iter().map(|index| sample(*index)).collect()).unwrap();
            optimizer.zero_grad()?;
            let loss = losses_of(&net.forward(&x), &y).mean(Kind::Float);
            loss.backward();
            clip_grad_norm(&parameters(&store), MAX_NORM)?;
            Optimizer::step(&mut optimizer)?;
            losses.push(loss.double_value(&[]));
        }
    }
    Ok(Outcome { losses, weights: weights(&store) })
}

/// A training whose steps have two turns.
fn begun(
    group: &ProcessGroup,
    way: Change,
    work: Work,
) -> anyhow::Result<Training<impl Dataset<Batch = Pair> + 'static + use<>>> {
    let builder = Accelerator::builder().group(group).gradient_accumulation_steps(2).seed(1);
    training(way(builder), data(work.len), work.big_batch / 2 / group.size())
}

/// The steps of an epoch, or of its beginning. Returns the mean loss of each.
fn steps<D: Dataset<Batch = Pair> + 'static>(
    training: &mut Training<D>,
    epoch: u64,
    most: usize,
) -> anyhow::Result<Vec<f64>> {
    let (mut losses, mut of_window) = (Vec::new(), Vec::new());
    for batch in training.loader.epoch(epoch) {
        let (x, y) = batch?;
        let each = losses_of(&training.model.forward_t(&x, true), &y);
        training.accelerator.backward(&each.mean(Kind::Float))?;
        of_window.push(training.accelerator.gather_for_metrics(&each.detach())?);
        training.accelerator.clip_grad_norm(&training.model.parameters(), MAX_NORM)?;
        training.optimizer.step()?;
        training.optimizer.zero_grad()?;
        if training.accelerator.sync_gradients() {
            losses.push(Tensor::cat(&std::mem::take(&mut of_window), 0).mean(Kind::Double).double_value(&[]));
        }
        if losses.len() == most {
            break;
        }
    }
    Ok(losses)
}

/// All weights, also where ranks have only their rows of them.
fn whole_weights<D: Dataset>(training: &Training<D>) -> anyhow::Result<Vec<Tensor>> {
    Ok(training.model.evaluation(|| weights(&training.store))?)
}

fn assert_same(found: &Outcome, expected: &Outcome, what: &str) {
    assert_eq!(found.losses.len(), expected.losses.len(), "{what}");
    for (step, (ours, theirs)) in found.losses.iter().zip(&expected.losses).enumerate() {
        assert!((ours - theirs).abs() < TOLERANCE, "{what}: the loss of step {step} is {ours}, not {theirs}");
    }
    let difference = difference(&found.weights, &expected.weights);
    assert!(difference < TOLERANCE, "{what}: {difference:e}");
}

fn ways_train_as_one_rank(work: Work) -> anyhow::Result<()> {
    let group = ProcessGroup::from_env()?;
    let expected = alone(work)?;
    for (place, way) in WAYS.into_iter().enumerate() {
        let mut training = begun(&group, way, work)?;
        let mut losses = Vec::new();
        for epoch in 0..EPOCHS {
            losses.extend(steps(&mut training, epoch, usize::MAX)?);
        }
        let weights = whole_weights(&training)?;
        assert_same(&Outcome { losses, weights }, &expected, &format!("way {place}"));
        // The control: one more epoch makes other weights.
        steps(&mut training, EPOCHS, usize::MAX)?;
        assert!(difference(&whole_weights(&training)?, &expected.weights) > 100.0 * TOLERANCE);
    }
    Ok(())
}

// The last step of an epoch has one sample: the other ranks have fillers.
ranks_test!(ways_train_as_one_rank_on_two_ranks, 2, {
    ways_train_as_one_rank(Work { len: 25, big_batch: 12 })?
});
ranks_test!(ways_train_as_one_rank_on_three_ranks, 3, {
    ways_train_as_one_rank(Work { len: 25, big_batch: 12 })?
});

const WAY: &str = "DRUMLINE_TEST_WAY";

ranks_test!(
    two_ranks_save_and_three_resume_in_another_stage,
    2,
    {
        let group = ProcessGroup::from_env()?;
        let (work, way) = (Work { len: 25, big_batch: 12 }, std::env::var(WAY)?.parse::<usize>()?);
        let mut training = begun(&group, WAYS[way], work)?;
        if group.size() == 2 {
            steps(&mut training, 0, usize::MAX)?;
            steps(&mut training, 1, 1)?;
            training.accelerator.save_state(folder()?)?;
            return Ok(());
        }
        let from = training.accelerator.load_state(folder()?)?.unwrap();
        assert_eq!((from.epoch, from.step), (1, 4));
        let mut losses = Vec::new();
        for epoch in from.epoch..EPOCHS {
            losses.extend(steps(&mut training, epoch, usize::MAX)?);
        }
        let mut expected = alone(work)?;
        expected.losses.drain(..4);
        assert_same(&Outcome { losses, weights: whole_weights(&training)? }, &expected, "after the resume");
    },
    |ranks| {
        for (from, to) in [(0, 3), (3, 1), (2, 0)] {
            let folder = tempfile::tempdir()?;
            let ranks = ranks.clone().env([(FOLDER, folder.path())]);
            ranks.clone().env([(WAY, from.to_string())]).pass()?;
            ranks.nproc(3).env([(WAY, to.to_string())]).pass()?;
        }
    }
);

ranks_test!(a_filler_gathers_nothing, 2, {
    let group = ProcessGroup::from_env()?;
    // Batches of two: in the second turn rank 1 has none.
    for way in WAYS {
        let builder = Accelerator::builder().group(&group);
        let mut training = training(way(builder), data(5), 2)?;
        let losses = steps(&mut training, 0, usize::MAX)?;
        assert_eq!((losses.len(), training.optimizer.steps()), (2, 2));
    }
});

ranks_test!(gradients_that_were_not_reduced_are_cleared, 2, {
    let group = ProcessGroup::from_env()?;
    for way in WAYS {
        let after = |is_disturbed: bool, clears: bool| -> anyhow::Result<Vec<Tensor>> {
            let builder = way(Accelerator::builder().group(&group));
            let mut training = training(builder, data(1), 1)?;
            let batch = collate(vec![sample(group.rank())]).unwrap();
            for _ in 0..2 {
                if is_disturbed {
                    training.accelerator.no_sync(|| training.backward(&batch))?;
                    if clears {
                        training.optimizer.zero_grad()?;
                    }
                }
                training.turn(&batch)?;
            }
            whole_weights(&training)
        };
        let plain = after(false, false)?;
        assert_eq!(difference(&after(true, true)?, &plain), 0.0);
        assert!(difference(&after(true, false)?, &plain) > 0.0, "the control");
    }
});

ranks_test!(whole_parameters_are_not_clipped_silently, 2, {
    let group = ProcessGroup::from_env()?;
    let batch = collate(vec![sample(group.rank())]).unwrap();
    for way in WAYS {
        let training = training(way(Accelerator::builder().group(&group)), data(1), 1)?;
        training.backward(&batch)?;
        let clip = |parameters: &[Named]| training.accelerator.clip_grad_norm(parameters, MAX_NORM);
        let message = clip(&parameters(&training.store)).unwrap_err().to_string();
        assert!(
            message.contains("got whole parameters") && message.contains("; try model.parameters()"),
            "{message}"
        );
        assert!(clip(&training.model.parameters())?.unwrap() > 0.0);
    }
    let replicas = training(Accelerator::builder().group(&group), data(1), 1)?;
    replicas.backward(&batch)?;
    assert!(replicas.accelerator.clip_grad_norm(&parameters(&replicas.store), MAX_NORM)?.unwrap() > 0.0);
});

/// A training in fp16 of one model by two optimizers, the second for one small bias.
fn two_optimizers(group: &ProcessGroup, way: Change) -> anyhow::Result<(Vec<Tensor>, bool)> {
    let builder = Accelerator::builder().group(group).precision(Precision::Fp16);
    let accelerator = way(builder).cpu().build()?;
    let store = VarStore::new(Device::Cpu);
    let net = Net::new(&store);
    let (bias, others): (Vec<_>, Vec<_>) =
        parameters(&store).into_iter().partition(|named| named.name == "second.bias");
    let make =
        |parameters| Sgd::new(parameters, drumline::optim::SgdOptions { lr: 0.1, ..Default::default() });
    let (model, mut first, loader) =
        accelerator.prepare(net, &store, make(others)?, whole(data(SAMPLES), 4)?)?;
    let mut second = accelerator.prepare_optimizer(make(bias)?);
    for batch in loader.epoch(0) {
        let (x, y) = batch?;
        accelerator.backward(&model.forward_t(&x, true).cross_entropy_for_logits(&y))?;
        let norm =
            accelerator.clip_grad_norm(&[first.parameters(), second.parameters()].concat(), MAX_NORM)?;
        assert!(norm.is_some_and(|norm| norm < 10.0), "that of the loss itself: {norm:?}");
        for optimizer in [&mut first, &mut second] {
            optimizer.step()?;
            optimizer.zero_grad()?;
        }
    }
    let found = model.evaluation(|| weights(&store))?;
    Ok((found, second.parameters().is_empty()))
}

ranks_test!(
    a_rank_that_holds_nothing_of_an_optimizer_unscales_it_with_the_others,
    2,
    env = [("DRUMLINE_TIMEOUT", "5")],
    {
        let group = ProcessGroup::from_env()?;
        let (expected, _) = two_optimizers(&group, |builder| builder)?;
        for way in WAYS {
            let (found, has_nothing) = two_optimizers(&group, way)?;
            assert!(group.all_gather_object(&has_nothing)?.contains(&true));
            // In fp16 a difference in the last bit of a weight makes one of 1e-3 in a product.
            assert!(difference(&found, &expected) < 1e-3, "{:e}", difference(&found, &expected));
        }
    }
);

ranks_test!(models_whose_states_are_divided_take_turns_in_fp16, 2, env = [("DRUMLINE_TIMEOUT", "5")], {
    let group = ProcessGroup::from_env()?;
    let builder = Accelerator::builder().group(&group).precision(Precision::Fp16);
    let accelerator = builder.shard(Stage::Zero2).cpu().build()?;
    let stores = [VarStore::new(Device::Cpu), VarStore::new(Device::Cpu)];
    let model = |store| accelerator.prepare_model(Net::new(store), store, ShardOptions::new(Stage::Zero2));
    let models = [model(&stores[0])?, model(&stores[1])?];
    let before = weights(&stores[0]);
    let mut optimizers = [sgd(&stores[0])?, sgd(&stores[1])?].map(|sgd| accelerator.prepare_optimizer(sgd));
    let (x, y) = &big_batches(16, 0)[0];
    for model in &models {
        model.backward(&model.forward_t(x, true).cross_entropy_for_logits(y))?;
        accelerator.clip_grad_norm(&model.parameters(), MAX_NORM)?;
    }
    for optimizer in &mut optimizers {
        optimizer.step()?;
        optimizer.zero_grad()?;
    }
    assert_eq!(difference(&weights(&stores[0]), &weights(&stores[1])), 0.0);
    assert!(difference(&weights(&stores[0]), &before) > 0.0);
});

/// An optimizer whose state cannot be loaded on some ranks.
struct Refusing {
    sgd: Sgd,
    refuses: bool,
}

impl Optimizer for Refusing {
    fn step_with(&mut self, tensors: StepTensors<'_>) -> Result<(), TorchError> {
        self.sgd.step_with(tensors)
    }

    fn keep_lr_on_device(&mut self) -> Result<(), TorchError> {
        self.sgd.keep_lr_on_device()
    }

    fn zero_grad(&mut self) -> Result<(), TorchError> {
        self.sgd.zero_grad()
    }

    fn lr(&self) -> f64 {
        self.sgd.lr()
    }

    fn set_lr(&mut self, lr: f64) {
        self.sgd.set_lr(lr);
    }

    fn parameters(&self) -> Vec<Named> {
        self.sgd.parameters()
    }

    fn replace_parameters(
        &mut self,
        replaced: &mut dyn FnMut(&Named) -> Option<Tensor>,
    ) -> Result<(), TorchError> {
        self.sgd.replace_parameters(replaced)
    }

    fn state(&self) -> OptimizerState {
        self.sgd.state()
    }

    fn load_state(&mut self, state: &OptimizerState) -> Result<(), TorchError> {
        if self.refuses {
            return Err(TorchError::Unsupported { operation: "load", reason: "it refuses on purpose" });
        }
        self.sgd.load_state(state)
    }
}

/// Loads a state into an optimizer with another learning rate. Returns the outcome, and the rate and weights after it.
fn loaded(
    group: &ProcessGroup,
    way: Change,
    path: &str,
    refuses: bool,
) -> anyhow::Result<(Result<(), String>, f64, Vec<Tensor>)> {
    let accelerator = way(Accelerator::builder().group(group)).cpu().build()?;
    let store = VarStore::new(Device::Cpu);
    let net = Net::new(&store);
    let mut optimizer = sgd(&store)?;
    Optimizer::set_lr(&mut optimizer, 0.5);
    let optimizer = Refusing { sgd: optimizer, refuses };
    let (model, optimizer, _loader) = accelerator.prepare(net, &store, optimizer, whole(data(25), 6)?)?;
    let outcome = accelerator.load_state(path).map(drop).map_err(|error| error.to_string());
    Ok((outcome, optimizer.lr(), model.evaluation(|| weights(&store))?))
}

ranks_test!(an_optimizer_that_refuses_a_state_on_one_rank_leaves_all_ranks_unchanged, 2, {
    let group = ProcessGroup::from_env()?;
    for way in [WAYS[0], |builder| builder] {
        let (_temp, path) = shared_folder(&group)?;
        let mut saved = begun(&group, way, Work { len: 25, big_batch: 24 })?;
        steps(&mut saved, 0, usize::MAX)?;
        saved.accelerator.save_state(&path)?;
        let (outcome, lr, unchanged) = loaded(&group, way, &path, group.rank() == 1)?;
        let message = outcome.unwrap_err();
        assert!(
            message.starts_with("rank 1: cannot resume from") && message.contains("on purpose"),
            "{message}"
        );
        let first = VarStore::new(Device::Cpu);
        let _net = Net::new(&first);
        assert_eq!(
            (lr, difference(&unchanged, &weights(&first))),
            (0.5, 0.0),
            "also on the rank that could load it"
        );
        // The control: an optimizer that loads it.
        let (outcome, lr, changed) = loaded(&group, way, &path, false)?;
        assert_eq!((outcome, lr), (Ok(()), 0.1));
        assert_eq!(difference(&changed, &whole_weights(&saved)?), 0.0);
        group.barrier()?;
    }
});
