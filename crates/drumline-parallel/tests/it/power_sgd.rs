//! PowerSGD against PyTorch's, and its algebra.

use anyhow::{Context, Result};
use drumline_comm::ProcessGroup;
use drumline_parallel::{CommHook, Compressed, GradBucket, PowerSgd, PowerSgdOptions};
use drumline_torch::parameters;
use rank_test::ranks_test;
use serde_json::Value;
use tch::nn::{Module, VarStore};
use tch::{Device, Kind, Tensor};

use super::hooks::{all_ranks, part, replica_with};
use super::net::{Net, assert_close, descend, loss, samples};

/// Compression from the third step on, of every matrix that becomes smaller.
const SOON: PowerSgdOptions = PowerSgdOptions {
    matrix_approximation_rank: 1,
    start_power_sgd_iter: 2,
    min_compression_rate: 1.0,
    use_error_feedback: true,
    warm_start: true,
    orthogonalization_epsilon: 0.0,
    random_seed: 0,
};

const AT_ONCE: PowerSgdOptions =
    PowerSgdOptions { start_power_sgd_iter: 0, use_error_feedback: false, warm_start: false, ..SOON };

fn sizes() -> [Vec<i64>; 3] {
    [vec![6, 20], vec![20], vec![8, 3, 2, 2]]
}

/// The gradient that `bench/oracle/power_sgd.py` gives the same rank in the same step.
fn gradient(param: usize, rank: usize, step: usize) -> Tensor {
    let sizes = &sizes()[param];
    let index = Tensor::arange(sizes.iter().product::<i64>(), (Kind::Double, Device::Cpu));
    let place = &index * (0.7 * (1 + param) as f64) + index.square() * 0.013;
    (place + rank as f64 * 2.1 + step as f64 * 0.9).sin().to_kind(Kind::Float).view(sizes.as_slice())
}

fn give(bucket: &GradBucket, rank: usize, step: usize) {
    for (param, place) in bucket.gradients.iter().enumerate() {
        place.shallow_clone().copy_(&gradient(param, rank, step));
    }
}

fn mean(param: usize, ranks: usize, step: usize) -> Tensor {
    (0..ranks).map(|rank| gradient(param, rank, step)).sum::<Tensor>() / ranks as f64
}

fn bucket(group: &ProcessGroup) -> Result<GradBucket> {
    tch::set_num_threads(1);
    Ok(GradBucket::zeros(group, Kind::Float, &sizes())?)
}

ranks_test!(five_steps_are_pytorchs, 2, {
    let group = ProcessGroup::from_env()?;
    let bucket = bucket(&group)?;
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../bench/oracle/golden/power_sgd.json");
    let golden: Value = serde_json::from_str(&std::fs::read_to_string(path)?)?;
    let cases = golden["cases"].as_array().context("a list of cases")?;
    assert_eq!(cases.len(), 5);
    for case in cases {
        let flag = |name: &str| case[name].as_bool().unwrap_or(true);
        let mut hook = PowerSgd::new(PowerSgdOptions {
            matrix_approximation_rank: case["rank"].as_u64().context("a rank")? as usize,
            use_error_feedback: flag("use_error_feedback"),
            warm_start: flag("warm_start"),
            random_seed: case["random_seed"].as_u64().unwrap_or(0) as u32,
            ..SOON
        })?;
        for step in 0..5 {
            give(&bucket, group.rank(), step);
            hook.reduce(&bucket, &group)?;
            let theirs = match step.checked_sub(2) {
                Some(index) => serde_json::from_value::<Vec<f32>>(case["steps"][index].clone())?,
                None => (0..3)
                    .flat_map(|param| Vec::<f32>::try_from(mean(param, 2, step).flatten(0, -1)).unwrap())
                    .collect(),
            };
            assert_close(&[bucket.tensor()], &[Tensor::from_slice(&theirs)], 1e-5);
        }
    }
});

