//! Synchronised norms whose statistics stay on the GPU, against ordinary norms of one process over the whole batch.

use anyhow::Result;
use drumline_comm::ProcessGroup;
use drumline_parallel::{Ddp, DdpOptions, DivideBy, SyncBatchNorm, SyncGroup, UnevenTurn};
use drumline_torch::{Named, buffers, parameters};
use rank_test::ranks_test;
use tch::nn::{BatchNormConfig, ModuleT, VarStore, batch_norm1d, linear, seq_t};
use tch::{Device, Kind, Tensor, no_grad};

use super::net::{assert_close, descend, loss, samples};
use super::{GPU, join};

const STEPS: i64 = 4;
const BATCH: i64 = 24;

/// Sets parameters by a formula.
fn fill(vs: &VarStore) {
    for (place, named) in parameters(vs).iter().enumerate() {
        let numel = named.tensor.numel() as i64;
        let values = (Tensor::arange(numel, (Kind::Float, Device::Cpu)) * 0.7 + place as f64).sin() * 0.5;
        no_grad(|| named.tensor.shallow_clone().copy_(&values.view_as(&named.tensor)));
    }
}

fn normed(vs: &VarStore, sync: Option<&SyncGroup>) -> impl ModuleT + use<> {
    let (a, b) = (
        linear(vs.root() / "a", 6, 4, Default::default()),
        linear(vs.root() / "b", 4, 3, Default::default()),
    );
    let (path, config) = (vs.root() / "n", BatchNormConfig::default());
    let net = match sync {
        Some(sync) => seq_t().add(a).add(SyncBatchNorm::new(path, 4, config, sync)),
        None => seq_t().add(a).add(batch_norm1d(path, 4, config)),
    };
    fill(vs);
    net.add_fn(|x| x.tanh()).add(b)
}

fn tensors(vs: &VarStore) -> Vec<Tensor> {
    let tensor = |named: Named| named.tensor.detach().to_device(Device::Cpu);
    parameters(vs).into_iter().chain(buffers(vs)).map(tensor).collect()
}

fn whole_batches() -> Result<Vec<Tensor>> {
    let vs = VarStore::new(Device::Cpu);
    let net = normed(&vs, None);
    for step in 0..STEPS {
        let (x, y) = samples(step * BATCH..(step + 1) * BATCH);
        loss(&net.forward_t(&x, true), &y).backward();
        descend(&parameters(&vs))?;
    }
    Ok(tensors(&vs))
}

fn replica(group: &ProcessGroup, vs: &VarStore) -> Result<Ddp<impl ModuleT + use<>>> {
    let sync = SyncGroup::new(group)?;
    let net = normed(vs, Some(&sync));
    Ok(Ddp::new(net, vs, group, DdpOptions { sync_group: Some(sync), ..DdpOptions::default() })?)
}

fn norms_equal_one_process() -> Result<()> {
    let group = join()?;
    let vs = VarStore::new(GPU);
    let ddp = replica(&group, &vs)?;
    let each = BATCH / group.size() as i64;
    for step in 0..STEPS {
        let start = step * BATCH + group.rank() as i64 * each;
        let (x, y) = samples(start..start + each);
        ddp.backward(&loss(&ddp.forward(&x.to_device(GPU))?, &y.to_device(GPU)))?;
        descend(&parameters(&vs))?;
    }
    assert_close(&tensors(&vs), &whole_batches()?, 2e-5);
    Ok(())
}

on_each_route!(norms_equal_those_of_one_process, { norms_equal_one_process()? });

ranks_test!(a_rank_without_data_shadows_norms_on_the_gpu, 2, {
    let group = join()?;
    let vs = VarStore::new(GPU);
    let ddp = replica(&group, &vs)?;
    let batch = |step: i64| samples(step * 8..step * 8 + 8);
    let mut turns = 0;
    for turn in ddp.uneven((0..2 + 2 * group.rank() as i64).map(batch), DivideBy::RanksWithData) {
        match turn? {
            UnevenTurn::Batch((x, y)) => {
                ddp.backward(&loss(&ddp.forward(&x.to_device(GPU))?, &y.to_device(GPU)))?;
            }
            UnevenTurn::Empty => ddp.backward_nothing()?,
        }
        descend(&parameters(&vs))?;
        turns += 1;
    }
    assert_eq!(turns, 4);
    for tensor in parameters(&vs) {
        let mine: Vec<f32> = tensor.tensor.detach().view([-1]).try_into()?;
        let mut all = vec![0f32; mine.len() * 2];
        group.all_gather(&mine, &mut all)?;
        assert!(all.chunks(mine.len()).all(|theirs| theirs == mine), "{}", tensor.name);
    }
});
