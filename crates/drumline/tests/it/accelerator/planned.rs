//! Batches that a plan has put together, shared out by a prepared loader.

use std::sync::Arc;

use drumline::ProcessGroup;
use drumline::data::{PlannedBatches, PlannedOptions};
use drumline::optim::Optimizer;
use rank_test::ranks_test;

use super::super::trainer::{FOLDER, planned::plan};
use super::*;

const EPOCHS: u64 = 3;
/// Batches of a step, over all ranks.
const OF_STEP: usize = 4;

fn new(group: &ProcessGroup) -> anyhow::Result<Training<impl Dataset<Batch = Pair> + 'static + use<>>> {
    let builder = Accelerator::builder().group(group).gradient_accumulation_steps(OF_STEP / group.size());
    let accelerator = builder.cpu().build()?;
    let store = VarStore::new(accelerator.device());
    let net = Net::new(&store);
    let options = PlannedOptions { num_samples: SAMPLES, ..Default::default() };
    let sampler = PlannedBatches::new(|epoch| Arc::new(plan(epoch)), options)?;
    let loader = Loader::new(data(SAMPLES), sampler, LoaderOptions { workers: 1, ..Default::default() })?;
    let (model, optimizer, loader) = accelerator.prepare(net, &store, sgd(&store)?, loader)?;
    Ok(Training { accelerator, store, model, optimizer, loader })
}

/// One process, all batches of a step in one, nothing prepared.
fn reference() -> anyhow::Result<Vec<Tensor>> {
    let store = VarStore::new(Device::Cpu);
    let net = Net::new(&store);
    let mut optimizer = sgd(&store)?;
    for batches in
        (0..EPOCHS).flat_map(|epoch| plan(epoch).chunks(OF_STEP).map(<[_]>::concat).collect::<Vec<_>>())
    {
        let (x, y) = collate(batches.into_iter().map(sample).collect()).unwrap();
        optimizer.zero_grad()?;
        net.forward(&x).cross_entropy_for_logits(&y).backward();
        optimizer.step()?;
    }
    Ok(weights(&store))
}

fn steps_are_those_of_one_process() -> anyhow::Result<()> {
    let group = ProcessGroup::from_env()?;
    let mut training = new(&group)?;
    for epoch in 0..EPOCHS {
        let batches = plan(epoch).len().div_ceil(group.size());
        assert_eq!(training.loader.num_batches_of(epoch), batches);
        assert_eq!(training.loader.epoch(epoch).count(), batches);
        training.epoch(epoch)?;
    }
    assert_eq!(training.optimizer.steps(), 7);
    let difference = difference(&weights(&training.store), &reference()?);
    assert!(difference < 1e-6, "{difference:e}");
    same_on_all_ranks(&group, &training.store)
}

ranks_test!(one_rank_makes_the_steps_of_four_planned_batches, 1, { steps_are_those_of_one_process()? });
ranks_test!(two_ranks_make_the_steps_of_four_planned_batches, 2, { steps_are_those_of_one_process()? });
ranks_test!(four_ranks_make_the_steps_of_four_planned_batches, 4, { steps_are_those_of_one_process()? });

ranks_test!(
    other_numbers_of_ranks_resume_planned_batches,
    2,
    {
        let group = ProcessGroup::from_env()?;
        let mut training = new(&group)?;
        let from = training.accelerator.load_state(folder()?)?.map_or(0, |from| from.epoch);
        for epoch in from..EPOCHS {
            for batch in training.loader.epoch(epoch) {
                training.turn(&batch?)?;
                // In the middle of the second epoch.
                if group.size() == 2 && training.optimizer.steps() == 4 {
                    training.accelerator.save_state(folder()?)?;
                    return Ok(());
                }
            }
        }
        let difference = difference(&weights(&training.store), &reference()?);
        assert!(difference < 1e-6, "{difference:e}");
    },
    |ranks| {
        let folder = tempfile::tempdir()?;
        let ranks = ranks.env([(FOLDER, folder.path())]);
        ranks.pass()?;
        ranks.nproc(4).pass()?;
    }
);