fn algebra() -> Result<()> {
    let group = ProcessGroup::from_env()?;
    let bucket = bucket(&group)?;
    for rank in [1, 2, 4] {
        let mut hook = PowerSgd::new(PowerSgdOptions { matrix_approximation_rank: rank, ..AT_ONCE })?;
        give(&bucket, group.rank(), 0);
        hook.reduce(&bucket, &group)?;
        assert_eq!(all_ranks(&group, &bucket.tensor())?.len(), 1, "the same bits on all ranks");
        assert_close(&[bucket.gradients[1].copy()], &[mean(1, group.size(), 0)], 1e-6);
        for param in [0, 2] {
            let rows = sizes()[param][0];
            let (whole, ours) =
                (mean(param, group.size(), 0).view([rows, -1]), bucket.gradients[param].view([rows, -1]));
            let values: Vec<f32> = ours.svd(true, false).1.try_into()?;
            assert!(values[rank..].iter().all(|value| *value < 1e-5 * values[0]), "rank {rank}: {values:?}");
            let left = ours.tr().mm(&(&whole - &ours)).abs().max();
            assert!(f64::try_from(left)? < 1e-4, "a projection: what is lost is orthogonal to what is kept");
            let lost = f64::try_from((&whole - &ours).norm())?;
            assert!(lost < 0.95 * f64::try_from(whole.norm())? && lost > 0.01, "rank {rank}: {lost}");
        }
    }
    Ok(())
}

ranks_test!(the_result_is_a_projection_of_the_mean_with_two_ranks, 2, { algebra()? });
ranks_test!(the_result_is_a_projection_of_the_mean_with_four_ranks, 4, { algebra()? });

ranks_test!(what_is_lost_comes_later_with_error_feedback, 2, {
    let group = ProcessGroup::from_env()?;
    let bucket = bucket(&group)?;
    // One gradient, then zeros: g = approximation + error in each step, so all steps together give the gradient.
    let missing_share = |options: PowerSgdOptions| -> Result<f64> {
        let mut hook = PowerSgd::new(options)?;
        let mut sum = Tensor::zeros([6, 20], (Kind::Float, Device::Cpu));
        for step in 0..60 {
            let _ = bucket.tensor().zero_();
            if step == 2 {
                give(&bucket, group.rank(), 0);
            }
            hook.reduce(&bucket, &group)?;
            sum += &bucket.gradients[0];
        }
        let whole = mean(0, 2, 0);
        Ok(f64::try_from((&sum - &whole).norm() / whole.norm())?)
    };
    let missing = missing_share(SOON)?;
    assert!(missing < 0.01, "{missing} of the gradient is missing");
    let control = missing_share(PowerSgdOptions { use_error_feedback: false, ..SOON })?;
    assert!(control > 0.3, "control: without feedback it is lost, {control}");
});

ranks_test!(zeros_and_what_is_no_number_leave_no_trace, 2, {
    let group = ProcessGroup::from_env()?;
    let bucket = bucket(&group)?;
    for rank in [1, 2, 6] {
        let full = PowerSgdOptions { matrix_approximation_rank: 12, min_compression_rate: 0.0, ..SOON };
        let mut hooks = [
            PowerSgd::new(PowerSgdOptions { matrix_approximation_rank: rank, ..SOON })?,
            PowerSgd::new(full)?,
        ];
        for hook in &mut hooks {
            for _ in 0..4 {
                let _ = bucket.tensor().zero_();
                hook.reduce(&bucket, &group)?;
                assert_eq!(f64::try_from(bucket.tensor().abs().max())?, 0.0);
            }
            give(&bucket, group.rank(), 0);
            if group.rank() == 1 {
                let _ = bucket.gradients[0].shallow_clone().fill_(f64::NAN);
            }
            hook.reduce(&bucket, &group)?;
            assert!(f64::try_from(bucket.gradients[0].sum(Kind::Double))?.is_nan(), "all ranks see it");
            give(&bucket, group.rank(), 1);
            hook.reduce(&bucket, &group)?;
            assert!(f64::try_from(bucket.gradients[0].sum(Kind::Double))?.is_finite());
        }
        assert_close(&[bucket.gradients[0].copy()], &[mean(0, 2, 1)], 1e-5);
    }
});

