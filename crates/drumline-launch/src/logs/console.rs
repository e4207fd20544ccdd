//! The launcher's own stdout or stderr. Writing never waits long for its reader.
//!
//! ```text
//!   lines ─▶ write what fits ─▶ the rest waits here (at most LIMIT) ─▶ written when there is room
//!                                  └▶ full, and no room within PATIENCE: lines are dropped and counted until
//!                                     half of the rest is written; then one line says how many were dropped
//! ```
//!
//! On a terminal, bars are redrawn below the lines (`region`). While the reader is slow, drawings are skipped, not
//! lines.
//!
//! So a reader that keeps up with a few hundred KB a second slows the workers down and misses nothing. A sleeping
//! reader or a suspended terminal costs the workers one short pause, and [`LIMIT`] of memory. A reader that is gone
//! costs nothing.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::fs::{FileType, Mode, OFlags, fstat};
use rustix::io::Errno;
use rustix::net::SendFlags;
use rustix::termios::tcgetwinsize;

use super::region::{Owner, Region};

/// How many bytes may wait for the reader.
const LIMIT: usize = 2 << 20;

/// How long the pump waits for room before it drops lines.
const PATIENCE: Duration = Duration::from_millis(200);

/// At the end of a job: how long to wait for a reader that takes nothing, and for one that takes little.
const LAST_PAUSE: Duration = Duration::from_millis(500);
const LAST_WAIT: Duration = Duration::from_secs(5);

/// How the descriptor is written to without blocking.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// A pipe or a terminal, reopened for us only, because the flags of the given descriptor are shared with others. Or
    /// a file, which has no reader to wait for.
    Plain,
    Socket,
}

/// One output where lines are shown.
#[derive(Debug)]
pub(crate) struct Console {
    /// `None` when its reader is gone.
    fd: Option<OwnedFd>,
    kind: Kind,
    /// A buffer for new lines, reused by the next call.
    fresh: Vec<u8>,
    waiting: Vec<u8>,
    /// How many bytes of `waiting` are written.
    written: usize,
    dropped: usize,
    /// Whether the pump's epoll watches it for room.
    is_watched: bool,
    region: Region,
}

impl Console {
    pub(crate) fn open(fd: BorrowedFd<'_>) -> Self {
        let kind = file_type(fd).unwrap_or(FileType::Unknown);
        let fd = match kind {
            FileType::Fifo | FileType::CharacterDevice => reopen(fd).or_else(|_| fd.try_clone_to_owned()),
            _ => fd.try_clone_to_owned(),
        };
        let kind = if kind == FileType::Socket { Kind::Socket } else { Kind::Plain };
        Self {
            fd: fd.ok(),
            kind,
            fresh: Vec::new(),
            waiting: Vec::new(),
            written: 0,
            dropped: 0,
            is_watched: false,
            region: Region::default(),
        }
    }

    fn is_gone(&self) -> bool {
        self.fd.is_none()
    }

    /// Registers itself with `epoll`, as `data`, while something waits for room.
    pub(crate) fn watch(&mut self, epoll: &OwnedFd, data: u64) {
        // A closed descriptor is removed from epoll automatically.
        let Some(fd) = &self.fd else { return };
        let waits = self.num_waiting() > 0;
        if waits == self.is_watched {
            return;
        }
        // After an error it is not watched: the next line tries to write again.
        self.is_watched = if waits {
            epoll::add(epoll, fd, epoll::EventData::new_u64(data), epoll::EventFlags::OUT).is_ok()
        } else {
            epoll::delete(epoll, fd).is_err()
        };
    }

    fn num_waiting(&self) -> usize {
        self.waiting.len() - self.written
    }

    /// Shows the whole lines that `make` appends.
    pub(crate) fn print_with(&mut self, make: impl FnOnce(&mut Vec<u8>)) {
        if self.is_gone() {
            return;
        }
        let mut lines = std::mem::take(&mut self.fresh);
        lines.clear();
        make(&mut lines);
        self.print(&lines);
        self.fresh = lines;
    }

