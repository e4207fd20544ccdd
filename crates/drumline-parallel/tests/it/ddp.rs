//! With Ddp each rank has the gradients that one process has with all ranks' batches.

use anyhow::Result;
use drumline_comm::{Mesh, ProcessGroup, ReduceOp};
use drumline_parallel::{Ddp, DdpOptions, Engine, EngineOptions, EngineSetup, GradSync};
use drumline_torch::{Named, grad, parameters, set_grad};
use rank_test::ranks_test;
use tch::nn::{self, Module, ModuleT, VarStore};
use tch::{Device, Kind, Tensor};

use super::net::{Net, alone, assert_close, descend, loss, replica, samples, values};

const STEPS: i64 = 5;
const BATCH: i64 = 24;

/// This rank's part of a step's batch.
fn part(group: &ProcessGroup, step: i64) -> (Tensor, Tensor) {
    let (rank, each) = (group.rank() as i64, BATCH / group.size() as i64);
    let start = step * BATCH + rank * each;
    samples(start..start + each)
}

fn train_equals_one_process() -> Result<()> {
    let group = ProcessGroup::from_env()?;
    let vs = VarStore::new(Device::Cpu);
    let ddp = replica(&group, &vs)?;
    for step in 0..STEPS {
        let (x, y) = part(&group, step);
        ddp.backward(&loss(&ddp.forward(&x)?, &y))?;
        descend(&parameters(&vs))?;
    }
    let reference = alone(STEPS, |step| samples(step * BATCH..(step + 1) * BATCH))?;
    assert_close(&values(&parameters(&vs)), &reference, 1e-6);
    same_on_all_ranks(&group, &values(&parameters(&vs)))
}

/// Compares bit for bit.
fn same_on_all_ranks(group: &ProcessGroup, tensors: &[Tensor]) -> Result<()> {
    for tensor in tensors {
        let mine: Vec<f32> = tensor.flatten(0, -1).try_into()?;
        let mut all = vec![0f32; mine.len() * group.size()];
        group.all_gather(&mine, &mut all)?;
        for theirs in all.chunks(mine.len().max(1)) {
            assert!(theirs.iter().zip(&mine).all(|(a, b)| a.to_bits() == b.to_bits()));
        }
    }
    Ok(())
}

ranks_test!(one_rank_equals_one_process, 1, { train_equals_one_process()? });
ranks_test!(two_ranks_equal_one_process, 2, { train_equals_one_process()? });
ranks_test!(four_ranks_equal_one_process, 4, { train_equals_one_process()? });
ranks_test!(three_ranks_over_tcp_equal_one_process, 3, env = [("DRUMLINE_TRANSPORT", "tcp")], {
    train_equals_one_process()?
});

ranks_test!(micro_batches_without_sync_equal_one_big_batch, 2, {
    let group = ProcessGroup::from_env()?;
    let vs = VarStore::new(Device::Cpu);
    let ddp = replica(&group, &vs)?;
    let params = parameters(&vs);
    for step in 0..STEPS {
        let (x, y) = part(&group, step);
        let micro = |index: i64| -> Result<Tensor> {
            let (x, y) = (x.narrow(0, index * 4, 4), y.narrow(0, index * 4, 4));
            Ok(loss(&ddp.forward(&x)?, &y) / 3)
        };
        ddp.no_sync(|| -> Result<()> {
            for index in 0..2 {
                ddp.backward(&micro(index)?)?;
            }
            Ok(())
        })?;
        let before = grad(&params[0].tensor)?.unwrap();
        let mut sum = [f64::try_from(before.sum(Kind::Double))? as f32];
        let mine = sum[0];
        group.all_reduce(&mut sum, ReduceOp::Avg)?;
        assert!((sum[0] - mine).abs() > 1e-6, "without sync every rank has gradients of its own");
        ddp.backward(&micro(2)?)?;
        descend(&params)?;
    }
    let reference = alone(STEPS, |step| samples(step * BATCH..(step + 1) * BATCH))?;
    assert_close(&values(&params), &reference, 1e-6);
});