ranks_test!(strides_do_not_matter, 2, {
    let group = ProcessGroup::from_env()?;
    let mut bucket = bucket(&group)?;
    // As a gradient of a transposed parameter, and as one in channels-last order.
    bucket.gradients[0] = bucket.gradients[0].view([20, 6]).tr();
    bucket.gradients[2] = bucket.gradients[2].view([8, 2, 2, 3]).permute([0, 3, 1, 2]);
    let full = PowerSgdOptions { matrix_approximation_rank: 12, min_compression_rate: 0.0, ..SOON };
    let mut hooks: [Box<dyn CommHook>; 2] =
        [Box::new(PowerSgd::new(full)?), Box::new(Compressed::half().around(PowerSgd::new(full)?))];
    for (hook, tolerance) in hooks.iter_mut().zip([1e-5, 5e-3]) {
        for step in 0..4 {
            give(&bucket, group.rank(), step);
            hook.reduce(&bucket, &group)?;
            for param in 0..3 {
                assert_close(&[bucket.gradients[param].copy()], &[mean(param, 2, step)], tolerance);
            }
        }
    }
});

// The figures of docs/ddp-hooks.md.
ranks_test!(fewer_bytes_travel, 2, {
    let group = ProcessGroup::from_env()?;
    let bucket = GradBucket::zeros(&group, Kind::Float, &[vec![1024, 1024], vec![1024]])?;
    let reduced = |rank: usize| -> Result<(u64, u64)> {
        let options = PowerSgdOptions { matrix_approximation_rank: rank, ..AT_ONCE };
        let (mut plain, inner) = (PowerSgd::new(options)?, PowerSgd::new(options)?);
        let traffic = inner.traffic();
        plain.reduce(&bucket, &group)?;
        Compressed::half().around(inner).reduce(&bucket, &group)?;
        assert_eq!(plain.traffic().given(), 4_198_400);
        Ok((plain.traffic().reduced(), traffic.reduced()))
    };
    assert_eq!(reduced(1)?, (12_288, 6_144));
    assert_eq!(reduced(4)?, (36_864, 18_432));
    let mut half = Compressed::half();
    half.reduce(&bucket, &group)?;
    assert_eq!((half.traffic().given(), half.traffic().reduced()), (4_198_400, 2_099_200));
});

/// The loss on samples nobody trained on, after 400 steps.
fn trained(group: &ProcessGroup, hook: impl CommHook + 'static) -> Result<f64> {
    let vs = VarStore::new(Device::Cpu);
    let ddp = replica_with(group, &vs, hook)?;
    for step in 0..400 {
        let (x, y) = part(group, step);
        ddp.backward(&loss(&ddp.forward(&x)?, &y))?;
        descend(&parameters(&vs))?;
    }
    assert_eq!(all_ranks(group, &ddp.parameters()[0].tensor)?.len(), 1, "the same bits on all ranks");
    let (x, y) = samples(100_000..100_400);
    Ok(f64::try_from(tch::no_grad(|| loss(&ddp.module().forward(&x), &y)))?)
}

ranks_test!(a_regression_is_learnt_as_well_as_with_all_gradients, 4, {
    let group = ProcessGroup::from_env()?;
    let full = trained(&group, drumline_parallel::AllReduce)?;
    let hook = PowerSgd::new(SOON)?;
    let traffic = hook.traffic();
    let low = trained(&group, hook)?;
    let half = trained(&group, Compressed::bf16().around(PowerSgd::new(SOON)?))?;
    let untrained = {
        let net = Net::new(&VarStore::new(Device::Cpu), 0);
        let (x, y) = samples(100_000..100_400);
        f64::try_from(tch::no_grad(|| loss(&net.forward(&x), &y)))?
    };
    assert!(full < untrained / 2.0, "control: something was learnt, from {untrained} to {full}");
    assert!(low < full * 1.1 && half < full * 1.1, "full {full}, low rank {low}, and in 16 bits {half}");
    assert!(traffic.reduced() * 2 < traffic.given());
});
