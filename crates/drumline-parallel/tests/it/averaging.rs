//! Averaging of parameters: after which steps and over which ranks, and a training with post-local SGD.

use anyhow::Result;
use drumline_comm::{LocalGroup, ProcessGroup};
use drumline_parallel::{AveragingLevel, HierarchicalAverager, PeriodicAverager, PostLocalSgd, subgroup};
use drumline_torch::{Named, parameters};
use rank_test::ranks_test;
use tch::nn::{Module, VarStore};
use tch::{Device, Kind, Tensor};

use super::hooks::{part, replica_with};
use super::net::{Net, assert_close, descend, loss, samples, values};

/// Parameters of several kinds and sizes, one of them transposed, all filled with `value`.
fn filled(value: f64) -> Vec<Named> {
    let float = (Kind::Float, Device::Cpu);
    let tensors = [
        Tensor::full([3, 4], value, float),
        Tensor::full([2, 5], value, float).tr(),
        Tensor::full([7], value, (Kind::Double, Device::Cpu)),
        Tensor::full([1], value, float),
    ];
    let named = |(index, tensor): (usize, Tensor)| Named {
        name: index.to_string(),
        tensor: tensor.set_requires_grad(true),
    };
    tensors.into_iter().enumerate().map(named).collect()
}

/// The value of all elements of all parameters, which must be equal.
fn value(parameters: &[Named]) -> f64 {
    let of = |named: &Named| (named.tensor.min().double_value(&[]), named.tensor.max().double_value(&[]));
    let first = of(&parameters[0]).0;
    assert!(parameters.iter().all(|named| of(named) == (first, first)), "{parameters:?}");
    first
}

fn add(parameters: &[Named], more: f64) {
    tch::no_grad(|| {
        parameters.iter().for_each(|named| drop(named.tensor.shallow_clone().g_add_scalar_(more)))
    });
}

ranks_test!(periodic_model_averager, 4, {
    let group = ProcessGroup::from_env()?;
    let rank = group.rank() as f64;
    let params = filled(rank);
    let mut averager = PeriodicAverager::new(&group, params.clone(), 4)?.with_warmup_steps(3);
    for step in 0..20 {
        add(&params, rank - value(&params));
        let is_due = averager.after_step()?;
        assert_eq!(is_due, step >= 3 && (step - 3) % 4 == 0, "step {step}");
        assert_eq!(value(&params), if is_due { 1.5 } else { rank });
    }
    let error = PeriodicAverager::new(&group, Vec::new(), 0).unwrap_err().to_string();
    assert!(error.contains("the averaging period is 0"), "{error}");
});

ranks_test!(periodic_model_averager_step_reload, 2, {
    let group = ProcessGroup::from_env()?;
    let make = || -> Result<_> { Ok(PeriodicAverager::new(&group, filled(group.rank() as f64), 3)?) };
    let (mut before, mut after) = (make()?, make()?);
    for _ in 0..5 {
        before.after_step()?;
    }
    after.set_step(before.step());
    let due = |averager: &mut PeriodicAverager| -> Result<Vec<bool>> {
        (0..4).map(|_| Ok(averager.after_step()?)).collect()
    };
    assert_eq!(due(&mut after)?, [false, true, false, false]);
    assert_eq!(due(&mut before)?, [false, true, false, false]);
});

ranks_test!(one_level_hierarchical_model_averager_equals_periodic, 2, {
    let group = ProcessGroup::from_env()?;
    let (a, b) = (filled(group.rank() as f64), filled(group.rank() as f64));
    let mut periodic = PeriodicAverager::new(&group, a.clone(), 4)?.with_warmup_steps(8);
    let levels = [AveragingLevel { period: 4, group_size: 2 }];
    let mut hierarchical = HierarchicalAverager::new(&group, b.clone(), &levels)?.with_warmup_steps(8);
    for _ in 0..20 {
        assert_eq!(periodic.after_step()?, hierarchical.after_step()?.is_some());
        assert_eq!(value(&a), value(&b));
        add(&a, group.rank() as f64);
        add(&b, group.rank() as f64);
    }
});

