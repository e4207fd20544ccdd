//! Errors reach every rank, and nothing hangs.

use std::time::{Duration, Instant};

use drumline_comm::ProcessGroup;
use drumline_parallel::{Ddp, DdpOptions, DivideBy, ParallelError, SyncGroup, UnevenTurn};
use drumline_torch::autograd_function;
use rank_test::{Exit, ranks_test};
use tch::nn::{self, Linear, Module, VarStore};
use tch::{Device, Kind, Tensor};

use super::net::{loss, replica, samples};
use super::uneven::normed;

ranks_test!(another_model_on_one_rank_is_an_error_on_all, 3, {
    let group = ProcessGroup::from_env()?;
    let vs = VarStore::new(Device::Cpu);
    let classes = if group.rank() == 2 { 100 } else { 10 };
    let model = nn::linear(vs.root() / "fc", 4, classes, Default::default());
    let error = Ddp::new(model, &vs, &group, DdpOptions::default()).unwrap_err().to_string();
    assert!(error.starts_with("rank 2 has another model than rank 0: its `fc."), "{error}");
    assert!(error.contains("[100, 4]") && error.contains("on rank 0 Float of [10, 4]"), "{error}");
    group.barrier()?; // the group can still be used
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
                    println!("error: {error}; again: {again}");
                    return Ok(());
                }
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
        // Backward of a tensor without autograd history.
        let error = ddp.backward(&Tensor::ones([], (Kind::Float, Device::Cpu))).unwrap_err();
        assert!(matches!(error, ParallelError::Torch(_)), "{error}");
        // This process still runs, and the other rank does not wait for it.
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
        // A broadcast of buffers would find the lost rank first.
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
                    println!("error: {error}");
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
        assert!(stdout.contains("error: ") && stdout.contains("rank 1"), "{report:?}");
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
    let mut turns = ddp.uneven(batches, DivideBy::AllRanks);
    let error = match turns.next().expect("one rank has a batch")? {
        UnevenTurn::Batch((x, y)) => {
            ddp.forward(&x).and_then(|output| ddp.backward(&loss(&output, &y))).unwrap_err()
        }
        UnevenTurn::Empty => ddp.backward_nothing().unwrap_err(),
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
        // This process still runs, and the other rank does not wait for it.
        std::thread::sleep(Duration::from_secs(6));
        return Ok(());
    }
    let began = Instant::now();
    let error = ddp.forward(&x).unwrap_err();
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    assert!(error.to_string().contains("batch 7 cannot be read"), "{error}");
});

/// A layer that is recomputed in backward, with its own backward: PyTorch's `checkpoint(…, use_reentrant=True)`.
fn checkpointed(layer: &Linear, input: &Tensor) -> anyhow::Result<Tensor> {
    let input = input.detach().set_requires_grad(true);
    let (weight, bias) = (layer.ws.shallow_clone(), layer.bs.as_ref().map(Tensor::shallow_clone));
    let again = move |x: &Tensor| x.linear(&weight, bias.as_ref());
    let forward = layer.forward(&input).detach();
    let outputs = autograd_function(
        &[&input],
        |cx, inputs| {
            cx.save(inputs[0]);
            Ok(vec![forward])
        },
        move |cx, grads| {
            let input = cx.saved()[0].detach().set_requires_grad(true);
            let grad = grads.into_iter().flatten().next().ok_or("no gradient")?;
            tch::with_grad(|| (again(&input) * grad).sum(Kind::Float)).f_backward()?;
            Ok(vec![Some(input.grad())])
        },
    )?;
    Ok(outputs.into_iter().next().expect("there is one output"))
}

/// A layer with `times` checkpointed uses on rank 1, and one plain use on rank 0.
fn ready_times(times: i64) -> anyhow::Result<Result<(), ParallelError>> {
    let group = ProcessGroup::from_env()?;
    let vs = VarStore::new(Device::Cpu);
    let layer = nn::linear(vs.root() / "fc", 6, 3, Default::default());
    let ddp = Ddp::new(layer, &vs, &group, DdpOptions::default())?;
    let (x, _) = samples(0..8);
    let output = match group.rank() {
        0 => ddp.forward(&x)?,
        _ => {
            let uses =
                (0..times).map(|_| checkpointed(ddp.module(), &x)).collect::<anyhow::Result<Vec<_>>>()?;
            Tensor::stack(&uses, 0).sum_dim_intlist(0, false, Kind::Float)
        }
    };
    let outcome = ddp.backward(&output.sum(Kind::Float));
    if group.rank() == 1 && outcome.is_err() {
        // This process still runs, and the other rank does not wait for it.
        std::thread::sleep(Duration::from_secs(2));
    }
    Ok(outcome)
}

