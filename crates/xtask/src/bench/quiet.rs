//! Is the machine quiet? Read from `/proc/stat` over a short window, before a unit starts.
//!
//! In: two readings of the line `cpu`. Out: the share of time that somebody worked, and the share stolen by the host.

use std::fs;
use std::time::{Duration, Instant};

const WINDOW: Duration = Duration::from_millis(60);
/// Someone else at work: more than this share of all cores.
const BUSY: f64 = 0.15;
/// The host gives our cores to others: more than this share.
const STOLEN: f64 = 0.05;

/// Shares of a window, 0 to 1.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Load {
    busy: f64,
    stolen: f64,
}

impl Load {
    fn is_quiet(self) -> bool {
        self.busy <= BUSY && self.stolen <= STOLEN
    }
}

/// Waits for a quiet window, for as long as `patience`; says whether one came.
pub(crate) fn wait(patience: Duration) -> bool {
    let end = Instant::now() + patience;
    loop {
        match sample() {
            // Without the file nothing can be said; do not hold up the run.
            None => return true,
            Some(load) if load.is_quiet() => return true,
            Some(_) if Instant::now() >= end => return false,
            Some(_) => {}
        }
    }
}

fn sample() -> Option<Load> {
    let before = ticks(&fs::read_to_string("/proc/stat").ok()?)?;
    std::thread::sleep(WINDOW);
    let after = ticks(&fs::read_to_string("/proc/stat").ok()?)?;
    Some(load(before, after))
}

/// user, nice, system, idle, iowait, irq, softirq, steal
type Ticks = [u64; 8];

fn ticks(stat: &str) -> Option<Ticks> {
    let line = stat.lines().find(|line| line.starts_with("cpu "))?;
    let numbers: Vec<u64> = line.split_whitespace().skip(1).map_while(|n| n.parse().ok()).take(8).collect();
    numbers.try_into().ok()
}

fn load(before: Ticks, after: Ticks) -> Load {
    let spent: Vec<f64> = after.iter().zip(before).map(|(a, b)| a.saturating_sub(b) as f64).collect();
    let total = spent.iter().sum::<f64>().max(1.0);
    let idle = spent[3] + spent[4];
    Load { busy: (total - idle - spent[7]) / total, stolen: spent[7] / total }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_line_is_read() {
        let stat = "cpu  10 1 5 100 2 0 3 4 0 0\ncpu0 10 1 5 100 2 0 3 4 0 0\n";
        assert_eq!(ticks(stat), Some([10, 1, 5, 100, 2, 0, 3, 4]));
        assert_eq!(ticks("intr 1 2 3"), None);
    }

    #[test]
    fn work_and_theft_are_distinguished() {
        let idle = load([0; 8], [0, 0, 0, 12, 0, 0, 0, 0]);
        let busy = load([0; 8], [6, 0, 0, 6, 0, 0, 0, 0]);
        let stolen = load([0; 8], [0, 0, 0, 9, 0, 0, 0, 3]);
        assert_eq!([idle, busy, stolen].map(Load::is_quiet), [true, false, false]);
        assert_eq!((busy.busy, stolen.busy, stolen.stolen), (0.5, 0.0, 0.25));
    }
}
