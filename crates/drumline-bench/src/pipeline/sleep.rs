//! Stages that sleep: what a schedule costs on real ranks, with more ranks than cores.

use std::num::NonZeroU64;
use std::time::{Duration, Instant};

use drumline::engine::pipeline::{Links, Sleeper};
use drumline::{ProcessGroup, ReduceOp};
use drumline_plan::pipeline::{StageTimes, Times};
use serde_json::{Value, json};

use super::{PipelineArgs, hop, median, simulated};

const WARM_UP: usize = 1;

/// Steps of ranks that sleep `time` for a forward of all their stages, for its input gradients and for its weight gradients.
pub(super) fn run(args: &PipelineArgs, group: &ProcessGroup, time: Duration) -> anyhow::Result<Value> {
    // By default the kernel wakes a sleeper up to 50 us late.
    rustix::thread::set_current_timer_slack(NonZeroU64::new(1))?;
    let plan = args.order().plan(group.size(), args.micro_batches)?;
    let seconds = time.as_secs_f64();
    let of_rank = StageTimes { forward: seconds, input: seconds, weight: seconds };
    let times = Times::equal(of_rank, &plan.program().stages, 0.0);
    let ideal = simulated(&plan, &times)?;
    let hop = hop::measure(group, args.message_bytes())?;
    let with_hops = simulated(&plan, &Times { hop, ..times.clone() })?;

    let mut links = Links::new(group, plan.program())?;
    let asked = |work: drumline_plan::pipeline::Work| times.stages[work.stage].of(work.compute);
    let mut sleeper =
        Sleeper::new(&mut links, |work| Duration::from_secs_f64(asked(work)), args.message_bytes());
    let mut makespans = Vec::new();
    for _ in 0..WARM_UP + args.steps {
        group.barrier()?;
        let began = Instant::now();
        sleeper.run(&plan, group.rank())?;
        makespans.push(began.elapsed().as_secs_f64());
    }
    makespans.drain(..WARM_UP);
    let slept: f64 = sleeper.spans().iter().map(|(_, began, ended)| (*ended - *began).as_secs_f64()).sum();
    let mut overslept = [slept / sleeper.spans().iter().map(|(work, ..)| asked(*work)).sum::<f64>()];
    group.all_reduce(&mut makespans, ReduceOp::Max)?;
    group.all_reduce(&mut overslept, ReduceOp::Max)?;
    Ok(json!({
        "step_ms": 1e3 * median(makespans),
        "ideal_ms": 1e3 * ideal,
        "simulated_ms": 1e3 * with_hops,
        "hop_ms": 1e3 * hop,
        "slept_of_asked": overslept[0],
    }))
}
