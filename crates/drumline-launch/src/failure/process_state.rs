//! The state of a process that cannot be killed, as the kernel reports it, and where in the kernel it waits.

use std::fmt;
use std::path::Path;

use super::small_file::read_small;

/// A process as `/proc` shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessState {
    /// Its name.
    pub name: String,
    /// Its state letter: `D` is an uninterruptible wait.
    pub state: char,
    /// The kernel function in which it waits, if `/proc` shows it.
    pub waits_in: Option<String>,
}

impl ProcessState {
    /// Reads the state of a process under `proc` (usually `/proc`); `None` if it is gone.
    pub fn read(proc: &Path, pid: u32) -> Option<Self> {
        let folder = proc.join(pid.to_string());
        let stat = read_small(&folder.join("stat"))?;
        Self::parse(&stat, read_small(&folder.join("wchan")).as_deref())
    }

    /// Parses `stat`, which is `pid (name) state …`. The name may contain anything, even `) R`.
    fn parse(stat: &str, wchan: Option<&str>) -> Option<Self> {
        let (before, after) = stat.rsplit_once(") ")?;
        let (_, name) = before.split_once('(')?;
        let waits_in = wchan.map(str::trim).filter(|text| !matches!(*text, "" | "0")).map(str::to_owned);
        let name = name.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect();
        Some(Self { name, state: after.chars().next()?, waits_in })
    }
}

impl fmt::Display for ProcessState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let meaning = match self.state {
            'D' => "waits in the kernel, cannot be interrupted",
            'R' => "running",
            'S' => "sleeping",
            'T' | 't' => "stopped",
            'Z' => "dead, not yet reaped",
            'X' => "dead",
            'I' => "idle",
            _ => "unknown",
        };
        write!(f, "`{}` in state {} ({meaning}", self.name, self.state)?;
        self.waits_in.iter().try_for_each(|place| write!(f, ", in {place}"))?;
        f.write_str(")")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stuck_process_is_described() {
        let stuck = ProcessState::parse("77 (cp ) R (x) D 1 77 77 0", Some("fuse_get_req\n")).unwrap();
        let text = "`cp ) R (x` in state D (waits in the kernel, cannot be interrupted, in fuse_get_req)";
        assert_eq!(stuck.to_string(), text);
        let running = ProcessState::parse("77 (sh) R 1", Some("0")).unwrap();
        assert_eq!(running.to_string(), "`sh` in state R (running)");
        for stat in ["", "77", "77 (sh)", "77 (sh) "] {
            assert_eq!(ProcessState::parse(stat, None), None, "{stat}");
        }
    }

    #[test]
    fn our_own_process_is_found_and_a_missing_one_is_not() {
        let proc = Path::new("/proc");
        assert!(ProcessState::read(proc, std::process::id()).is_some());
        assert_eq!(ProcessState::read(proc, u32::MAX), None);
    }
}
