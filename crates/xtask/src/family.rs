//! A process and all that it and its descendants started, as far as `/proc` shows them.

use rustix::process::{Pid, Signal, kill_process};
use std::fs;

/// Kills a process and all it started; each is signalled by its own id.
pub(crate) fn kill_with_descendants(pid: u32) {
    for pid in family(pid).into_iter().filter_map(|pid| Pid::from_raw(i32::try_from(pid).ok()?)) {
        // It may have ended by itself meanwhile.
        let _ = kill_process(pid, Signal::KILL);
    }
}

/// A process and all that it and its descendants started.
pub(crate) fn family(pid: u32) -> Vec<u32> {
    let parents = parents();
    let mut family = vec![pid];
    let mut next = 0;
    while let Some(&parent) = family.get(next) {
        family.extend(parents.iter().filter(|(_, p)| *p == parent).map(|(child, _)| *child));
        next += 1;
    }
    family
}

/// (process, parent) of all that run.
fn parents() -> Vec<(u32, u32)> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter_map(|pid: u32| Some((pid, parent(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)?)))
        .collect()
}

/// The second field after the name, which stands in brackets and may hold anything.
fn parent(stat: &str) -> Option<u32> {
    stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};
    use std::time::{Duration, Instant};

    #[test]
    fn the_name_of_a_process_may_hold_brackets() {
        assert_eq!(parent("17 (a) b) S 4 17 17"), Some(4));
        assert_eq!(parent("nothing"), None);
    }

    fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
        let end = Instant::now() + Duration::from_secs(20);
        while !is_so() {
            assert!(Instant::now() < end, "{what}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn a_process_is_killed_with_its_children() {
        let mut shell = Command::new("sh");
        let mut shell = shell.args(["-c", "sleep 60 & wait"]).stdout(Stdio::null()).spawn().unwrap();
        wait_until("no child was started", || family(shell.id()).len() == 2);
        let child = family(shell.id())[1];
        kill_with_descendants(shell.id());
        shell.wait().unwrap();
        let stat = || fs::read_to_string(format!("/proc/{child}/stat")).unwrap_or_default();
        wait_until("the child lives on", || stat().is_empty() || stat().contains(") Z "));
    }
}