    /// Sets the rows of `owner`, in which bars are shown; an empty list removes them.
    pub(crate) fn set_rows(&mut self, owner: Owner, rows: Vec<Vec<u8>>, now: Instant) {
        self.region.set(owner, rows, now);
    }

    /// When [`tick`](Self::tick) has something to do.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.region.due().filter(|_| !self.is_gone())
    }

    /// Draws the bars that are due.
    pub(crate) fn tick(&mut self, now: Instant) {
        if self.due().is_some_and(|due| due <= now) {
            self.draw(now);
        }
    }

    fn draw(&mut self, now: Instant) {
        self.flush();
        let Some(fd) = &self.fd else { return };
        let mut drawing = Vec::new();
        match self.num_waiting() {
            0 => self.region.draw(tcgetwinsize(fd).ok(), now, &mut drawing),
            _ => return self.region.postpone(now),
        }
        self.add(&drawing);
    }

    /// Writes lines where the bars begin, and redraws the bars below them.
    fn print(&mut self, lines: &[u8]) {
        if lines.is_empty() || self.is_gone() {
            return;
        }
        if self.dropped > 0 && self.num_waiting() <= LIMIT / 2 {
            let notice =
                format!("[drumline]: {} lines were not shown: nobody read them in time\n", self.dropped);
            self.dropped = 0;
            self.add_lines(notice.as_bytes());
        }
        if self.dropped > 0 || !self.has_room(lines.len()) {
            self.dropped += lines.iter().filter(|byte| **byte == b'\n').count();
        } else {
            self.add_lines(lines);
        }
        if !self.region.is_empty() {
            self.draw(Instant::now());
        }
    }

    fn add_lines(&mut self, lines: &[u8]) {
        let mut text = Vec::new();
        self.region.erase(&mut text);
        if text.is_empty() {
            return self.add(lines);
        }
        text.extend_from_slice(lines);
        self.add(&text);
    }

    /// Writes what it can and keeps the rest.
    fn add(&mut self, lines: &[u8]) {
        self.flush();
        let written = if self.num_waiting() == 0 { self.write(lines) } else { 0 };
        if !self.is_gone() {
            self.waiting.extend_from_slice(&lines[written..]);
        }
    }

    fn has_room(&mut self, len: usize) -> bool {
        let deadline = Instant::now() + PATIENCE;
        while self.num_waiting() > 0 && self.num_waiting() + len > LIMIT {
            if !self.wait(deadline.saturating_duration_since(Instant::now())) {
                return false;
            }
            self.flush();
        }
        true
    }

    /// Writes as much of the waiting bytes as fits now.
    pub(crate) fn flush(&mut self) {
        let waiting = std::mem::take(&mut self.waiting);
        self.written += self.write(&waiting[self.written..]);
        if self.is_gone() || self.written == waiting.len() {
            self.written = 0;
            return;
        }
        self.waiting = waiting;
        if self.written >= LIMIT / 2 {
            self.waiting.drain(..self.written);
            self.written = 0;
        }
    }

    /// Writes without waiting. Returns how many bytes fit.
    fn write(&mut self, bytes: &[u8]) -> usize {
        let mut written = 0;
        while let Some(fd) = self.fd.as_ref().filter(|_| written < bytes.len()) {
            let rest = &bytes[written..];
            let result = match self.kind {
                Kind::Socket => rustix::net::send(fd, rest, SendFlags::DONTWAIT | SendFlags::NOSIGNAL),
                Kind::Plain => rustix::io::write(fd, rest),
            };
            match result {
                Ok(len) => written += len,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                Err(error) => {
                    tracing::debug!(%error, "the reader of the console is gone");
                    self.fd = None;
                }
            }
        }
        written
    }

    /// Waits for room. Returns whether there may be some.
    fn wait(&self, within: Duration) -> bool {
        let (Some(fd), Ok(timeout)) = (&self.fd, Timespec::try_from(within)) else { return false };
        !within.is_zero() && poll(&mut [PollFd::new(fd, PollFlags::OUT)], Some(&timeout)) != Ok(0)
    }

    /// Waits for the reader of the last lines, for a bounded time.
    pub(super) fn finish(&mut self) {
        let deadline = Instant::now() + LAST_WAIT;
        if !self.region.is_empty() {
            self.draw(Instant::now());
        }
        self.flush();
        while self.num_waiting() > 0 && Instant::now() < deadline && self.wait(LAST_PAUSE) {
            self.flush();
        }
    }
}

