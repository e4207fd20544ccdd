//! Batches of uneven sizes that a plan has put together: the same steps on any number of ranks, also after a stop.

use std::sync::{Arc, Mutex};

use drumline::ProcessGroup;
use drumline::data::{
    DistributedSampler, MapDataset, PlannedBatches, PlannedOptions, Sample, SamplerError, SamplerOptions,
};
use drumline::metrics::Perplexity;
use drumline::optim::Optimizer;
use drumline::schedule::At;
use drumline::trainer::{
    Callback, CallbackResult, CrossEntropy, DistTrainer, End, Evaluation, LoadBestModel, TrainState,
};
use rank_test::ranks_test;
use tch::nn::{Module, VarStore};
use tch::{Device, Reduction, Tensor};

use super::resuming::{StopAt, stop_and_resume};
use super::shared_folder;
use super::windows::{sentences, speaker};
use super::{Pair, difference, folder, same_on_all_ranks, sgd, weights};

const SAMPLES: usize = 29;
const EPOCHS: u64 = 3;
/// Batches of a step, over all ranks.
const OF_STEP: usize = 4;
/// Of each epoch: 11, 8 and 7 batches.
const STEPS: [u64; EPOCHS as usize] = [3, 2, 2];

/// The batches of an epoch, of sizes that go round.
pub(in super::super) fn plan(epoch: u64) -> Vec<Vec<usize>> {
    let sizes: &[usize] = [&[3, 1, 5, 2][..], &[2, 6, 4], &[4, 2, 7]][epoch as usize % 3];
    let options = SamplerOptions { num_samples: SAMPLES, ..Default::default() };
    let order = DistributedSampler::new(options).unwrap().indices(epoch);
    let (mut rest, mut batches) = (&order[..], Vec::new());
    for size in sizes.iter().cycle() {
        if rest.is_empty() {
            break;
        }
        let (batch, others) = rest.split_at(rest.len().min(*size));
        batches.push(batch.to_vec());
        rest = others;
    }
    batches
}

fn planned(group: &ProcessGroup) -> Result<PlannedBatches, SamplerError> {
    PlannedBatches::new(|epoch| Arc::new(plan(epoch)), PlannedOptions::in_group(SAMPLES, group))
}

fn rate(at: At) -> f64 {
    0.2 / (1.0 + at.epoch)
}

/// One process, all batches of a step in one, and no trainer.
fn reference() -> anyhow::Result<Vec<Tensor>> {
    let store = VarStore::new(Device::Cpu);
    let net = speaker(&store);
    let mut optimizer = sgd(&store)?;
    for (epoch, steps) in STEPS.into_iter().enumerate() {
        let plan = plan(epoch as u64);
        assert_eq!(plan.len().div_ceil(OF_STEP) as u64, steps);
        for (step, batches) in plan.chunks(OF_STEP).enumerate() {
            let (x, y) = sentences(&batches.concat());
            let logits = net.forward(&x).view([-1, 9]);
            optimizer.zero_grad()?;
            logits.cross_entropy_loss::<Tensor>(&y.view([-1]), None, Reduction::Mean, 0, 0.0).backward();
            optimizer.set_lr(rate(At {
                epoch: epoch as f64 + step as f64 / steps as f64,
                step: 0,
                ..At::default()
            }));
            optimizer.step()?;
        }
    }
    Ok(weights(&store))
}

fn new<'a, M: Module>(
    group: &ProcessGroup,
    net: &'a M,
    store: &'a VarStore,
) -> anyhow::Result<DistTrainer<'a, M, Pair>> {
    tch::set_num_threads(1);
    let words = MapDataset::new(SAMPLES, |at: Sample| Ok(at.index), |at: Vec<usize>| Ok(sentences(&at)));
    Ok(DistTrainer::new(group, net, store, words)
        .sampler(planned(group)?)
        .loss(CrossEntropy { ignored: Some(0), ..CrossEntropy::default() })
        .optimizer(sgd(store)?)
        .schedule(rate)
        .update_every(OF_STEP / group.size())
        .n_epochs(EPOCHS)
        .print_every(0))
}

/// Records the length of each epoch, and the length of the whole training as far as it is known then.
struct Noting(Arc<Mutex<Vec<(u64, u64)>>>);

impl Callback for Noting {
    fn on_epoch_begin(&mut self, state: &mut TrainState) -> CallbackResult {
        self.0.lock().unwrap().push((state.steps_per_epoch(), state.total_steps()));
        Ok(())
    }
}

fn steps_are_those_of_one_process() -> anyhow::Result<()> {
    let group = ProcessGroup::from_env()?;
    let store = VarStore::new(Device::Cpu);
    let net = speaker(&store);
    let noted = Arc::default();
    let outcome = new(&group, &net, &store)?.callback(Noting(Arc::clone(&noted))).train(LoadBestModel::No)?;
    assert_eq!((outcome.steps, outcome.epochs), (STEPS.iter().sum(), EPOCHS));
    assert_eq!(*noted.lock().unwrap(), [(3, 9), (2, 7), (2, 7)]);
    let difference = difference(&weights(&store), &reference()?);
    println!("{} ranks: {difference:e}", group.size());
    assert!(difference < 1e-6, "{difference:e}");
    same_on_all_ranks(&group, &store)
}

