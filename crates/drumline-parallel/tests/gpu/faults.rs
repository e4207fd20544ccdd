//! Errors on a GPU reach every rank, and nothing hangs.

use std::time::{Duration, Instant};

use anyhow::Result;
use drumline_comm::{CommError, ReduceOp};
use drumline_torch::{TensorCollectives, nccl};
use rank_test::{Exit, Ranks, ranks_test};
use tch::nn::VarStore;
use tch::{Kind, Tensor};

use super::net::{loss, replica, samples};
use super::{GPU, join};

/// How long a call waits for a rank.
const TIMEOUT: Duration = Duration::from_secs(6);

/// How long a failed group may take to end.
const END: Duration = Duration::from_secs(8);

/// Trains, in which rank 1 dies or is late if `FAULT` says so. Each step waits for the GPU.
fn train_with_a_fault() -> Result<()> {
    let group = join()?;
    let vs = VarStore::new(GPU);
    let ddp = replica(&group, &vs)?;
    let (x, y) = samples(0..8);
    let (x, y) = (x.to_device(GPU), y.to_device(GPU));
    for step in 0..20 {
        let fault = std::env::var("FAULT").ok().filter(|_| step == 3 && group.rank() == 1);
        match fault.as_deref() {
            Some("dies") => std::process::abort(),
            Some("late") => std::thread::sleep(TIMEOUT + END),
            _ => {}
        }
        let began = Instant::now();
        let made = ddp.forward(&x).and_then(|output| ddp.backward(&loss(&output, &y)));
        if let Err(error) = made.and_then(|()| Ok(nccl::settle(GPU)?)) {
            assert!(began.elapsed() < TIMEOUT + Duration::from_secs(3), "{:?}", began.elapsed());
            println!("error: {error}");
            let began = Instant::now();
            drop((ddp, group));
            assert!(began.elapsed() < END, "the end took {:?}", began.elapsed());
            assert_eq!(x.double_value(&[0, 0]), x.double_value(&[0, 0]), "the GPU can still be used");
            return Ok(());
        }
    }
    println!("trained");
    Ok(())
}

/// Rank 1 has this fault: all others name it. Without it they train.
fn all_others_name_rank_1(ranks: &Ranks, fault: &str) -> Result<()> {
    let ranks = ranks.clone().env([("DRUMLINE_TIMEOUT", format!("{}s", TIMEOUT.as_secs()))]);
    let report = ranks.clone().env([("FAULT", fault)]).start()?.wait_all(Duration::from_secs(60))?;
    for (rank, of_rank) in report.ranks.iter().enumerate().filter(|(rank, _)| *rank != 1) {
        assert_eq!(of_rank.exit, Exit::Code(0), "rank {rank}: {report:?}");
        let stdout = String::from_utf8_lossy(&of_rank.stdout);
        assert!(stdout.contains("error: ") && stdout.contains("rank 1"), "rank {rank}: {report:?}");
    }
    let control = ranks.pass()?;
    for rank in control.ranks {
        assert!(String::from_utf8_lossy(&rank.stdout).contains("trained"), "control: without the fault");
    }
    Ok(())
}

on_each_route!(a_rank_that_dies_is_named_by_all_others, { train_with_a_fault()? }, |ranks| {
    all_others_name_rank_1(&ranks, "dies")?;
});
on_each_route!(a_rank_that_is_late_is_named_by_all_others, { train_with_a_fault()? }, |ranks| {
    all_others_name_rank_1(&ranks, "late")?;
});

ranks_test!(after_an_abort_each_call_over_nccl_gives_the_same_error, 1, timeout = super::BRIEF, {
    let group = join()?;
    let mut x = Tensor::ones([1 << 20], (Kind::Float, GPU));
    for _ in 0..100 {
        group.all_reduce_tensor(&mut x, ReduceOp::Sum)?; // control: it works
    }
    group.abort("batch 7 cannot be read");
    let began = Instant::now();
    for _ in 0..3 {
        let error = group.all_reduce_tensor(&mut x, ReduceOp::Sum).unwrap_err();
        assert!(matches!(error.comm_error(), Some(CommError::CalledOff { by: 0, .. })), "{error}");
        assert!(error.to_string().contains("batch 7 cannot be read"), "{error}");
    }
    drop(group);
    assert!(began.elapsed() < Duration::from_secs(10));
    assert_eq!(x.double_value(&[0]), 1.0, "the GPU can still be used");
});

ranks_test!(ranks_that_make_different_calls_are_both_named, 2, {
    let group = join()?;
    let mut x = Tensor::ones([100], (Kind::Float, GPU));
    group.all_reduce_tensor(&mut x, ReduceOp::Sum)?; // control: the same call
    let op = if group.rank() == 0 { ReduceOp::Sum } else { ReduceOp::Max };
    let error = group.all_reduce_tensor(&mut x, op).unwrap_err().to_string();
    assert!(
        error.contains("all_reduce(100 f32, sum)") && error.contains("all_reduce(100 f32, max)"),
        "{error}"
    );
    assert!(error.contains("faults.rs:"), "the caller's place: {error}");
});

ranks_test!(a_root_that_is_not_there_is_refused, 1, timeout = super::BRIEF, {
    let group = join()?;
    let mut x = Tensor::ones([100], (Kind::Float, GPU));
    let error = group.broadcast_tensor(&mut x, 3).unwrap_err().to_string();
    assert!(error.contains("root 3 is not in group `world` of 1 ranks"), "{error}");
    group.all_reduce_tensor(&mut x, ReduceOp::Sum)?;
});
