//! Reduction in the optimizer's step, against one process with all samples.

use anyhow::Result;
use drumline_comm::ProcessGroup;
use drumline_parallel::{DistributedOptimizer, Divide, broadcast_optimizer_state};
use drumline_torch::{Optimizer, Sgd, SgdOptions, grad, parameters};
use rank_test::ranks_test;
use tch::nn::{Module, VarStore};
use tch::{Device, Reduction, Tensor};

use super::net::{Net, assert_close, samples, values};

const OPTIONS: SgdOptions = SgdOptions {
    lr: 0.1,
    momentum: 0.9,
    dampening: 0.0,
    nesterov: false,
    weight_decay: 0.0,
    maximize: false,
};
const STEPS: i64 = 4;

/// The micro-batches of a rank in a step: their number and sizes differ between ranks; the last rank has none in step
/// 2.
fn micro_batches(rank: usize, world: usize, step: i64) -> Vec<(Tensor, Tensor)> {
    if rank + 1 == world && step == 2 && world > 1 {
        return Vec::new();
    }
    let start = |index: i64| step * 1000 + rank as i64 * 100 + index * 10;
    (0..=rank as i64).map(|index| samples(start(index)..start(index) + 2 + index + step)).collect()
}

fn sum_of_losses(net: &Net, (x, y): &(Tensor, Tensor)) -> Tensor {
    net.forward(x).mse_loss(y, Reduction::Sum)
}

fn alone(world: usize) -> Result<Vec<Tensor>> {
    let vs = VarStore::new(Device::Cpu);
    let net = Net::new(&vs, 0);
    let mut optimizer = Sgd::new(parameters(&vs), OPTIONS)?;
    for step in 0..STEPS {
        let all: Vec<_> = (0..world).flat_map(|rank| micro_batches(rank, world, step)).collect();
        let count: i64 = all.iter().map(|(x, _)| x.size()[0]).sum();
        for batch in &all {
            (sum_of_losses(&net, batch) / count as f64).backward();
        }
        optimizer.step()?;
        optimizer.zero_grad()?;
    }
    Ok(values(&parameters(&vs)))
}

fn count_decides() -> Result<()> {
    let group = ProcessGroup::from_env()?;
    let vs = VarStore::new(Device::Cpu);
    let net = Net::new(&vs, group.rank() as i64 * 10);
    let mut optimizer = DistributedOptimizer::new(Sgd::new(parameters(&vs), OPTIONS)?, &group)?;
    for step in 0..STEPS {
        let mine = micro_batches(group.rank(), group.size(), step);
        mine.iter().for_each(|batch| sum_of_losses(&net, batch).backward());
        let count: i64 = mine.iter().map(|(x, _)| x.size()[0]).sum();
        optimizer.step(Divide::Count(count as f64))?;
        assert!(grad(&net.extra.ws)?.is_none(), "nobody uses it");
        optimizer.zero_grad()?;
    }
    assert_close(&values(&parameters(&vs)), &alone(group.size())?, 2e-6);
    Ok(())
}

ranks_test!(uneven_micro_batches_give_the_mean_over_all_samples, 3, { count_decides()? });
ranks_test!(one_rank_is_no_special_case, 1, { count_decides()? });

ranks_test!(divided_by_ranks_it_is_the_mean_of_means, 2, {
    let group = ProcessGroup::from_env()?;
    let vs = VarStore::new(Device::Cpu);
    let net = Net::new(&vs, 0);
    let mut optimizer = DistributedOptimizer::new(Sgd::new(parameters(&vs), OPTIONS)?, &group)?;
    let rank = group.rank() as i64;
    let (x, y) = samples(rank * 8..rank * 8 + 8);
    net.forward(&x).mse_loss(&y, Reduction::Mean).backward();
    optimizer.reduce(Divide::Ranks)?;
    let lone = VarStore::new(Device::Cpu);
    let reference = Net::new(&lone, 0);
    let (x, y) = samples(0..16);
    reference.forward(&x).mse_loss(&y, Reduction::Mean).backward();
    assert_close(&[parameters(&vs)[0].tensor.grad()], &[parameters(&lone)[0].tensor.grad()], 1e-6);
    optimizer.inner().step()?;
});

ranks_test!(no_samples_anywhere_is_an_error_on_all, 2, {
    let group = ProcessGroup::from_env()?;
    let vs = VarStore::new(Device::Cpu);
    let _net = Net::new(&vs, 0);
    let mut optimizer = DistributedOptimizer::new(Sgd::new(parameters(&vs), OPTIONS)?, &group)?;
    let error = optimizer.step(Divide::Count(0.0)).unwrap_err().to_string();
    assert!(error.contains("the count of all ranks is 0; expected a positive number"), "{error}");
    optimizer.step(Divide::Ranks)?; // control: the group can still be used
});

ranks_test!(the_state_of_one_rank_becomes_everybodys, 2, {
    let group = ProcessGroup::from_env()?;
    let vs = VarStore::new(Device::Cpu);
    let net = Net::new(&vs, 0);
    let mut optimizer = Sgd::new(parameters(&vs), OPTIONS)?;
    if group.rank() == 1 {
        let (x, y) = samples(0..4);
        net.forward(&x).mse_loss(&y, Reduction::Mean).backward();
        optimizer.step()?;
        optimizer.set_lr(0.03);
    }
    broadcast_optimizer_state(&mut optimizer, &group, 1)?;
    assert_eq!(optimizer.lr(), 0.03);
    let kept = optimizer.state();
    assert_eq!(kept.tensors.len(), 4, "{:?}", kept.tensors.iter().map(|n| &n.name).collect::<Vec<_>>());
    let sums: Vec<f64> =
        kept.tensors.iter().map(|n| n.tensor.abs().sum(tch::Kind::Double).double_value(&[])).collect();
    let mut all = vec![0f64; 8];
    group.all_gather(&sums, &mut all)?;
    assert_eq!(all[..4], all[4..]);
});
