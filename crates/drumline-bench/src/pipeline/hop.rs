//! How long a message takes from a rank to the next one.

use std::time::{Duration, Instant};

use drumline::ProcessGroup;
use drumline::engine::pipeline::{Links, Order, Schedule, Sleeper};

use super::median;

const TURNS: usize = 20;

/// The time of a message of this size from rank to rank, in seconds: it travels to the last rank and back. All ranks call it.
pub(super) fn measure(group: &ProcessGroup, bytes: usize) -> anyhow::Result<f64> {
    let hops = 2 * (group.size() - 1);
    if hops == 0 {
        return Ok(0.0);
    }
    let plan = Order::from(Schedule::GPipe).plan(group.size(), 1)?;
    let mut links = Links::new(group, plan.program())?;
    let mut sleeper = Sleeper::new(&mut links, |_| Duration::ZERO, bytes);
    let mut times = Vec::new();
    for _ in 0..TURNS {
        group.barrier()?;
        let began = Instant::now();
        sleeper.run(&plan, group.rank())?;
        times.push(began.elapsed().as_secs_f64() / hops as f64);
    }
    let mut own = [median(times)];
    group.broadcast(&mut own, 0)?;
    Ok(own[0])
}
