//! Training on a GPU, by ranks that share it and by one alone over NCCL, against one process on the CPU.

use anyhow::Result;
use drumline_comm::ProcessGroup;
use drumline_parallel::{
    Compressed, Ddp, DdpOptions, DistributedOptimizer, Divide, DivideBy, PeriodicAverager, PowerSgd,
    PowerSgdOptions, UnevenTurn, broadcast_optimizer_state,
};
use drumline_torch::{Optimizer, Sgd, SgdOptions, parameters, set_grad};
use rank_test::ranks_test;
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};

use super::net::{Net, alone, assert_close, descend, loss, replica, samples, values};
use super::{GPU, join};

const STEPS: i64 = 6;
const BATCH: i64 = 24;

/// This rank's part of a step's batch, on the GPU.
fn part(group: &ProcessGroup, step: i64) -> (Tensor, Tensor) {
    let each = BATCH / group.size() as i64;
    let start = step * BATCH + group.rank() as i64 * each;
    let (x, y) = samples(start..start + each);
    (x.to_device(GPU), y.to_device(GPU))
}

fn reference() -> Result<Vec<Tensor>> {
    alone(STEPS, |step| samples(step * BATCH..(step + 1) * BATCH))
}

fn on_host(vs: &VarStore) -> Vec<Tensor> {
    values(&parameters(vs)).iter().map(|tensor| tensor.to_device(Device::Cpu)).collect()
}

fn train(group: &ProcessGroup, ddp: &Ddp<Net>, vs: &VarStore) -> Result<()> {
    for step in 0..STEPS {
        let (x, y) = part(group, step);
        ddp.backward(&loss(&ddp.forward(&x)?, &y))?;
        descend(&parameters(vs))?;
    }
    assert_close(&on_host(vs), &reference()?, 1e-5);
    Ok(())
}

fn replicas_equal_one_process() -> Result<()> {
    let group = join()?;
    let vs = VarStore::new(GPU);
    train(&group, &replica(&group, &vs)?, &vs)
}

on_each_route!(replicas_on_one_gpu_equal_one_process, { replicas_equal_one_process()? });

ranks_test!(a_replica_alone_over_nccl_equals_one_process, 1, timeout = super::BRIEF, {
    let group = join()?;
    let vs = VarStore::new(GPU);
    let options =
        DdpOptions { bucket_cap: 200, first_bucket: 64, reduces_alone: true, ..DdpOptions::default() };
    let ddp = Ddp::new(Net::new(&vs, 0), &vs, &group, options)?;
    assert!(ddp.bucket_bytes().len() > 1);
    train(&group, &ddp, &vs)?;
    assert_eq!(ddp.is_recordable(), Ok(()));
});

ranks_test!(micro_batches_without_sync_equal_one_big_batch, 2, {
    let group = join()?;
    let vs = VarStore::new(GPU);
    let ddp = replica(&group, &vs)?;
    for step in 0..STEPS {
        let (x, y) = part(&group, step);
        let micro = |index: i64| -> Result<Tensor> {
            let (x, y) = (x.narrow(0, index * 4, 4), y.narrow(0, index * 4, 4));
            Ok(loss(&ddp.forward(&x)?, &y) / 3)
        };
        ddp.no_sync(|| (0..2).try_for_each(|index| anyhow::Ok(ddp.backward(&micro(index)?)?)))?;
        ddp.backward(&micro(2)?)?;
        descend(&parameters(&vs))?;
    }
    assert_close(&on_host(&vs), &reference()?, 1e-5);
    let reason = ddp.is_recordable().unwrap_err().to_string();
    assert!(reason.contains("share the GPU"), "{reason}");
});

fn with_uneven_input() -> Result<()> {
    let group = join()?;
    let vs = VarStore::new(GPU);
    let ddp = replica(&group, &vs)?;
    let batches = (0..2 + group.rank() as i64 * 3).map(|step| part(&group, step));
    let mut turns = 0;
    for turn in ddp.uneven(batches, DivideBy::RanksWithData) {
        match turn? {
            UnevenTurn::Batch((x, y)) => ddp.backward(&loss(&ddp.forward(&x)?, &y))?,
            UnevenTurn::Empty => ddp.backward_nothing()?,
        }
        descend(&parameters(&vs))?;
        turns += 1;
    }
    assert_eq!(turns, 2 + 3 * (group.size() - 1));
    same_on_all(&group, &vs)
}

on_each_route!(ranks_that_run_out_of_data_take_part_with_nothing, { with_uneven_input()? });

