//! What goes wrong is told on every rank, and nothing hangs.

use std::time::{Duration, Instant};

use drumline_comm::ProcessGroup;
use drumline_parallel::{Ddp, DdpOptions, ParallelError, Share, SyncGroup, Turn};
use rank_test::{Exit, ranks_test};
use tch::nn::{self, Module, VarStore};
use tch::{Device, Kind, Tensor};

use super::net::{loss, replica, samples};
use super::uneven::normed;

ranks_test!(another_model_on_one_rank_is_told_on_all, 3, {
    let group = ProcessGroup::from_env()?;
    let vs = VarStore::new(Device::Cpu);
    let classes = if group.rank() == 2 { 100 } else { 10 };
    let model = nn::linear(vs.root() / "fc", 4, classes, Default::default());
    let error = Ddp::new(model, &vs, &group, DdpOptions::default()).unwrap_err().to_string();
    assert!(error.starts_with("rank 2 has another model than rank 0: its `fc."), "{error}");
    assert!(error.contains("[100, 4]") && error.contains("on rank 0 Float of [10, 4]"), "{error}");
    group.barrier()?; // the group itself is as good as before
});

ranks_test!(
    a_rank_that_dies_in_mid_training_is_an_error_on_the_other,
    2,
    {
        let group = ProcessGroup::from_env()?;
        let vs = VarStore::new(Device::Cpu);
        let ddp = replica(&group, &vs)?;
        let (x, y) = samples(0..8);
        for step in 0.. {
            if step == 3 && group.rank() == 1 && std::env::var_os("DIES").is_some() {
                println!("dies");
                std::process::abort();
            }
            let began = Instant::now();
            match ddp.backward(&loss(&ddp.forward(&x)?, &y)) {
                Ok(()) if step == 20 => break,
                Ok(()) => {}
                Err(error) => {
                    assert!(began.elapsed() < Duration::from_secs(5));
                    assert!(error.is_recoverable());
                    let again = ddp.backward(&loss(&ddp.module().forward(&x), &y)).unwrap_err().to_string();
                    println!("told: {error}; again: {again}");
                    return Ok(());
                }
            }
        }
        println!("trained");
    },
    |ranks| {
        let report = ranks.clone().env([("DIES", "1")]).start()?.wait_all(Duration::from_secs(60))?;
        assert_eq!(report.ranks[0].exit, Exit::Code(0));
        let told = String::from_utf8_lossy(&report.ranks[0].stdout);
        assert!(told.contains("told: ") && told.contains("rank 1"), "{report:?}");
        let control = ranks.pass()?;
        assert!(
            String::from_utf8_lossy(&control.ranks[0].stdout).contains("trained"),
            "control: without the fault it trains"
        );
    }
);

ranks_test!(an_error_in_one_ranks_backward_ends_the_others_step, 2, {
    let group = ProcessGroup::from_env()?;
    let vs = VarStore::new(Device::Cpu);
    let ddp = replica(&group, &vs)?;
    let (x, y) = samples(0..8);
    if group.rank() == 1 {
        // Backward of something that was computed without gradients.
        let error = ddp.backward(&Tensor::ones([], (Kind::Float, Device::Cpu))).unwrap_err();
        assert!(matches!(error, ParallelError::Torch(_)), "{error}");
        // It is still there, and the other does not wait for it.
        std::thread::sleep(Duration::from_secs(6));
        return Ok(());
    }
    let began = Instant::now();
    let error = (0..2).try_for_each(|_| ddp.backward(&loss(&ddp.forward(&x)?, &y))).unwrap_err();
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    assert!(error.to_string().contains("rank 1"), "{error}");
});

ranks_test!(
    a_rank_that_dies_is_an_error_of_a_forward_with_synchronised_norms,
    2,
    {
        let group = ProcessGroup::from_env()?;
        let (sync, vs) = (SyncGroup::new(&group)?, VarStore::new(Device::Cpu));
        let net = normed(&vs, &sync);
        // Buffers would tell of the loss first.
        let options =
            DdpOptions { sync_group: Some(sync), broadcast_buffers: false, ..DdpOptions::default() };
        let ddp = Ddp::new(net, &vs, &group, options)?;
        let (x, y) = samples(0..8);
        for step in 0..6 {
            if step == 3 && group.rank() == 1 && std::env::var_os("DIES").is_some() {
                std::process::abort();
            }
            let began = Instant::now();
            match ddp.forward(&x) {
                Ok(output) => ddp.backward(&loss(&output, &y))?,
                Err(error) => {
                    assert!(began.elapsed() < Duration::from_secs(5) && error.is_recoverable(), "{error}");
                    println!("told: {error}");
                    return Ok(());
                }
            }
        }
        println!("trained");
    },
    |ranks| {
        let report = ranks.clone().env([("DIES", "1")]).start()?.wait_all(Duration::from_secs(60))?;
        let [stdout, stderr] =
            [&report.ranks[0].stdout, &report.ranks[0].stderr].map(|bytes| String::from_utf8_lossy(bytes));
        assert!(stdout.contains("told: ") && stdout.contains("rank 1"), "{report:?}");
        assert!(!stderr.contains("panicked"), "{stderr}");
        let control = ranks.pass()?;
        assert!(String::from_utf8_lossy(&control.ranks[0].stdout).contains("trained"));
    }
);

ranks_test!(a_rank_without_any_batch_ends_a_step_with_synchronised_norms_at_once, 2, {
    let group = ProcessGroup::from_env()?;
    let (sync, vs) = (SyncGroup::new(&group)?, VarStore::new(Device::Cpu));
    let net = normed(&vs, &sync);
    let options = DdpOptions { sync_group: Some(sync), ..DdpOptions::default() };
    let ddp = Ddp::new(net, &vs, &group, options)?;
    let began = Instant::now();
    let batches = if group.rank() == 0 { vec![samples(0..8)] } else { vec![] };
    let mut turns = ddp.uneven(batches, Share::AllRanks);
    let error = match turns.next().expect("one rank has a batch")? {
        Turn::Batch((x, y)) => {
            ddp.forward(&x).and_then(|output| ddp.backward(&loss(&output, &y))).unwrap_err()
        }
        Turn::Empty => ddp.backward_nothing().unwrap_err(),
    };
    assert!(error.to_string().contains("rank 1"), "{error}");
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    if group.rank() == 1 {
        assert!(error.to_string().contains("try a first batch of length 0"), "{error}");
        std::thread::sleep(Duration::from_secs(1));
    }
});

ranks_test!(a_model_that_is_given_up_is_so_for_who_is_in_its_norms, 2, {
    let group = ProcessGroup::from_env()?;
    let (sync, vs) = (SyncGroup::new(&group)?, VarStore::new(Device::Cpu));
    let net = normed(&vs, &sync);
    let options = DdpOptions { sync_group: Some(sync), broadcast_buffers: false, ..DdpOptions::default() };
    let ddp = Ddp::new(net, &vs, &group, options)?;
    let (x, y) = samples(0..8);
    ddp.backward(&loss(&ddp.forward(&x)?, &y))?;
    if group.rank() == 1 {
        std::thread::sleep(Duration::from_millis(300));
        ddp.abort("batch 7 cannot be read");
        // It is still there, and the other does not wait for it.
        std::thread::sleep(Duration::from_secs(6));
        return Ok(());
    }
    let began = Instant::now();
    let error = ddp.forward(&x).unwrap_err();
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    assert!(error.to_string().contains("batch 7 cannot be read"), "{error}");
});