ranks_test!(gradients_that_were_not_zeroed_add_up, 2, {
    let group = ProcessGroup::from_env()?;
    let vs = VarStore::new(Device::Cpu);
    let ddp = replica(&group, &vs)?;
    let params = parameters(&vs);
    // Includes the step in which the order of buckets changes.
    for step in 0..3 {
        let (x, y) = part(&group, step);
        ddp.backward(&loss(&ddp.forward(&x)?, &y))?;
    }
    let lone = VarStore::new(Device::Cpu);
    let net = Net::new(&lone, 0);
    for step in 0..3 {
        let (x, y) = samples(step * BATCH..(step + 1) * BATCH);
        loss(&net.forward(&x), &y).backward();
    }
    // No rank uses `extra`, so it has no gradient.
    for (ours, theirs) in params.iter().zip(parameters(&lone)).take(4) {
        assert_close(&[ours.tensor.grad()], &[theirs.tensor.grad()], 1e-6);
    }
});

ranks_test!(gradients_lie_in_the_buckets_and_nowhere_else, 2, {
    let group = ProcessGroup::from_env()?;
    let vs = VarStore::new(Device::Cpu);
    let ddp = replica(&group, &vs)?;
    let params = parameters(&vs);
    let (x, y) = part(&group, 0);
    let addresses = |params: &[Named]| -> Vec<usize> {
        params[..4].iter().map(|named| named.tensor.grad().data_ptr() as usize).collect()
    };
    let mut seen = Vec::new();
    for _ in 0..4 {
        ddp.backward(&loss(&ddp.forward(&x)?, &y))?;
        seen.push(addresses(&params));
        params.iter().try_for_each(|named| set_grad(&named.tensor, None))?;
    }
    assert_eq!(seen[1..3], seen[2..4], "the same memory in every step, once the order is agreed");
    let spread = seen[3].iter().max().unwrap() - seen[3].iter().min().unwrap();
    let total: usize = ddp.bucket_bytes().iter().sum();
    assert!(spread < total, "{spread} of {total}");
});

/// Uses `extra` only where `wanted`.
fn with_extra(ddp: &Ddp<Net>, x: &Tensor, wanted: bool) -> Result<Tensor> {
    let output = ddp.forward(x)?;
    Ok(if wanted { ddp.module().extra.forward(&output) } else { output })
}

ranks_test!(parameters_that_only_some_ranks_use, 2, {
    let group = ProcessGroup::from_env()?;
    let vs = VarStore::new(Device::Cpu);
    let ddp = replica(&group, &vs)?;
    let params = parameters(&vs);
    for step in 0..STEPS {
        let (x, y) = part(&group, step);
        let wanted = step % 2 == 1 && group.rank() == 1;
        ddp.backward(&loss(&with_extra(&ddp, &x, wanted)?, &y))?;
        let extra = grad(&params[4].tensor)?;
        assert_eq!(
            extra.is_some(),
            step % 2 == 1,
            "step {step}: nobody's is none, one rank's is everybody's"
        );
        if let Some(extra) = extra {
            assert!(f64::try_from(extra.abs().sum(Kind::Double))? > 0.0);
        }
        descend(&params)?;
    }
    same_on_all_ranks(&group, &values(&params))?;
    let first = Net::new(&VarStore::new(Device::Cpu), 0);
    let moved = (&params[4].tensor - &first.extra.ws).abs().max();
    assert!(f64::try_from(moved)? > 1e-4, "control: it was trained");
});

ranks_test!(a_weight_used_twice_counts_twice, 2, {
    let group = ProcessGroup::from_env()?;
    let vs = VarStore::new(Device::Cpu);
    let layer = nn::linear(vs.root(), 3, 3, Default::default());
    let ddp = Ddp::new(layer, &vs, &group, DdpOptions::default())?;
    let x = Tensor::ones([2, 3], (Kind::Float, Device::Cpu)) * (group.rank() as f64 + 1.0);
    let twice = ddp.module().forward(&ddp.module().forward(&x));
    ddp.backward(&twice.sum(Kind::Float))?;
    let lone = |factor: f64| {
        let ws = ddp.module().ws.detach().set_requires_grad(true);
        let bs = ddp.module().bs.as_ref().unwrap().detach();
        let x = Tensor::ones([2, 3], (Kind::Float, Device::Cpu)) * factor;
        x.linear(&ws, Some(&bs)).linear(&ws, Some(&bs)).sum(Kind::Float).backward();
        ws.grad()
    };
    assert_close(&[ddp.module().ws.grad()], &[(lone(1.0) + lone(2.0)) / 2], 1e-5);
});

