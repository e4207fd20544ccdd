//! Communication hooks in a training: exact or close to the mean, as each promises, and errors that reach all ranks.

use std::time::{Duration, Instant};

use anyhow::Result;
use drumline_comm::{ProcessGroup, ReduceOp};
use drumline_parallel::{
    AllReduce, CommHook, Compressed, Ddp, DdpOptions, GradBucket, PostLocalSgd, PowerSgd, PowerSgdOptions,
    subgroup,
};
use drumline_torch::{TorchError, parameters};
use rank_test::{Exit, ranks_test};
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};

use super::net::{Net, alone, assert_close, descend, loss, samples, values};

const STEPS: i64 = 6;
const BATCH: i64 = 24;

/// A replica with a bucket for about every parameter.
pub(crate) fn replica_with(
    group: &ProcessGroup,
    vs: &VarStore,
    hook: impl CommHook + 'static,
) -> Result<Ddp<Net>> {
    let net = Net::new(vs, group.rank() as i64 * 10);
    let options =
        DdpOptions { bucket_cap: 200, first_bucket: 64, hook: Box::new(hook), ..DdpOptions::default() };
    Ok(Ddp::new(net, vs, group, options)?)
}

/// The rank's part of a step's batch.
pub(crate) fn part(group: &ProcessGroup, step: i64) -> (Tensor, Tensor) {
    let each = BATCH / group.size() as i64;
    let start = step * BATCH + group.rank() as i64 * each;
    samples(start..start + each)
}

/// PowerSGD that is exact, because the rank is full.
fn full_rank() -> Result<PowerSgd> {
    let options = PowerSgdOptions {
        matrix_approximation_rank: 12,
        min_compression_rate: 0.0,
        start_power_sgd_iter: 2,
        ..PowerSgdOptions::default()
    };
    Ok(PowerSgd::new(options)?)
}

/// Trains with the hook, and in one process. All ranks must end with the same bits.
fn parity(group: &ProcessGroup, hook: impl CommHook + 'static, tolerance: f64) -> Result<()> {
    let vs = VarStore::new(Device::Cpu);
    let ddp = replica_with(group, &vs, hook)?;
    for step in 0..STEPS {
        let (x, y) = part(group, step);
        ddp.backward(&loss(&ddp.forward(&x)?, &y))?;
        descend(&parameters(&vs))?;
    }
    let reference = alone(STEPS, |step| samples(step * BATCH..(step + 1) * BATCH))?;
    assert_close(&values(&parameters(&vs)), &reference, tolerance);
    let flat = Tensor::cat(&values(&parameters(&vs)).iter().map(|t| t.flatten(0, -1)).collect::<Vec<_>>(), 0);
    assert_eq!(all_ranks(group, &flat)?.len(), 1, "the same bits on all ranks");
    Ok(())
}

/// The distinct contents of a tensor over all ranks.
pub(crate) fn all_ranks(group: &ProcessGroup, tensor: &Tensor) -> Result<Vec<Vec<u32>>> {
    let mine: Vec<f32> = tensor.detach().flatten(0, -1).try_into()?;
    let mut all = vec![0f32; mine.len() * group.size()];
    group.all_gather(&mine, &mut all)?;
    let mut contents: Vec<Vec<u32>> =
        all.chunks(mine.len()).map(|chunk| chunk.iter().map(|x| x.to_bits()).collect()).collect();
    contents.sort();
    contents.dedup();
    Ok(contents)
}

fn hook_parity() -> Result<()> {
    let group = ProcessGroup::from_env()?;
    parity(&group, AllReduce, 1e-6)?;
    parity(&group, Compressed::half(), 1e-4)?;
    parity(&group, Compressed::bf16(), 1e-3)?;
    let late = PowerSgdOptions { start_power_sgd_iter: 100, ..PowerSgdOptions::default() };
    parity(&group, PowerSgd::new(late)?, 1e-6)?;
    parity(&group, full_rank()?, 1e-5)?;
    parity(&group, Compressed::half().around(full_rank()?), 1e-3)?;
    parity(&group, PostLocalSgd::new(100, subgroup(&group, 1)?), 1e-6)?;
    parity(&group, PostLocalSgd::new(2, subgroup(&group, group.size())?), 1e-6)
}

ranks_test!(ddp_hook_parity_with_two_ranks, 2, { hook_parity()? });
ranks_test!(ddp_hook_parity_with_four_ranks, 4, { hook_parity()? });
ranks_test!(ddp_hook_parity_over_tcp, 2, env = [("DRUMLINE_TRANSPORT", "tcp")], { hook_parity()? });

fn accumulate(group: &ProcessGroup, hook: impl CommHook + 'static, tolerance: f64) -> Result<()> {
    let vs = VarStore::new(Device::Cpu);
    let ddp = replica_with(group, &vs, hook)?;
    for step in 0..STEPS {
        let (x, y) = part(group, step);
        let micro = |index: i64| -> Result<Tensor> {
            Ok(loss(&ddp.forward(&x.narrow(0, index * 4, 4))?, &y.narrow(0, index * 4, 4)) / 3)
        };
        ddp.no_sync(|| (0..2).try_for_each(|index| -> Result<()> { Ok(ddp.backward(&micro(index)?)?) }))?;
        ddp.backward(&micro(2)?)?;
        descend(&parameters(&vs))?;
    }
    let reference = alone(STEPS, |step| samples(step * BATCH..(step + 1) * BATCH))?;
    assert_close(&values(&parameters(&vs)), &reference, tolerance);
    Ok(())
}

