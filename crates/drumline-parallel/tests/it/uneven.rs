//! Ranks with different numbers of batches.

use anyhow::Result;
use drumline_comm::ProcessGroup;
use drumline_parallel::{Ddp, DdpOptions, DivideBy, SyncBatchNorm, SyncGroup, UnevenTurn};
use drumline_torch::parameters;
use rank_test::ranks_test;
use tch::nn::{BatchNormConfig, Module, ModuleT, VarStore, linear, seq_t};
use tch::{Device, Tensor};

use super::net::{Net, assert_close, descend, loss, replica, samples, values};

/// Rank r has r + 1 batches of 4 samples.
fn batches(rank: usize) -> Vec<(Tensor, Tensor)> {
    let start = |index: i64| rank as i64 * 100 + index * 4;
    (0..=rank as i64).map(|index| samples(start(index)..start(index) + 4)).collect()
}

/// The same in one process: the sum of the gradients of ranks with a batch, divided by `divisor(their number)`.
fn alone(world: usize, divisor: impl Fn(usize) -> usize) -> Result<Vec<Tensor>> {
    let vs = VarStore::new(Device::Cpu);
    let net = Net::new(&vs, 0);
    for turn in 0..world {
        let present: Vec<_> = (0..world).filter_map(|rank| batches(rank).into_iter().nth(turn)).collect();
        for (x, y) in &present {
            (loss(&net.forward(x), y) / divisor(present.len()) as f64).backward();
        }
        descend(&parameters(&vs))?;
    }
    Ok(values(&parameters(&vs)))
}

fn train(share: DivideBy, reference: impl Fn(usize) -> Result<Vec<Tensor>>) -> Result<()> {
    let group = ProcessGroup::from_env()?;
    let vs = VarStore::new(Device::Cpu);
    let ddp = replica(&group, &vs)?;
    let mut turns = 0;
    for turn in ddp.uneven(batches(group.rank()), share) {
        match turn? {
            UnevenTurn::Batch((x, y)) => ddp.backward(&loss(&ddp.forward(&x)?, &y))?,
            UnevenTurn::Empty => ddp.backward_nothing()?,
        }
        descend(&parameters(&vs))?;
        turns += 1;
    }
    assert_eq!(turns, group.size());
    assert_close(&values(&parameters(&vs)), &reference(group.size())?, 1e-6);
    // An even epoch afterwards works as usual.
    let (x, y) = samples(0..4);
    Ok(ddp.backward(&loss(&ddp.forward(&x)?, &y))?)
}

ranks_test!(divided_among_all_ranks_as_pytorch_does, 3, {
    train(DivideBy::AllRanks, |world| alone(world, |_| world))?
});

ranks_test!(divided_among_those_that_have_data, 3, {
    train(DivideBy::RanksWithData, |world| alone(world, |present| present))?
});

ranks_test!(a_rank_without_any_batch_takes_part, 2, {
    let group = ProcessGroup::from_env()?;
    let vs = VarStore::new(Device::Cpu);
    let ddp = replica(&group, &vs)?;
    let mine = if group.rank() == 0 { Vec::new() } else { batches(1) };
    for turn in ddp.uneven(mine, DivideBy::AllRanks) {
        match turn? {
            UnevenTurn::Batch((x, y)) => ddp.backward(&loss(&ddp.forward(&x)?, &y))?,
            UnevenTurn::Empty => ddp.backward_nothing()?,
        }
        descend(&parameters(&vs))?;
    }
    let sums: Vec<f64> =
        values(&parameters(&vs)).iter().map(|t| t.sum(tch::Kind::Double).double_value(&[])).collect();
    let mut all = vec![0f64; sums.len() * 2];
    group.all_gather(&sums, &mut all)?;
    assert_eq!(all[..sums.len()], all[sums.len()..]);
});

/// A norm over all ranks between two layers.
pub(crate) fn normed(vs: &VarStore, sync: &SyncGroup) -> impl ModuleT + use<> {
    let (a, b) = (
        linear(vs.root() / "a", 6, 4, Default::default()),
        linear(vs.root() / "b", 4, 3, Default::default()),
    );
    let norm = SyncBatchNorm::new(vs.root() / "n", 4, BatchNormConfig::default(), sync);
    seq_t().add(a).add(norm).add_fn(|x| x.tanh()).add(b)
}

/// An epoch with synchronised norms and `micro_batches` per batch. All ranks must end with the same model.
fn with_norms(micro_batches: i64) -> Result<()> {
    let group = ProcessGroup::from_env()?;
    let sync = SyncGroup::new(&group)?;
    let vs = VarStore::new(Device::Cpu);
    let net = normed(&vs, &sync);
    let options = DdpOptions { sync_group: Some(sync), ..DdpOptions::default() };
    let ddp = Ddp::new(net, &vs, &group, options)?;
    let mut turns = 0;
    for turn in ddp.uneven(batches(group.rank()), DivideBy::RanksWithData) {
        match turn? {
            UnevenTurn::Batch((x, y)) => {
                let parts = x.chunk(micro_batches, 0).into_iter().zip(y.chunk(micro_batches, 0));
                let mut parts: Vec<_> = parts.collect();
                let last = parts.pop();
                let backward = |(x, y): &(Tensor, Tensor)| ddp.backward(&loss(&ddp.forward(x)?, y));
                ddp.no_sync(|| parts.iter().try_for_each(backward))?;
                last.iter().try_for_each(backward)?;
            }
            UnevenTurn::Empty => ddp.backward_nothing()?,
        }
        descend(&parameters(&vs))?;
        turns += 1;
    }
    assert_eq!(turns, 3);
    let variables: std::collections::BTreeMap<_, _> = vs.variables().into_iter().collect();
    let sums: Vec<f64> = variables.values().map(|t| t.sum(tch::Kind::Double).double_value(&[])).collect();
    let mut all = vec![0f64; sums.len() * 3];
    group.all_gather(&sums, &mut all)?;
    assert_eq!(all[..sums.len()], all[sums.len()..2 * sums.len()], "equal on all ranks, running means too");
    assert_eq!(all[..sums.len()], all[2 * sums.len()..]);
    Ok(())
}

ranks_test!(synchronised_norms_work_while_others_have_run_out, 3, { with_norms(1)? });
ranks_test!(synchronised_norms_of_micro_batches_work_while_others_have_run_out, 3, { with_norms(2)? });
