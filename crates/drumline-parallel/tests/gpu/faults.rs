//! Errors on a GPU reach every rank, and nothing hangs.

use std::time::{Duration, Instant};

use drumline_comm::{CommError, ReduceOp};
use drumline_torch::TensorCollectives;
use rank_test::{Exit, ranks_test};
use tch::nn::VarStore;
use tch::{Kind, Tensor};

use super::net::{loss, replica, samples};
use super::{GPU, join};

ranks_test!(
    a_rank_that_dies_in_mid_training_is_an_error_on_the_other,
    2,
    {
        let group = join()?;
        let vs = VarStore::new(GPU);
        let ddp = replica(&group, &vs)?;
        let (x, y) = samples(0..8);
        let (x, y) = (x.to_device(GPU), y.to_device(GPU));
        for step in 0..20 {
            if step == 3 && group.rank() == 1 && std::env::var_os("DIES").is_some() {
                std::process::abort();
            }
            let began = Instant::now();
            if let Err(error) = ddp.forward(&x).and_then(|output| ddp.backward(&loss(&output, &y))) {
                assert!(began.elapsed() < Duration::from_secs(5));
                println!("error: {error}");
                return Ok(());
            }
        }
        println!("trained");
    },
    |ranks| {
        let report = ranks.clone().env([("DIES", "1")]).start()?.wait_all(Duration::from_secs(60))?;
        assert_eq!(report.ranks[0].exit, Exit::Code(0));
        let stdout = String::from_utf8_lossy(&report.ranks[0].stdout);
        assert!(stdout.contains("error: ") && stdout.contains("rank 1"), "{report:?}");
        let control = ranks.pass()?;
        assert!(
            String::from_utf8_lossy(&control.ranks[0].stdout).contains("trained"),
            "control: without the fault"
        );
    }
);

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
