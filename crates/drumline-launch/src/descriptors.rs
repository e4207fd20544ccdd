//! Room for the descriptors of many workers: each costs the launcher up to seven, and the usual limit is 1024.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// A pidfd, two pipes, two log files and two files of chosen lines.
const EACH: u64 = 7;

/// For whatever else the launcher opens meanwhile.
const SPARE: u64 = 64;

/// The launcher's own limit, raised where that was needed until this is dropped.
#[derive(Debug)]
pub(crate) struct Room {
    /// What was there before, and what the workers are to have: programs that use `select` break above 1024.
    pub(crate) before: Rlimit,
    raised: bool,
}

impl Room {
    /// Makes room for `num_workers` more workers, as far as it may.
    pub(crate) fn make(num_workers: usize) -> Self {
        let before = getrlimit(Resource::Nofile);
        let open = std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
        let needed = open as u64 + num_workers as u64 * EACH + SPARE;
        let allowed = before.maximum.map_or(needed, |maximum| maximum.min(needed));
        let higher = Rlimit { current: Some(allowed), maximum: before.maximum };
        let raised = before.current.is_some_and(|current| current < allowed)
            && setrlimit(Resource::Nofile, higher).is_ok();
        Self { before, raised }
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        if self.raised {
            let _ = setrlimit(Resource::Nofile, self.before);
        }
    }
}