ranks_test!(accumulate_gradients_no_sync_with_hooks, 2, {
    let group = ProcessGroup::from_env()?;
    accumulate(&group, AllReduce, 1e-6)?;
    accumulate(&group, Compressed::half(), 1e-4)?;
    accumulate(&group, full_rank()?, 1e-5)?;
});

fn halves_do_not_overflow() -> Result<()> {
    let group = ProcessGroup::from_env()?;
    let bucket = GradBucket::zeros(&group, Kind::Float, &[vec![3], vec![2, 2]])?;
    for mut hook in [Compressed::half(), Compressed::bf16()] {
        let traffic = hook.traffic();
        for _ in 0..2 {
            let _ = bucket.tensor().fill_(60_000.0);
            hook.reduce(&bucket, &group)?;
            let mean: Vec<f32> = bucket.tensor().try_into()?;
            assert!(mean.iter().all(|x| (x / 60_000.0 - 1.0).abs() < 0.01), "{mean:?}");
        }
        assert_eq!((traffic.given(), traffic.reduced()), (2 * 28, 2 * 14));
    }
    Ok(())
}

ranks_test!(sums_of_halves_do_not_overflow, 4, { halves_do_not_overflow()? });
ranks_test!(sums_of_halves_do_not_overflow_between_nodes, 3, env = [("DRUMLINE_TRANSPORT", "tcp")], {
    halves_do_not_overflow()?
});

ranks_test!(sixteen_bits_are_left_as_they_are, 2, {
    let group = ProcessGroup::from_env()?;
    let bucket = GradBucket::zeros(&group, Kind::BFloat16, &[vec![4]])?;
    let _ = bucket.tensor().fill_(group.rank() as f64 + 1e30);
    let mut hook = Compressed::half();
    hook.reduce(&bucket, &group)?;
    assert!(f64::try_from(bucket.tensor().sum(Kind::Double))?.is_finite(), "halves would be infinite");
    assert_eq!(hook.traffic().given(), 0);
});

ranks_test!(post_local_sgd_reduces_in_the_subgroup_after_the_start, 4, {
    let group = ProcessGroup::from_env()?;
    let rank = group.rank() as f32;
    let pair = subgroup(&group, 2)?;
    let mut hooks = [PostLocalSgd::new(2, pair), PostLocalSgd::alone(2)];
    let afterwards = [if group.rank() < 2 { 0.5 } else { 2.5 }, rank];
    // Two buckets make a step.
    let mut bucket = GradBucket::zeros(&group, Kind::Float, &[vec![5]])?;
    bucket.num_buckets = 2;
    for (hook, afterwards) in hooks.iter_mut().zip(afterwards) {
        for call in 0..8 {
            bucket.index = call % 2;
            let _ = bucket.tensor().fill_(f64::from(rank));
            hook.reduce(&bucket, &group)?;
            let expected = if call < 4 { 1.5 } else { afterwards };
            assert_eq!(Vec::<f32>::try_from(bucket.tensor())?, [expected; 5], "call {call}");
        }
        assert_eq!((hook.traffic().given(), hook.traffic().reduced()), (8 * 20, 4 * 20));
    }
    let error = subgroup(&group, 3).unwrap_err().to_string();
    assert_eq!(error, "4 ranks cannot be divided into groups of 3; try a divisor of 4");
});

/// Fails in its fourth call on one rank, before it reduces.
struct Failing {
    calls: usize,
    fails: bool,
}

impl CommHook for Failing {
    fn reduce(&mut self, bucket: &GradBucket, group: &ProcessGroup) -> Result<(), TorchError> {
        self.calls += 1;
        if self.fails && self.calls == 4 {
            return Err(TorchError::Custom {
                operation: "this hook failed",
                cause: "no more room for this bucket".into(),
            });
        }
        bucket.all_reduce(group, ReduceOp::Avg)
    }
}

ranks_test!(
    a_hook_that_fails_on_one_rank_is_an_error_on_all,
    3,
    {
        let group = ProcessGroup::from_env()?;
        let fails = group.rank() == 1 && std::env::var_os("FAILS").is_some();
        let vs = VarStore::new(Device::Cpu);
        let ddp = replica_with(&group, &vs, Failing { calls: 0, fails })?;
        for step in 0..4 {
            let (x, y) = part(&group, step);
            let began = Instant::now();
            let train = || -> Result<()> { Ok(ddp.backward(&loss(&ddp.forward(&x)?, &y))?) };
            if let Err(error) = train() {
                println!("error after {} s: {error}", began.elapsed().as_secs());
                return Ok(());
            }
        }
        println!("trained");
    },
    |ranks| {
        let report = ranks.clone().env([("FAILS", "1")]).start()?.wait_all(Duration::from_secs(60))?;
        for (rank, report) in report.ranks.iter().enumerate() {
            assert_eq!(report.exit, Exit::Code(0), "{report:?}");
            let said = String::from_utf8_lossy(&report.stdout).into_owned();
            let seconds = said.split("error after ").nth(1).and_then(|rest| rest.split(' ').next());
            assert!(seconds.is_some_and(|s| s.parse::<u64>().is_ok_and(|s| s < 5)), "{said}");
            let cause = if rank == 1 { "no more room for this bucket" } else { "rank 1" };
            assert!(said.contains(cause), "{said}");
        }
        let control = ranks.pass()?;
        assert!(String::from_utf8_lossy(&control.ranks[1].stdout).contains("trained"));
    }
);