fn file_type(fd: BorrowedFd<'_>) -> rustix::io::Result<FileType> {
    Ok(FileType::from_raw_mode(fstat(fd)?.st_mode))
}

fn reopen(fd: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    Ok(rustix::fs::open(path, flags, Mode::empty())?)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    fn lines(from: usize, to: usize) -> Vec<u8> {
        (from..to).flat_map(|n| format!("line {n:060}\n").into_bytes()).collect()
    }

    fn pipe() -> (File, OwnedFd) {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        (reader.into(), writer)
    }

    #[test]
    fn a_sleeping_reader_costs_bounded_memory_and_one_pause_and_sees_a_notice() {
        let (pipe_reader, pipe_writer) = pipe();
        let (socket_reader, socket_writer) = UnixStream::pair().unwrap();
        let ends = [
            (Box::new(pipe_reader) as Box<dyn Read + Send>, pipe_writer),
            (Box::new(socket_reader), socket_writer.into()),
        ];
        for (mut reader, writer) in ends {
            let mut console = Console::open(writer.as_fd());
            drop(writer);
            let (start, printed) = (Instant::now(), 100_000);
            for n in (0..printed).step_by(100) {
                console.print(&lines(n, n + 100));
                assert!(console.waiting.capacity() <= 2 * LIMIT);
            }
            assert!(start.elapsed() < 10 * PATIENCE, "one pause only: {:?}", start.elapsed());
            let dropped = console.dropped;
            assert!(dropped > printed / 3, "control: not all lines were shown: {dropped}");
            let reading = std::thread::spawn(move || {
                let mut text = String::new();
                reader.read_to_string(&mut text).map(|_| text).unwrap()
            });
            console.finish();
            console.print(b"awake\n");
            drop(console);
            let text = reading.join().unwrap();
            let shown = text.lines().filter(|line| line.starts_with("line ")).count();
            assert_eq!(shown + dropped, printed);
            let notice = format!("[drumline]: {dropped} lines were not shown: nobody read them in time");
            assert_eq!(text.lines().rev().take(2).collect::<Vec<_>>(), ["awake", &notice]);
            assert_eq!(text.as_bytes()[..100], lines(0, 2)[..100]);
        }
    }

    #[test]
    fn a_reader_that_keeps_up_misses_nothing() {
        let (mut reader, writer) = pipe();
        let reading = std::thread::spawn(move || {
            let mut text = Vec::new();
            reader.read_to_end(&mut text).map(|_| text).unwrap()
        });
        let mut console = Console::open(writer.as_fd());
        drop(writer);
        (0..100_000).step_by(500).for_each(|n| console.print(&lines(n, n + 500)));
        console.finish();
        drop(console);
        assert!(reading.join().unwrap() == lines(0, 100_000), "all, in order");
    }

    #[test]
    fn a_reader_that_is_gone_costs_nothing() {
        let (reader, writer) = pipe();
        let mut console = Console::open(writer.as_fd());
        console.print(&lines(0, 2000));
        assert!(!console.is_gone() && console.num_waiting() > 0, "control: the reader exists");
        drop(reader);
        console.print(b"x\n");
        assert!(console.is_gone());
        assert_eq!((console.waiting.capacity(), console.num_waiting()), (0, 0));
    }
}
