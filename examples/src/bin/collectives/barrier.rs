//! The barrier has no data to show, so its picture shows time: when each rank came to it, and when it left.

use std::thread::sleep;
use std::time::{Duration, SystemTime};

use anyhow::ensure;
use drumline_comm::ProcessGroup;

use crate::picture::Painter;

/// Each rank comes this much later than the rank before.
const LATER: Duration = Duration::from_millis(20);

pub(crate) fn show(group: &ProcessGroup, painter: &Painter) -> anyhow::Result<()> {
    group.barrier()?; // so that all start together
    sleep(LATER * group.rank() as u32);
    let came = now()?;
    group.barrier()?;
    let went = now()?;

    let times = group.all_gather_object(&(came, went))?;
    let first = times.iter().map(|(came, _)| *came).min().unwrap_or(came);
    let last = times.iter().map(|(came, _)| *came).max().unwrap_or(came);
    let since_first: Vec<_> =
        times.iter().map(|(came, went)| (*came - first, went.saturating_sub(first))).collect();
    painter.barrier(&since_first);
    let too_early = times.iter().position(|(_, went)| *went < last);
    // Clocks of different machines cannot be compared as finely as this.
    ensure!(too_early.is_none() || group.num_nodes() > 1, "rank {too_early:?} left before the last one came");
    Ok(())
}

/// The time of day, which all processes of a machine share.
fn now() -> anyhow::Result<Duration> {
    Ok(SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?)
}
