//! Errors with NCCL reach all ranks in time, and nothing hangs: with a library that stands in for NCCL, as two ranks
//! share the GPU.
//!
//! All tests run one program. The variable `WRONG` selects what a rank does wrong, `NCCL_STAND_IN_FAULT` what fails
//! inside the library. Each test also runs it without a fault.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use drumline_comm::{ProcessGroup, ReduceOp};
use drumline_torch::cuda::GraphedStep;
use drumline_torch::{TensorCollectives, TorchError, cuda, nccl};
use rank_test::{Exit, Ranks, StandIn, ranks_test};
use tch::{Device, Kind, Tensor};

use super::{GPU, join};

/// How long a call waits for a rank.
const TIMEOUT: Duration = Duration::from_secs(6);

/// How much later than the timeout an error may come.
const GRACE: Duration = Duration::from_secs(3);

/// How long a failed group, and the process, may take to end.
const END: Duration = Duration::from_secs(8);

/// Calls that a rank makes unless it gets an error.
const ROUNDS: usize = 60;

fn ones(len: i64) -> Tensor {
    Tensor::ones([len], (Kind::Float, GPU))
}

/// What each rank runs.
fn program() -> Result<()> {
    let wrong = std::env::var("WRONG").unwrap_or_default();
    cuda::open()?;
    // Initialises the GPU, which takes a while, before another rank waits for this one.
    let mut x = ones(1000);
    let group = ProcessGroup::from_env()?;
    group.all_reduce_tensor(&mut x, ReduceOp::Sum)?;
    ensure!(x.double_value(&[0]) == 2.0, "the first call is right");
    ensure!(group.is_recordable().is_ok(), "it uses NCCL");
    if group.rank() == 1 && wrong == "late" {
        std::thread::sleep(TIMEOUT + GRACE);
    }
    let began = Instant::now();
    match first_error(&group, &wrong) {
        Some((round, error)) => {
            ensure!(began.elapsed() < TIMEOUT + GRACE, "error only after {:?}: {error}", began.elapsed());
            println!("error in round {round}: {error}");
        }
        None => println!("succeeded"),
    }
    let began = Instant::now();
    drop(group);
    ensure!(began.elapsed() < END, "the end of the group took {:?}", began.elapsed());
    ensure!(ones(3).double_value(&[0]) == 1.0, "the GPU can still be used");
    Ok(())
}