#[test]
fn three_level_hierarchical_model_averager() {
    let level = |period, group_size| AveragingLevel { period, group_size };
    LocalGroup::run(8, |group| {
        let levels = [level(2, 2), level(4, 4), level(8, 8)];
        let params = filled(0.0);
        let mut averager =
            HierarchicalAverager::new(&group, params.clone(), &levels).unwrap().with_warmup_steps(3);
        for step in 0..17 {
            let rank = group.rank() as f64;
            add(&params, rank - value(&params));
            let size = averager.after_step().unwrap();
            let expected = match step {
                0..=2 => None,
                _ if step % 8 == 0 => Some(8),
                _ if step % 4 == 0 => Some(4),
                _ if step % 2 == 0 => Some(2),
                _ => None,
            };
            assert_eq!(size, expected, "step {step}");
            let mean = |size: usize| (group.rank() / size * size) as f64 + (size as f64 - 1.0) / 2.0;
            assert_eq!(value(&params), size.map_or(rank, mean));
        }
        Ok(())
    })
    .unwrap();
}

const STEPS: i64 = 9;
const START: i64 = 3;

/// One process that simulates both pairs of ranks: the mean gradient of all until `START`, then that of each pair.
fn two_pairs(is_due: impl Fn(i64) -> bool) -> Result<Vec<Vec<Tensor>>> {
    let stores = [VarStore::new(Device::Cpu), VarStore::new(Device::Cpu)];
    let nets = [Net::new(&stores[0], 0), Net::new(&stores[1], 0)];
    for step in 0..STEPS {
        for (pair, net) in nets.iter().enumerate() {
            let start = step * 24 + if step < START { 0 } else { pair as i64 * 12 };
            let (x, y) = samples(start..start + if step < START { 24 } else { 12 });
            loss(&net.forward(&x), &y).backward();
            descend(&parameters(&stores[pair]))?;
        }
        if is_due(step) {
            for (a, b) in parameters(&stores[0]).iter().zip(parameters(&stores[1])) {
                let mean = tch::no_grad(|| (&a.tensor + &b.tensor) / 2.0);
                tch::no_grad(|| [a, &b].map(|named| named.tensor.shallow_clone().copy_(&mean)));
            }
        }
    }
    Ok(stores.iter().map(|vs| values(&parameters(vs))).collect())
}

ranks_test!(post_local_sgd_parity, 4, {
    let group = ProcessGroup::from_env()?;
    let vs = VarStore::new(Device::Cpu);
    let ddp = replica_with(&group, &vs, PostLocalSgd::new(START as u64, subgroup(&group, 2)?))?;
    let mut averager = PeriodicAverager::new(&group, parameters(&vs), 4)?.with_warmup_steps(START as u64);
    for step in 0..STEPS {
        let (x, y) = part(&group, step);
        ddp.backward(&loss(&ddp.forward(&x)?, &y))?;
        descend(&parameters(&vs))?;
        averager.after_step()?;
    }
    let reference = two_pairs(|step| step >= START && (step - START) % 4 == 0)?;
    assert_close(&values(&parameters(&vs)), &reference[group.rank() / 2], 1e-6);
    let apart = f64::try_from((&reference[0][0] - &reference[1][0]).abs().max())?;
    assert!(apart > 1e-4, "control: the pairs have gone their own ways since, by {apart}");
});

ranks_test!(post_local_sgd_parity_with_hierarchical_averager, 4, {
    let group = ProcessGroup::from_env()?;
    let vs = VarStore::new(Device::Cpu);
    // Gradients are not reduced after the start. Pairs average after each step instead, which is the same for plain
    // descent.
    let ddp = replica_with(&group, &vs, PostLocalSgd::alone(START as u64))?;
    let levels = [AveragingLevel { period: 1, group_size: 2 }, AveragingLevel { period: 4, group_size: 4 }];
    let mut averager =
        HierarchicalAverager::new(&group, parameters(&vs), &levels)?.with_warmup_steps(START as u64);
    for step in 0..STEPS {
        let (x, y) = part(&group, step);
        ddp.backward(&loss(&ddp.forward(&x)?, &y))?;
        descend(&parameters(&vs))?;
        averager.after_step()?;
    }
    let reference = two_pairs(|step| step >= START && step % 4 == 0)?;
    assert_close(&values(&parameters(&vs)), &reference[group.rank() / 2], 1e-6);
});
