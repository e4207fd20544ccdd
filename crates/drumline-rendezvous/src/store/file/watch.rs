//! Waits for changes of a file.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

/// An inotify watch; if the system grants none, waiting is just a pause.
#[derive(Debug)]
pub(super) struct Watch(Option<OwnedFd>);

impl Watch {
    /// Watches what is written to a file.
    pub(super) fn file(path: &Path) -> Watch {
        Self::new(path, WatchFlags::MODIFY)
    }

    /// Watches for new files in a folder.
    pub(super) fn folder(path: &Path) -> Watch {
        Self::new(path, WatchFlags::CREATE | WatchFlags::MOVED_TO)
    }

    fn new(path: &Path, flags: WatchFlags) -> Watch {
        let watch = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).ok();
        Watch(watch.filter(|watch| inotify::add_watch(watch, path, flags).is_ok()))
    }

    /// Returns after a change since the last call, or after `timeout`.
    pub(super) fn wait(&self, timeout: Duration) {
        let Some(watch) = &self.0 else { return std::thread::sleep(timeout) };
        let limit = Timespec::try_from(timeout).ok();
        let woken = poll(&mut [PollFd::new(watch, PollFlags::IN)], limit.as_ref());
        if woken.is_ok_and(|count| count > 0) {
            let mut buffer = [const { MaybeUninit::uninit() }; 4096];
            let mut events = inotify::Reader::new(watch, &mut buffer);
            while events.next().is_ok() {}
        }
    }
}