/// The first error of many calls, and the index of the call. Calls on a GPU are asynchronous, so a later one returns
/// the error.
fn first_error(group: &ProcessGroup, wrong: &str) -> Option<(usize, String)> {
    for round in 0..ROUNDS {
        if let Err(error) = call(group, wrong) {
            return Some((round, error.to_string()));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    None
}

/// Makes a call, and waits for the GPU.
fn call(group: &ProcessGroup, wrong: &str) -> Result<(), TorchError> {
    let (mut x, is_second) = (ones(1000), group.rank() == 1);
    match wrong {
        "dies" if is_second => std::process::abort(),
        "operation" if is_second => group.all_reduce_tensor(&mut x, ReduceOp::Max)?,
        "shape" if is_second => group.all_reduce_tensor(&mut ones(1001), ReduceOp::Sum)?,
        "call" if is_second => group.broadcast_tensor(&mut x, 0)?,
        "parts" | "fitting parts" => {
            let expected = if is_second && wrong == "parts" { 5 } else { 3 };
            let receives = if is_second { [expected, 4] } else { [1, 2] };
            let mut outputs = receives.map(ones);
            let inputs = if is_second { [2, 4] } else { [1, 3] }.map(ones);
            group.all_to_all_tensors(&mut outputs, &inputs)?;
        }
        "calls off" if is_second => {
            std::thread::sleep(Duration::from_millis(500));
            return Err(group.abort("batch 7 cannot be read").into());
        }
        _ => group.all_reduce_tensor(&mut x, ReduceOp::Sum)?,
    }
    // A copy to memory that is not pinned, which blocks in the driver until the GPU is done.
    match std::env::var_os("COPIES") {
        Some(_) => drop(x.to_device(Device::Cpu)),
        None => _ = x.double_value(&[0]),
    }
    Ok(())
}

/// What the ranks print with these variables. All ranks but those that die must exit with 0, in time.
fn printed(ranks: &Ranks, variables: &[(&str, &str)]) -> Result<Vec<String>> {
    let library = StandIn::new()?;
    let timeout = format!("{}s", TIMEOUT.as_secs());
    let variables = variables.iter().copied().chain([("DRUMLINE_TIMEOUT", timeout.as_str())]);
    let running = library.with(ranks).env(variables).start()?;
    let report = running.wait_all(Duration::from_secs(50))?;
    let mut all = Vec::new();
    for rank in &report.ranks {
        let stdout = String::from_utf8_lossy(&rank.stdout).into_owned();
        let has_died = matches!(rank.exit, Exit::Signal(_));
        ensure!(rank.exit == Exit::Code(0) || has_died, "{report:?}");
        all.push(if has_died { String::from("died") } else { stdout });
    }
    Ok(all)
}

/// The program without a fault.
fn control(ranks: &Ranks) -> Result<()> {
    for stdout in printed(ranks, &[])? {
        ensure!(stdout.contains("succeeded"), "control: {stdout}");
    }
    Ok(())
}

/// All ranks report an error that contains all words.
fn all_report(ranks: &Ranks, variables: &[(&str, &str)], words: &[&str]) -> Result<Vec<String>> {
    let all = printed(ranks, variables)?;
    for (rank, stdout) in all.iter().enumerate() {
        for word in words {
            ensure!(
                stdout.contains("error in round ") && stdout.contains(word),
                "rank {rank}: no `{word}` in {all:?}"
            );
        }
    }
    Ok(all)
}

ranks_test!(a_late_rank_is_named_and_what_waits_for_it_on_the_gpu_ends, 2, { program()? }, |ranks| {
    let words = ["all_reduce(1000 f32, sum)", "timed out after 6s", "nccl_faults.rs:", "rank 1"];
    all_report(&ranks, &[("WRONG", "late")], &words)?;
    control(&ranks)?;
});

ranks_test!(a_rank_that_dies_is_named_and_what_waits_for_it_on_the_gpu_ends, 2, { program()? }, |ranks| {
    let all = printed(&ranks, &[("WRONG", "dies")])?;
    assert!(all[0].contains("error in round ") && all[0].contains("lost rank 1"), "{all:?}");
    assert_eq!(all[1], "died");
    control(&ranks)?;
});

ranks_test!(ranks_that_make_different_calls_on_the_gpu_are_both_named, 2, { program()? }, |ranks| {
    for (wrong, of_rank_1) in [
        ("operation", "all_reduce(1000 f32, max)"),
        ("shape", "all_reduce(1001 f32, sum)"),
        ("call", "broadcast(1000 f32, root 0)"),
    ] {
        let words = ["made different calls", "all_reduce(1000 f32, sum)", of_rank_1, "nccl_faults.rs:"];
        all_report(&ranks, &[("WRONG", wrong)], &words)?;
    }
    control(&ranks)?;
});

ranks_test!(parts_that_do_not_fit_are_refused_on_the_gpu, 2, { program()? }, |ranks| {
    let words = ["rank 0", "all_to_all(", "it sends 3 elements to this rank, which expects 5"];
    all_report(&ranks, &[("WRONG", "parts")], &words)?;
    for stdout in printed(&ranks, &[("WRONG", "fitting parts")])? {
        assert!(stdout.contains("succeeded"), "control: {stdout}");
    }
});

ranks_test!(an_error_that_nccl_runs_into_is_reported_on_all_ranks, 2, { program()? }, |ranks| {
    let words = ["rank 1 called off group `world", "NCCL: remote process exited"];
    all_report(&ranks, &[("NCCL_STAND_IN_FAULT", "error:1@2")], &words)?;
    control(&ranks)?;
});

ranks_test!(a_call_that_does_not_end_on_the_gpu_is_reported_on_all_ranks, 2, { program()? }, |ranks| {
    let words = ["all_reduce(1000 f32, sum)", "has not ended on the GPU after 6s"];
    all_report(&ranks, &[("NCCL_STAND_IN_FAULT", "stall:1@2")], &words)?;
    all_report(&ranks, &[("NCCL_STAND_IN_FAULT", "stall:1@2"), ("COPIES", "1")], &words)?;
    control(&ranks)?;
});

ranks_test!(a_call_that_nccl_refuses_is_reported_on_all_ranks, 2, { program()? }, |ranks| {
    let words = ["rank 0 called off group `world", "NCCL: internal error"];
    let all = all_report(&ranks, &[("NCCL_STAND_IN_FAULT", "refuse:0@2")], &words)?;
    assert!(all[0].contains("error in round 0:"), "the call itself fails: {all:?}");
    control(&ranks)?;
});

ranks_test!(a_call_that_is_called_off_while_it_is_made_fails_itself, 2, { program()? }, |ranks| {
    let variables = [("NCCL_STAND_IN_FAULT", "connect:0@2"), ("WRONG", "calls off")];
    let all = all_report(&ranks, &variables, &["rank 1 called off group `world", "batch 7 cannot be read"])?;
    assert!(all[0].contains("error in round 0:"), "{all:?}");
    control(&ranks)?;
});

/// Far longer than a graph waits for a rank that has left.
const LONG_TIMEOUT: Duration = Duration::from_secs(40);

ranks_test!(
    a_rank_that_leaves_is_named_to_who_waits_for_it_in_a_graph,
    2,
    {
        let group = join()?;
        let (mut x, mut graphed) = (ones(1000), GraphedStep::new(0)?);
        for step in 0..8 {
            if step == 6 && group.rank() == 1 && std::env::var_os("LEAVES").is_some() {
                return Ok(());
            }
            let began = Instant::now();
            let made = graphed.run(|| group.all_reduce_tensor(&mut x, ReduceOp::Avg)).map(drop);
            if let Err(error) = made.and_then(|()| nccl::settle(GPU)) {
                ensure!(
                    began.elapsed() < LONG_TIMEOUT / 2,
                    "error only after {:?}: {error}",
                    began.elapsed()
                );
                println!("error in step {step}: {error}");
                let text = graphed.run(|| Ok::<_, TorchError>(())).unwrap_err().to_string();
                ensure!(text == error.to_string(), "and nothing is launched any more: {text}");
                return Ok(());
            }
        }
        println!("succeeded: {}", graphed.is_recorded());
    },
    |ranks| {
        let library = StandIn::new()?;
        let ranks = library.with(&ranks).env([("DRUMLINE_TIMEOUT", format!("{}s", LONG_TIMEOUT.as_secs()))]);
        let said = |ranks: Ranks| -> Result<String> {
            Ok(String::from_utf8_lossy(&ranks.pass()?.ranks[0].stdout).into_owned())
        };
        let text = said(ranks.clone().env([("LEAVES", "1")]))?;
        for words in [
            "error in step 6: rank 0 called off group `world`: a CUDA graph with 1 collectives (bucket or call 0: all_reduce(1000 f32, avg) at ",
            "nccl_faults.rs",
            ") has not ended on the GPU, and rank 1 has left",
        ] {
            assert!(text.contains(words), "no `{words}`: {text}");
        }
        assert!(said(ranks)?.contains("succeeded: true"), "control");
    }
);
