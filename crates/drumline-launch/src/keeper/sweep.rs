//! Kills the processes that the workers have left behind: every child of this process, then the children of those, and
//! so on.
//!
//! A child keeps its process id until it is reaped, so the wrong process can never be killed.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, getpid, kill_process, waitid};

/// How often to check whether killed processes have ended.
const POLL: Duration = Duration::from_millis(2);

/// Whether this process has children.
pub(crate) fn has_children() -> bool {
    !children().is_empty()
}

/// Kills and reaps every process below this one. Returns the ids of those that still exist after `timeout`.
pub(crate) fn sweep(timeout: Duration) -> Vec<u32> {
    let until = Instant::now() + timeout;
    loop {
        let children = children();
        if children.is_empty() || Instant::now() >= until {
            return children.into_iter().map(number).collect();
        }
        for child in &children {
            // An error means that it is a zombie, which is reaped below.
            let _ = kill_process(*child, Signal::KILL);
        }
        if reap(&children) == 0 {
            std::thread::sleep(POLL);
        }
    }
}

/// Reaps children that have ended by themselves, except the `owned` ones, which have another owner that waits for them.
pub(crate) fn reap_all_but(owned: &[u32]) {
    let others: Vec<_> = children().into_iter().filter(|pid| !owned.contains(&number(*pid))).collect();
    reap(&others);
}

fn number(pid: Pid) -> u32 {
    pid.as_raw_nonzero().get().unsigned_abs()
}

/// Reaps those of `children` that have ended. Returns how many.
fn reap(children: &[Pid]) -> usize {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
    let ended = |child: &&Pid| matches!(waitid(WaitId::Pid(**child), options), Ok(Some(_)));
    children.iter().filter(ended).count()
}

/// The children of all threads of this process.
fn children() -> Vec<Pid> {
    // Some kernels do not list children. Then look at the parent of every process.
    if !Path::new("/proc/thread-self/children").exists() {
        return children_by_parent();
    }
    let Ok(threads) = fs::read_dir("/proc/self/task") else { return Vec::new() };
    let lists =
        threads.flatten().filter_map(|thread| fs::read_to_string(thread.path().join("children")).ok());
    let pids =
        lists.flat_map(|list| list.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<_>>());
    pids.filter_map(Pid::from_raw).collect()
}

fn children_by_parent() -> Vec<Pid> {
    let own = format!("PPid:\t{}\n", number(getpid()));
    let is_child = |pid: &i32| {
        fs::read_to_string(format!("/proc/{pid}/status")).is_ok_and(|status| status.contains(&own))
    };
    let pids = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(is_child).filter_map(Pid::from_raw).collect()
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn children_are_found_either_way() {
        let mut child = Command::new("sleep").arg("30").spawn().unwrap();
        let pid = Pid::from_child(&child);
        assert!(children().contains(&pid) && children_by_parent().contains(&pid));
        reap_all_but(&[]);
        assert!(children().contains(&pid), "it still runs");
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!children().contains(&pid));
    }
}