/// Compares bit for bit.
fn same_on_all(group: &ProcessGroup, vs: &VarStore) -> Result<()> {
    for tensor in on_host(vs) {
        let mine: Vec<f32> = tensor.view([-1]).try_into()?;
        let mut all = vec![0f32; mine.len() * group.size()];
        group.all_gather(&mine, &mut all)?;
        assert!(all.chunks(mine.len()).all(|theirs| theirs == mine));
    }
    Ok(())
}

ranks_test!(parameters_that_only_one_rank_uses_get_its_gradient_on_both, 2, {
    let group = join()?;
    let vs = VarStore::new(GPU);
    let ddp = replica(&group, &vs)?;
    for step in 0..STEPS {
        let (x, y) = part(&group, step);
        let output = ddp.forward_with(|net| {
            let output = tch::nn::Module::forward(net, &x);
            if group.rank() == 1 { tch::nn::Module::forward(&net.extra, &output) } else { output }
        })?;
        ddp.backward(&loss(&output, &y))?;
        descend(&parameters(&vs))?;
    }
    same_on_all(&group, &vs)?;
});

ranks_test!(compressed_buckets_and_averaged_parameters_lie_on_the_gpu_too, 2, {
    let group = join()?;
    let vs = VarStore::new(GPU);
    let options = DdpOptions { hook: Box::new(Compressed::bf16()), ..DdpOptions::default() };
    let ddp = Ddp::new(Net::new(&vs, group.rank() as i64), &vs, &group, options)?;
    for step in 0..STEPS {
        let (x, y) = part(&group, step);
        ddp.backward(&loss(&ddp.forward(&x)?, &y))?;
        descend(&parameters(&vs))?;
    }
    assert_close(&on_host(&vs), &reference()?, 2e-2);
    let mut averager = PeriodicAverager::new(&group, parameters(&vs), 1)?;
    assert!(averager.after_step()?);
    same_on_all(&group, &vs)?;
});

ranks_test!(low_rank_gradients_are_the_same_on_all, 2, {
    let group = join()?;
    let vs = VarStore::new(GPU);
    let power = PowerSgdOptions { start_power_sgd_iter: 2, min_compression_rate: 0.0, ..Default::default() };
    let options = DdpOptions { hook: Box::new(PowerSgd::new(power)?), ..DdpOptions::default() };
    let ddp = Ddp::new(Net::new(&vs, group.rank() as i64), &vs, &group, options)?;
    for step in 0..STEPS {
        let (x, y) = part(&group, step);
        ddp.backward(&loss(&ddp.forward(&x)?, &y))?;
        descend(&parameters(&vs))?;
    }
    same_on_all(&group, &vs)?;
    assert!(ddp.is_recordable().unwrap_err() == drumline_parallel::NotRecordable::Hook);
});

ranks_test!(an_optimizer_that_reduces_works_on_the_gpu, 2, {
    let group = join()?;
    let vs = VarStore::new(GPU);
    let net = Net::new(&vs, group.rank() as i64);
    let sgd = Sgd::new(parameters(&vs), SgdOptions { lr: 0.1, ..SgdOptions::default() })?;
    let mut optimizer = DistributedOptimizer::new(sgd, &group)?;
    for step in 0..STEPS {
        let (x, y) = part(&group, step);
        loss(&tch::nn::Module::forward(&net, &x), &y).backward();
        optimizer.step(Divide::Ranks)?;
        optimizer.zero_grad()?;
    }
    assert_close(&on_host(&vs), &reference()?, 1e-5);
});

ranks_test!(the_state_of_an_optimizer_goes_from_gpu_to_gpu, 2, {
    let group = join()?;
    let vs = VarStore::new(GPU);
    let _net = Net::new(&vs, 0);
    let options = SgdOptions { lr: 0.1, momentum: 0.9, ..SgdOptions::default() };
    let mut optimizer = Sgd::new(parameters(&vs), options)?;
    if group.rank() == 1 {
        for (place, named) in parameters(&vs).iter().enumerate() {
            set_grad(
                &named.tensor,
                Some(&named.tensor.ones_like().detach().f_mul_scalar(place as f64 + 1.0)?),
            )?;
        }
        optimizer.step()?;
    }
    broadcast_optimizer_state(&mut optimizer, &group, 1)?;
    let state = optimizer.state();
    assert!(!state.tensors.is_empty());
    for (place, named) in state.tensors.iter().enumerate() {
        assert_eq!(named.tensor.device(), GPU);
        assert_eq!(named.tensor.mean(Kind::Double).double_value(&[]), place as f64 + 1.0, "{}", named.name);
    }
});