ranks_test!(a_gradient_that_is_ready_twice_is_an_error_on_all_ranks, 2, {
    let error = ready_times(2)?.unwrap_err();
    let text = error.to_string();
    assert!(text.contains("was ready twice in one backward of rank 1"), "{text}");
    assert!(text.contains("`fc.") && text.contains("mark a variable ready only once"), "{text}");
    let is_own = matches!(error, ParallelError::MarkedReadyTwice { rank: 1, .. });
    assert_eq!(is_own, std::env::var("RANK")? == "1", "{error:?}");
});

ranks_test!(a_gradient_of_one_backward_within_another_is_none, 2, {
    ready_times(1)??; // control: re-entrant, and ready once
});

ranks_test!(a_weight_that_is_used_twice_in_a_forward_is_ready_once, 2, {
    let group = ProcessGroup::from_env()?;
    let vs = VarStore::new(Device::Cpu);
    let layer = nn::linear(vs.root() / "fc", 3, 3, Default::default());
    let ddp = Ddp::new(layer, &vs, &group, DdpOptions::default())?;
    let (_, y) = samples(0..8);
    for _ in 0..3 {
        let output = ddp.forward_with(|layer| layer.forward(&layer.forward(&y)))?;
        ddp.backward(&output.sum(Kind::Float))?;
    }
});

/// The calls in which this process waited while `body` ran.
fn seen_in<T>(group: &ProcessGroup, body: impl FnOnce() -> T) -> (T, Vec<String>) {
    let is_done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let looking = scope.spawn(|| {
            let mut seen: Vec<String> = Vec::new();
            while !is_done.load(std::sync::atomic::Ordering::Relaxed) {
                for call in group.calls_under_way().iter().map(ToString::to_string) {
                    if !seen.contains(&call) {
                        seen.push(call);
                    }
                }
                std::thread::sleep(Duration::from_millis(20));
            }
            seen
        });
        let outcome = body();
        is_done.store(true, std::sync::atomic::Ordering::Relaxed);
        (outcome, looking.join().unwrap())
    })
}

ranks_test!(a_wait_inside_ddp_names_the_line_of_the_program, 2, {
    let group = ProcessGroup::from_env()?;
    let (sync, vs) = (SyncGroup::new(&group)?, VarStore::new(Device::Cpu));
    let net = normed(&vs, &sync);
    let options = DdpOptions { sync_group: Some(sync), ..DdpOptions::default() };
    let ddp = Ddp::new(net, &vs, &group, options)?;
    let (x, y) = samples(0..8);
    for late in ["forward", "norms", "backward", "step"] {
        let pause = |now: &str| {
            if group.rank() == 1 && late == now {
                std::thread::sleep(Duration::from_millis(700));
            }
        };
        let step = || -> anyhow::Result<u32> {
            pause("forward");
            let (forward, output) = (
                line!() + 1,
                ddp.forward_with(|net| {
                    pause("norms");
                    tch::nn::ModuleT::forward_t(net, &x, true)
                })?,
            );
            pause("backward");
            let (backward, ()) = (line!(), ddp.backward(&loss(&output, &y))?);
            pause("step");
            let (step, ()) = (line!(), ddp.begin_step(0)?);
            ddp.backward_nothing()?;
            Ok(match late {
                "forward" | "norms" => forward,
                "backward" => backward,
                _ => step,
            })
        };
        let (line, seen) = seen_in(&group, step);
        let line = line?;
        if group.rank() == 0 {
            let place = format!("ddp_faults.rs:{line}");
            assert!(seen.iter().any(|call| call.ends_with(&place)), "{late}: {place}, {seen:?}");
            let within = ["lane.rs", "sync_group.rs", "arena.rs", "ddp.rs", "memory.rs"];
            let foreign: Vec<_> = seen
                .iter()
                .filter(|call| within.iter().any(|file| call.contains(&format!("/{file}"))))
                .collect();
            assert!(foreign.is_empty(), "{late}: {foreign:?}");
        }
        group.barrier()?;
    }
});

ranks_test!(a_parameter_that_was_frozen_when_ddp_was_made_cannot_be_thawed, 2, {
    let group = ProcessGroup::from_env()?;
    let vs = VarStore::new(Device::Cpu);
    let (first, second) = (
        nn::linear(vs.root() / "a", 6, 4, Default::default()),
        nn::linear(vs.root() / "b", 4, 3, Default::default()),
    );
    let frozen = first.ws.shallow_clone().set_requires_grad(false);
    let net = nn::seq().add(first).add(second);
    let ddp = Ddp::new(net, &vs, &group, DdpOptions::default())?;
    let (x, y) = samples(0..8);
    ddp.backward(&loss(&ddp.forward(&x)?, &y))?;
    let _ = frozen.set_requires_grad(true);
    let error = ddp.backward(&loss(&ddp.forward(&x)?, &y)).unwrap_err().to_string();
    assert!(error.contains("`a.weight` was frozen when rank"), "{error}");
});
