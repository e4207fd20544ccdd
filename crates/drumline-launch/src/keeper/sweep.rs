//! Kills what the workers have left: every process that has become a child of ours, and then their children, and so on.
//!
//! A child keeps its number until we have waited for it, so that nobody else can be hit.

use std::fs;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};

/// Time between looks at processes that have been killed and are not gone yet.
const LOOK: Duration = Duration::from_millis(2);

/// Whether this process has children.
pub(crate) fn has_children() -> bool {
    !children().is_empty()
}

/// Kills and reaps every process below this one; the ids of those that are still there after `patience`.
pub(crate) fn sweep(patience: Duration) -> Vec<u32> {
    let until = Instant::now() + patience;
    loop {
        let children = children();
        if children.is_empty() || Instant::now() >= until {
            return children.iter().map(|pid| pid.as_raw_nonzero().get().unsigned_abs()).collect();
        }
        for child in &children {
            // An error: it is a zombie, which the waiting below takes away.
            let _ = kill_process(*child, Signal::KILL);
        }
        if reap(&children) == 0 {
            std::thread::sleep(LOOK);
        }
    }
}

/// Takes away those of `children` that have ended; how many.
fn reap(children: &[Pid]) -> usize {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
    let ended = |child: &&Pid| matches!(waitid(WaitId::Pid(**child), options), Ok(Some(_)));
    children.iter().filter(ended).count()
}

/// The children of all threads of this process.
fn children() -> Vec<Pid> {
    let Ok(threads) = fs::read_dir("/proc/self/task") else { return Vec::new() };
    let lists =
        threads.flatten().filter_map(|thread| fs::read_to_string(thread.path().join("children")).ok());
    let pids =
        lists.flat_map(|list| list.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<_>>());
    pids.filter_map(Pid::from_raw).collect()
}