ranks_test!(buffers_are_rank_zeros_at_each_forward, 2, {
    let group = ProcessGroup::from_env()?;
    let vs = VarStore::new(Device::Cpu);
    let norm = nn::batch_norm1d(vs.root(), 3, Default::default());
    let ddp = Ddp::new(norm, &vs, &group, DdpOptions::default())?;
    let lone = VarStore::new(Device::Cpu);
    let reference = nn::batch_norm1d(lone.root(), 3, Default::default());
    let x =
        |rank: usize, step: i64| samples(step * 7 + rank as i64 * 100..step * 7 + rank as i64 * 100 + 7).1;
    for step in 0..3 {
        let _ = ddp.forward(&x(group.rank(), step))?;
        let _ = reference.forward_t(&x(0, step), true);
    }
    ddp.sync_buffers()?;
    let mean = |vs: &VarStore| vs.variables()["running_mean"].detach().copy();
    assert_close(&[mean(&vs)], &[mean(&lone)], 0.0);
    let other = VarStore::new(Device::Cpu);
    let _ = nn::batch_norm1d(other.root(), 3, Default::default()).forward_t(&x(1, 0), true);
    assert!(f64::try_from((mean(&vs) - mean(&other)).abs().max())? > 1e-4, "control: ranks see other data");
});

ranks_test!(what_is_ignored_stays_a_ranks_own, 2, {
    let group = ProcessGroup::from_env()?;
    let vs = VarStore::new(Device::Cpu);
    let net = Net::new(&vs, group.rank() as i64 * 10);
    let before = values(&parameters(&vs));
    let options = DdpOptions { ignored: vec!["extra.weight".into()], ..DdpOptions::default() };
    let ddp = Ddp::new(net, &vs, &group, options)?;
    let place = parameters(&vs).iter().position(|named| named.name == "extra.weight").unwrap();
    assert_close(&[parameters(&vs)[place].tensor.detach()], &[before[place].shallow_clone()], 0.0);
    let (x, y) = part(&group, 0);
    ddp.backward(&loss(&with_extra(&ddp, &x, true)?, &y))?;
    let own: Vec<f32> = ddp.module().extra.ws.grad().flatten(0, -1).try_into()?;
    let mut all = vec![0f32; own.len() * 2];
    group.all_gather(&own, &mut all)?;
    assert_ne!(all[..own.len()], all[own.len()..], "each has its own gradient");
    assert_eq!(ddp.parameters().len(), 5);
});

ranks_test!(halves_and_floats_in_one_model, 2, {
    let group = ProcessGroup::from_env()?;
    let vs = VarStore::new(Device::Cpu);
    let root = vs.root();
    let a = root.var("a", &[5], nn::Init::Const(1.0));
    let b = root.var("b", &[3], nn::Init::Const(1.0));
    let mut half = b.shallow_clone();
    half.set_data(&b.to_kind(Kind::BFloat16));
    let ddp = Ddp::new((), &vs, &group, DdpOptions::default())?;
    let factor = group.rank() as f64 + 1.0;
    // From the second step on the order of the first is used, in which `a` may come before or after `b`.
    for _ in 0..3 {
        parameters(&vs).iter().try_for_each(|named| set_grad(&named.tensor, None))?;
        let (of_a, of_b) =
            ((&a * factor).sum(Kind::Float), (&b * factor).sum(Kind::BFloat16).to_kind(Kind::Float));
        ddp.backward(&(of_b.relu() * 1.0 + of_a))?;
        assert_eq!(Vec::<f32>::try_from(a.grad())?, [1.5; 5]);
        assert_eq!(b.grad().kind(), Kind::BFloat16);
        assert_eq!(Vec::<f32>::try_from(b.grad().to_kind(Kind::Float))?, [1.5; 3]);
    }
    assert_eq!(ddp.bucket_bytes().len(), 2);
});

