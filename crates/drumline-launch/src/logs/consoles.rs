//! The launcher's stdout and stderr, which may be the same terminal.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

use rustix::fs::fstat;

use super::Channel;
use super::console::Console;

/// The launcher's stdout and stderr, opened when first used.
#[derive(Debug, Default)]
pub(crate) struct Consoles {
    /// One entry if both are the same, so that a line of one is never written into a line of the other.
    opened: Vec<Console>,
}

impl Consoles {
    pub(crate) fn of(&mut self, channel: Channel) -> &mut Console {
        if self.opened.is_empty() {
            self.opened = open_own();
        }
        let last = self.opened.len() - 1;
        &mut self.opened[if channel == Channel::Out { 0 } else { last }]
    }

    pub(crate) fn flush(&mut self) {
        self.opened.iter_mut().for_each(Console::flush);
    }

    /// When [`tick`](Self::tick) has something to do.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.opened.iter().filter_map(Console::due).min()
    }

    pub(crate) fn tick(&mut self, now: Instant) {
        self.opened.iter_mut().for_each(|console| console.tick(now));
    }

    pub(crate) fn watch(&mut self, epoll: &OwnedFd, data: u64) {
        self.opened.iter_mut().for_each(|console| console.watch(epoll, data));
    }

    pub(crate) fn finish(&mut self) {
        self.opened.iter_mut().for_each(Console::finish);
    }
}

fn open_own() -> Vec<Console> {
    let stdout = io::stdout();
    let stderr = io::stderr();
    let stdout = stdout.as_fd();
    let stderr = stderr.as_fd();
    let place = |fd| fstat(fd).map(|stat| (stat.st_dev, stat.st_ino)).ok();
    let both = if place(stdout) == place(stderr) { vec![stdout] } else { vec![stdout, stderr] };
    both.into_iter().map(Console::open).collect()
}
