//! Raises the launcher's limit of open files for many workers: each needs up to seven, and the usual limit is 1024.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// For each worker: a pidfd, two pipes, two log files and two files of filtered lines.
const PER_WORKER: u64 = 7;

/// For everything else that the launcher opens.
const SPARE: u64 = 64;

/// The launcher's own limit, raised if necessary until this is dropped.
#[derive(Debug)]
pub(crate) struct FdLimit {
    /// The limit before. The workers get this one: programs that use `select` break above 1024.
    pub(crate) before: Rlimit,
    raised: bool,
}

impl FdLimit {
    /// Raises the limit for `num_workers` more workers, as far as permitted.
    pub(crate) fn raise_for(num_workers: usize) -> Self {
        let before = getrlimit(Resource::Nofile);
        let open = std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
        let needed = open as u64 + num_workers as u64 * PER_WORKER + SPARE;
        let allowed = before.maximum.map_or(needed, |maximum| maximum.min(needed));
        let higher = Rlimit { current: Some(allowed), maximum: before.maximum };
        let raised = before.current.is_some_and(|current| current < allowed)
            && setrlimit(Resource::Nofile, higher).is_ok();
        Self { before, raised }
    }
}

impl Drop for FdLimit {
    fn drop(&mut self) {
        if self.raised {
            let _ = setrlimit(Resource::Nofile, self.before);
        }
    }
}