ranks_test!(one_rank_makes_the_steps_of_four_planned_batches, 1, { steps_are_those_of_one_process()? });
ranks_test!(two_ranks_make_the_steps_of_four_planned_batches, 2, { steps_are_those_of_one_process()? });
ranks_test!(four_ranks_make_the_steps_of_four_planned_batches, 4, { steps_are_those_of_one_process()? });

ranks_test!(a_stop_among_planned_batches_is_resumed_with_the_same_bits, 2, {
    let group = ProcessGroup::from_env()?;
    let whole = VarStore::new(Device::Cpu);
    new(&group, &speaker(&whole), &whole)?.train(LoadBestModel::No)?;
    // In the middle of the first epoch, at its end, and in the middle of the others.
    for stop in [2, 3, 4, 6] {
        let (_temp, path) = shared_folder(&group)?;
        let first = VarStore::new(Device::Cpu);
        let net = speaker(&first);
        let trainer = new(&group, &net, &first)?.callback(StopAt(stop)).save_path(&path);
        assert_eq!(trainer.train(LoadBestModel::No)?.steps, stop);
        let second = VarStore::new(Device::Cpu);
        let net = speaker(&second);
        let trainer = new(&group, &net, &second)?.callback(StopAt(stop)).resume_from(&path);
        let resumed = trainer.train(LoadBestModel::No)?;
        assert_eq!((resumed.steps, resumed.end), (STEPS.iter().sum(), End::Finished));
        assert_eq!(difference(&weights(&second), &weights(&whole)), 0.0, "stopped after {stop}");
        group.barrier()?;
    }
});

ranks_test!(
    other_numbers_of_ranks_resume_planned_batches,
    2,
    {
        let group = ProcessGroup::from_env()?;
        let store = VarStore::new(Device::Cpu);
        let net = speaker(&store);
        let stop: u64 = std::env::var("DRUMLINE_TEST_STOP")?.parse()?;
        let trainer = new(&group, &net, &store)?.save_path(folder()?).resume_from(folder()?);
        let outcome = trainer.callback(StopAt(stop)).train(LoadBestModel::No)?;
        assert_eq!(outcome.steps, stop.min(7));
        if outcome.end == End::Finished {
            let difference = difference(&weights(&store), &reference()?);
            assert!(difference < 1e-6, "{difference:e}");
            println!("as one process");
        }
    },
    |ranks| { stop_and_resume(&ranks, ["2", "4"])? }
);

/// Notes the evaluations.
struct Evaluations(Arc<Mutex<Vec<f64>>>);

impl Callback for Evaluations {
    fn on_valid_end(&mut self, _: &mut TrainState, evaluation: &Evaluation) -> CallbackResult {
        self.0.lock().unwrap().extend(evaluation.metrics.iter().map(|(_, value)| *value));
        Ok(())
    }
}

ranks_test!(an_evaluation_by_planned_batches_is_exact, 2, {
    let group = ProcessGroup::from_env()?;
    let evaluated = |is_planned: bool| {
        let store = VarStore::new(Device::Cpu);
        let net = speaker(&store);
        let words = MapDataset::new(SAMPLES, |at: Sample| Ok(at.index), |at: Vec<usize>| Ok(sentences(&at)));
        let noted = Arc::default();
        let trainer = new(&group, &net, &store)?.dev_data(words).callback(Evaluations(Arc::clone(&noted)));
        let trainer = trainer.metric("ppl", Perplexity::default().ignoring(0)).metric_key("-ppl");
        let trainer = if is_planned { trainer.dev_sampler(planned(&group)?) } else { trainer };
        trainer.train(LoadBestModel::No)?;
        anyhow::Ok(noted.lock().unwrap().clone())
    };
    let (plain, planned) = (evaluated(false)?, evaluated(true)?);
    assert_eq!((plain.len(), planned.len()), (6, 6));
    assert!(plain.iter().zip(&planned).all(|(a, b)| (a - b).abs() < 1e-6 * a), "{plain:?}, {planned:?}");
    for of_epoch in plain.chunks(2) {
        assert!(
            (of_epoch[0].exp() - of_epoch[1]).abs() < 1e-5 * of_epoch[1],
            "the loss, and its exponential"
        );
    }
});

ranks_test!(a_plan_without_batches_is_an_error_on_all_ranks, 2, {
    let group = ProcessGroup::from_env()?;
    let store = VarStore::new(Device::Cpu);
    let net = speaker(&store);
    // The second epoch has none; before it, one rank is without a batch.
    let plan = |epoch| Arc::new(if epoch == 0 { vec![vec![0, 1, 2]] } else { Vec::new() });
    let sampler = PlannedBatches::new(plan, PlannedOptions::in_group(SAMPLES, &group))?;
    let message =
        new(&group, &net, &store)?.sampler(sampler).train(LoadBestModel::No).unwrap_err().to_string();
    assert!(message.contains("no rank a batch in epoch 1, of 29 samples; try"), "{message}");
    same_on_all_ranks(&group, &store)?;
});
