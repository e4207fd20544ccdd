//! Two nodes of two ranks each: in stage 3 each node has one copy of the parameters, which equal those of one rank.

use anyhow::Result;
use drumline_comm::ProcessGroup;
use drumline_parallel::ShardOptions;
use drumline_plan::Stage;
use drumline_torch::{clip_grad_norm, parameters};
use rank_test::netns::Hosts;
use rank_test::ranks_test;
use tch::nn::{Module, VarStore};
use tch::{Device, Kind, Tensor};

use super::net::{Net, assert_close, loss, samples, values};
use super::shard::{BATCH, STEPS, Training, adam};

const MAX_NORM: f64 = 0.05;

/// Parameters after the steps of one rank with whole batches.
fn alone() -> Result<Vec<Tensor>> {
    let vs = VarStore::new(Device::Cpu);
    let net = Net::new(&vs, 0);
    let mut optimizer = adam(parameters(&vs))?;
    for step in 0..STEPS {
        optimizer.zero_grad()?;
        let (x, y) = samples(step * BATCH..(step + 1) * BATCH);
        loss(&net.forward(&x), &y).backward();
        clip_grad_norm(&parameters(&vs), MAX_NORM)?;
        optimizer.step()?;
    }
    Ok(values(&parameters(&vs)))
}

fn trains_as_one_rank(group: &ProcessGroup, shard: Option<usize>, stage: Stage) -> Result<()> {
    let mut training = Training::new(group, ShardOptions { shard, ..ShardOptions::new(stage) }, adam)?;
    for step in 0..STEPS {
        training.step(group, step, 2, Some(MAX_NORM))?;
    }
    assert_close(&training.values(), &alone()?, 2e-6);
    // The control: one more step makes other parameters, on all ranks alike.
    training.step(group, STEPS, 2, Some(MAX_NORM))?;
    let sum = f64::try_from(training.values()[0].sum(Kind::Double))?;
    let sums = group.all_gather_object(&sum.to_bits())?;
    assert!(sums.iter().all(|other| *other == sum.to_bits()), "{stage}: {sums:?}");
    assert!(!training.values()[0].equal(&alone()?[0]));
    Ok(())
}

/// Which ranks see what rank 0 writes to its copy.
fn readers_of_rank_0(group: &ProcessGroup, shard: Option<usize>) -> Result<Vec<bool>> {
    let training = Training::new(group, ShardOptions { shard, ..ShardOptions::new(Stage::Zero3) }, adam)?;
    let weight = parameters(&training.vs)[0].tensor.get(0);
    group.barrier()?;
    if group.rank() == 0 {
        tch::no_grad(|| drop(weight.shallow_clone().fill_(7.0)));
    }
    group.barrier()?;
    let has_read = f64::try_from(weight.max())? == 7.0;
    Ok(group.all_gather_object(&has_read)?)
}

ranks_test!(
    two_nodes_of_two_ranks_train_as_one_rank,
    4,
    {
        let group = ProcessGroup::from_env()?;
        assert_eq!((group.num_nodes(), group.ranks_on_node().len()), (2, 2));
        for shard in [None, Some(2)] {
            assert_eq!(readers_of_rank_0(&group, shard)?, [true, true, false, false], "one copy a node");
            for stage in [Stage::Zero1, Stage::Zero2, Stage::Zero3] {
                trains_as_one_rank(&group, shard, stage)?;
            }
        }
    },
    |ranks| {
        let Some(hosts) = Hosts::new(2)? else { return Ok(()) };
        ranks.on_hosts(&hosts, &[&[0, 1], &[2, 3]]).pass()?;
    }
);
