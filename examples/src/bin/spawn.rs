//! Fits a line through points on several processes of this program: each rank has points of its own, and gradients are
//! averaged in every step, so that all ranks have the same line.
//!
//! ```text
//!   cargo run --release -p drumline-examples --bin spawn           4 ranks
//!   cargo run --release -p drumline-examples --bin spawn -- 2      2 ranks
//! ```
//! Ctrl-C stops all ranks after the same step. Under `drumline run --nproc-per-node 4` the launcher's ranks are used.
#![forbid(unsafe_code)]

use drumline::launch::Spawn;
use drumline::{CommError, ReduceOp, StopRequest, Worker};

const POINTS_EACH: usize = 100;
const STEPS: usize = 2000;
const LEARNING_RATE: f64 = 0.5;

fn main() -> anyhow::Result<()> {
    let ranks = std::env::args().nth(1).map_or(Ok(4), |ranks| ranks.parse())?;
    let stop = StopRequest::listen()?;
    Spawn::new(ranks).forward_stop(&stop).run(|worker| fit(&worker, &stop))?;
    // Only the parent process gets here.
    Ok(())
}

/// What each rank does.
fn fit(worker: &Worker, stop: &StopRequest) -> Result<(), CommError> {
    let group = worker.group()?;
    let points = points(worker);
    let [mut slope, mut offset] = [0.0, 0.0];
    let mut steps = 0;
    while steps < STEPS && !stop.agreed(&group)? {
        let mut gradient = gradient(&points, slope, offset);
        group.all_reduce(&mut gradient, ReduceOp::Avg)?;
        slope -= LEARNING_RATE * gradient[0];
        offset -= LEARNING_RATE * gradient[1];
        steps += 1;
    }
    println!(
        "rank {} of {}: y = {slope:.3} x + {offset:.3} after {steps} steps",
        worker.rank, worker.world_size
    );
    Ok(())
}

/// Every `world_size`-th point of the line y = 3 x + 1 from x = 0 to 1.
fn points(worker: &Worker) -> Vec<(f64, f64)> {
    let all = POINTS_EACH * worker.world_size;
    let own = (worker.rank..all).step_by(worker.world_size);
    own.map(|i| i as f64 / all as f64).map(|x| (x, 3.0 * x + 1.0)).collect()
}

/// The gradient of the mean squared error, for slope and offset.
fn gradient(points: &[(f64, f64)], slope: f64, offset: f64) -> [f64; 2] {
    let errors = points.iter().map(|(x, y)| (x, slope * x + offset - y));
    let sums = errors.fold([0.0, 0.0], |[a, b], (x, error)| [a + 2.0 * error * x, b + 2.0 * error]);
    sums.map(|sum| sum / points.len() as f64)
}
