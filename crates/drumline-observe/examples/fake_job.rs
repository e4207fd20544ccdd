//! Writes a fake run, to look at the page and to measure what following a run costs:
//!
//! ```console
//! $ cargo run -p drumline-observe --example fake_job -- DIR 64 10 60      # ranks, events per second of each, seconds
//! $ drumline watch DIR
//! ```
//!
//! `RATE` times a second, each rank's file is replaced and each rank adds a line of metrics.

use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use drumline_observe::fake::FakeRun;

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let mut args = std::env::args_os().skip(1);
    let folder = PathBuf::from(args.next().ok_or("no folder; try: fake_job DIR RANKS RATE SECONDS")?);
    let mut number = |default: u64| {
        let given = args.next().map(|arg| arg.to_string_lossy().parse::<u64>());
        given.unwrap_or(Ok(default))
    };
    let (num_ranks, rate, seconds) = (number(4)?, number(10)?.max(1), number(60)?);
    let mut run = FakeRun::create(&folder, usize::try_from(num_ranks)?)?;
    let begin = Instant::now();
    for tick in 1..=rate * seconds {
        for _ in 0..num_ranks {
            run.step()?;
        }
        run.write_ranks(now()?)?;
        let next = Duration::from_secs(1) * u32::try_from(tick)? / u32::try_from(rate)?;
        std::thread::sleep(next.saturating_sub(begin.elapsed()));
    }
    run.end("finished", None)?;
    Ok(run.write_ranks(now()?)?)
}

fn now() -> Result<f64, Failure> {
    Ok(SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs_f64())
}
