//! Failures in sharded training reach every rank, and nothing hangs.

use std::time::{Duration, Instant};

use anyhow::Result;
use drumline_comm::ProcessGroup;
use drumline_parallel::{Accumulation, GradSync, ParallelError, ShardOptions};
use drumline_torch::autograd_function;
use rank_test::{Exit, Ranks, ranks_test};
use tch::Tensor;
use tch::nn::Module;

use super::net::{assert_close, loss, samples};
use super::shard::{Training, adam};
use super::shard_windows::WAYS;

/// How soon the other ranks have ended, on a busy machine.
const PROMPT: Duration = Duration::from_secs(3);
const LONGEST: Duration = Duration::from_secs(60);
const WAY: &str = "DRUMLINE_TEST_WAY";
const FATE: &str = "DRUMLINE_TEST_FATE";

/// Trains until rank 1 dies in step 3.
fn until_a_rank_dies() -> Result<()> {
    let group = ProcessGroup::from_env()?;
    let mut training = Training::new(&group, WAYS[std::env::var(WAY)?.parse::<usize>()?](), adam)?;
    let fate = std::env::var(FATE)?;
    for step in 0..6 {
        if step == 3 && group.rank() == 1 && fate != "lives" {
            println!("waits");
            std::thread::sleep(if fate == "panics" { Duration::from_millis(200) } else { LONGEST });
            panic!("on purpose");
        }
        if let Err(error) = training.step(&group, step, 2, Some(1.0)) {
            println!("error: {error}");
            return Ok(());
        }
    }
    println!("trained");
    Ok(())
}

/// Rank 1 dies, and the others end soon with an error that names it.
fn others_end(ranks: &Ranks, way: usize, fate: &str) -> Result<()> {
    let running = ranks.clone().env([(WAY, way.to_string().as_str()), (FATE, fate)]).start()?;
    running.wait_for_line(1, "waits", LONGEST)?;
    if fate == "killed" {
        running.kill(1)?;
    }
    running.wait_rank(1, LONGEST)?;
    let died = Instant::now();
    for rank in [0, 2] {
        assert_eq!(running.wait_rank(rank, PROMPT)?, Exit::Code(0), "way {way}, {fate}");
    }
    assert!(died.elapsed() < PROMPT, "way {way}, {fate}: {:?}", died.elapsed());
    let report = running.wait_all(LONGEST)?;
    for rank in [0, 2] {
        let stdout = String::from_utf8_lossy(&report.ranks[rank].stdout);
        let named = stdout.contains("error: ") && stdout.contains("rank 1");
        assert!(named, "way {way}, {fate}: {report}");
    }
    Ok(())
}

ranks_test!(a_rank_that_is_killed_ends_the_others, 3, { until_a_rank_dies()? }, |ranks| {
    (0..WAYS.len()).try_for_each(|way| others_end(&ranks, way, "killed"))?;
    let control = ranks.env([(WAY, "2"), (FATE, "lives")]).pass()?;
    assert!(control.ranks.iter().all(|rank| String::from_utf8_lossy(&rank.stdout).contains("trained")));
});

ranks_test!(a_rank_that_panics_ends_the_others, 3, { until_a_rank_dies()? }, |ranks| {
    (0..WAYS.len()).try_for_each(|way| others_end(&ranks, way, "panics"))?;
});

/// What happens in the middle of a backward.
#[derive(Debug, Clone, Copy, PartialEq)]
enum InBackward {
    Nothing,
    Error,
    Panic,
}

/// The input, whose backward fails.
fn failing(input: &Tensor, in_backward: InBackward) -> Result<Tensor> {
    let outputs = autograd_function(
        &[input],
        |_, inputs| Ok(vec![inputs[0] * 1.0]),
        move |_, grads| match in_backward {
            InBackward::Nothing => Ok(grads),
            InBackward::Error => Err("an error on purpose".into()),
            InBackward::Panic => panic!("a panic on purpose"),
        },
    )?;
    Ok(outputs.into_iter().next().expect("there is one output"))
}

/// A forward and backward whose last layer has its gradient when the backward fails.
fn micro_batch(
    training: &Training,
    rank: usize,
    in_backward: InBackward,
    sync: GradSync,
) -> std::result::Result<(), ParallelError> {
    let (x, y) = samples(rank as i64 * 8..rank as i64 * 8 + 8);
    let net = &training.net;
    let forward = || net.extra.forward(&failing(&net.forward(&x), in_backward).unwrap());
    let output = training.engine.forward_with(sync, forward)?;
    training.engine.backward(&loss(&output, &y), sync)
}

ranks_test!(a_backward_that_fails_on_one_rank_ends_the_step_of_all_and_the_next_one, 3, {
    let group = ProcessGroup::from_env()?;
    for options in WAYS {
        for failure in [InBackward::Error, InBackward::Panic] {
            let training = Training::new(&group, options(), adam)?;
            micro_batch(&training, group.rank(), InBackward::Nothing, GradSync::Reduce)?;
            let own = if group.rank() == 1 { failure } else { InBackward::Nothing };
            group.barrier()?;
            let began = Instant::now();
            let error = micro_batch(&training, group.rank(), own, GradSync::Reduce).unwrap_err().to_string();
            assert!(error.contains("on purpose"), "{error}");
            assert!(group.rank() == 1 || error.contains("rank 1"), "{error}");
            let next = micro_batch(&training, group.rank(), InBackward::Nothing, GradSync::Reduce);
            let next = next.unwrap_err().to_string();
            assert!(next.contains("on purpose"), "the step after it is not silently wrong: {next}");
            assert!(began.elapsed() < PROMPT, "{failure:?}: {:?}", began.elapsed());
            group.barrier()?; // the program's own group can still be used
        }
    }
});

/// Parameters after steps, before which all ranks may fail in a backward that only accumulates.
fn after_a_failure(group: &ProcessGroup, options: ShardOptions, failure: InBackward) -> Result<Vec<Tensor>> {
    let options = ShardOptions { accumulation: Some(Accumulation::All), ..options };
    let mut training = Training::new(group, options, adam)?;
    for step in 0..3 {
        if step == 1 && failure != InBackward::Nothing {
            training.optimizer.zero_grad()?;
            let failed = micro_batch(&training, group.rank(), failure, GradSync::Accumulate);
            assert!(failed.unwrap_err().to_string().contains("on purpose"));
        }
        training.step(group, step, 2, None)?;
    }
    let names = drumline_torch::parameters(&training.vs).into_iter().map(|named| named.name);
    names.map(|name| Ok(training.engine.full(&name)?)).collect()
}

ranks_test!(a_backward_that_fails_while_gradients_are_accumulated_leaves_no_trace, 2, {
    let group = ProcessGroup::from_env()?;
    for options in WAYS {
        let plain = after_a_failure(&group, options(), InBackward::Nothing)?;
        for failure in [InBackward::Error, InBackward::Panic] {
            assert_close(&after_a_failure(&group, options(), failure)?, &plain, 0.0);
        }
    }
});