ranks_test!(a_step_that_was_begun_shares_its_buffers_once, 2, {
    let group = ProcessGroup::from_env()?;
    let vs = VarStore::new(Device::Cpu);
    let counter = vs.root().zeros_no_train("counter", &[1]);
    let ddp = replica(&group, &vs)?;
    let (x, y) = samples(0..4);
    let backward = || ddp.backward(&loss(&ddp.forward_with(|net| net.forward(&x))?, &y));
    let set = || tch::no_grad(|| drop(counter.shallow_clone().fill_(group.rank() as f64 + 1.0)));
    for (buffers_of, expected) in [(1, 2.0), (0, 1.0)] {
        set();
        ddp.begin_step(buffers_of)?;
        // Rank 1 has more batches than rank 0, which would not join another broadcast.
        for _ in 0..group.rank() * 2 {
            let output = ddp.forward_with(|net| net.forward(&x))?;
            ddp.no_sync(|| ddp.backward(&loss(&output, &y)))?;
        }
        if group.rank() == 1 {
            backward()?
        } else {
            ddp.backward_nothing()?
        }
        assert_eq!(counter.double_value(&[0]), expected);
    }
    // Without it the buffers of rank 0 are used again.
    set();
    backward()?;
    assert_eq!(counter.double_value(&[0]), 1.0);
});

ranks_test!(a_backward_that_nobody_reduces_is_refused, 2, {
    let group = ProcessGroup::from_env()?;
    let vs = VarStore::new(Device::Cpu);
    let ddp = replica(&group, &vs)?;
    let (x, y) = part(&group, 0);
    let plain = || loss(&ddp.module().forward(&x), &y).f_backward();
    let error = plain().unwrap_err().to_string();
    assert!(error.contains("try `model.backward(&loss)`"), "{error}");
    ddp.no_sync(plain)?;
    ddp.backward(&loss(&ddp.forward(&x)?, &y))?;
    assert!(plain().is_err());
    drop(ddp);
});

ranks_test!(frozen_parameters_are_shared_once, 2, {
    let group = ProcessGroup::from_env()?;
    let vs = VarStore::new(Device::Cpu);
    let net = Net::new(&vs, group.rank() as i64);
    let frozen = &vs.variables()["first.weight"];
    let _ = frozen.set_requires_grad(false);
    let ddp = Ddp::new(net, &vs, &group, DdpOptions::default())?;
    let reference = VarStore::new(Device::Cpu);
    Net::new(&reference, 0);
    assert_close(&[frozen.shallow_clone()], &[reference.variables()["first.weight"].detach()], 0.0);
    if group.rank() == 1 {
        let _ = frozen.shallow_clone().fill_(7.0);
    }
    let (x, _) = part(&group, 0);
    let _ = ddp.forward(&x)?;
    let expected =
        if group.rank() == 1 { 7.0 } else { reference.variables()["first.weight"].double_value(&[0, 0]) };
    assert_eq!(frozen.double_value(&[0, 0]), expected, "a forward leaves it alone");
});

ranks_test!(a_rank_alone_waits_for_nobody_and_reduces_nothing, 2, {
    let group = ProcessGroup::from_env()?;
    let vs = VarStore::new(Device::Cpu);
    let net = Net::new(&vs, 0);
    let options = DdpOptions::default();
    let mesh = Mesh::new(&group, options.mesh_shape(group.size())?)?;
    let engine = Box::new(options).engine(EngineSetup::new(&vs, &mesh))?;
    let step = |engine: &dyn Engine, (x, y): &(Tensor, Tensor)| -> Result<()> {
        let output = engine.forward_with(GradSync::Reduce, || net.forward(x))?;
        Ok(engine.backward(&loss(&output, y), GradSync::Reduce)?)
    };
    let batch = part(&group, 0);
    if group.rank() == 0 {
        // A rehearsal of a CUDA graph that fails on one rank: the other one has no part in it.
        engine.alone_with(|| step(&*engine, &batch))?;
        for named in parameters(&vs) {
            set_grad(&named.tensor, None)?;
        }
    }
    step(&*engine, &batch)?;
    descend(&parameters(&vs))?;
    let reference = alone(1, |step| samples(step * BATCH..(step + 1) * BATCH))?;
    assert_close(&values(&parameters(&vs)), &reference, 1e-6);
});
