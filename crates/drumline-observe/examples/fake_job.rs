//! Writes a run that is none, to look at the page and to measure what following it costs:
//!
//! ```console
//! $ cargo run -p drumline-observe --example fake_job -- DIR 64 10 60      # ranks, events a second of each, seconds
//! $ drumline watch DIR
//! ```
//!
//! Each rank's file is replaced so many times a second, and so many lines of metrics come from each rank.

use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use drumline_observe::fake::FakeRun;

type Trouble = Box<dyn std::error::Error>;

fn main() -> Result<(), Trouble> {
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

fn now() -> Result<f64, Trouble> {
    Ok(SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs_f64())
}
