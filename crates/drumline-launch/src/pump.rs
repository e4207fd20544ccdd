//! Reads what the workers print, on one thread, so that none of them ever waits long for a reader.
//!
//! ```text
//!   worker's stdout, stderr ─pipe─▶ pump ─┬▶ the last bytes, for the report and for those who wait for a line
//!                                         └▶ its sink (`logs`): a file, the console, both or neither
//! ```
//!
//! The owner is the supervisor: it starts the pump with the workers and ends it when they have ended. A process
//! that escaped its worker's group and keeps a pipe open is not waited for longer than [`DRAIN`].

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, epoll, eventfd, poll};
use rustix::io::Errno;

use crate::logs::{AttemptLogs, Channel, Consoles, LogError, Sink};
use crate::streams::Streams;

/// How long after a worker's end its output may still come.
pub(crate) const DRAIN: Duration = Duration::from_millis(500);

/// How much is read at once: what a pipe holds by default.
const READ: usize = 64 << 10;

/// Mark the wake-up and the consoles among the pipes' indices in epoll's answers.
const WAKE: u64 = u64::MAX;
const CONSOLE: u64 = u64::MAX - 1;

/// Where the workers' output goes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Output {
    /// To the launcher's own stdout and stderr, untouched.
    #[default]
    Inherit,
    /// Into the report only.
    Capture,
    /// The last of it into the report, and all of it where the logs' plan says: to files and, as whole lines behind
    /// `[rank 3]: `, to the launcher's own stdout and stderr.
    Logged(AttemptLogs),
}

impl Output {
    /// How much of each stream is kept for the report: all that a test prints, or the last lines of a long run, of
    /// which there may be many side by side.
    pub(crate) fn kept(&self) -> usize {
        match self {
            Output::Inherit => 0,
            Output::Capture => 1 << 20,
            Output::Logged(_) => 32 << 10,
        }
    }

    /// Where a stream of the worker goes that has this `rank` in the job and `local_rank` on its node.
    pub(crate) fn sink(&self, rank: usize, local_rank: usize, channel: Channel) -> Result<Sink, LogError> {
        match self {
            Output::Inherit | Output::Capture => Ok(Sink::nowhere(channel)),
            Output::Logged(logs) => Sink::open(logs, rank, local_rank, channel),
        }
    }
}

/// A pipe and where its bytes go.
type Source = (OwnedFd, Sink);

/// The reading thread.
#[derive(Debug)]
pub(crate) struct Pump {
    signals: Arc<Signals>,
    thread: Option<JoinHandle<()>>,
}

/// How the owner speaks to the thread.
#[derive(Debug)]
struct Signals {
    ending: AtomicBool,
    wake: OwnedFd,
}

impl Pump {
    /// Reads `sources`, the n-th of which is the n-th of `streams`, from now on.
    pub(crate) fn start(sources: Vec<Source>, streams: Arc<Streams>) -> io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let signals = Arc::new(Signals { ending: AtomicBool::new(false), wake });
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let input = epoll::EventFlags::IN;
        epoll::add(&epoll, &signals.wake, epoll::EventData::new_u64(WAKE), input)?;
        for (index, (pipe, _)) in sources.iter().enumerate() {
            epoll::add(&epoll, pipe, epoll::EventData::new_u64(index as u64), input)?;
        }
        let num_open = sources.len();
        let sources = sources.into_iter().map(Some).collect();
        let (consoles, buffer) = (Consoles::default(), vec![0; READ]);
        let reading = Reading { epoll, sources, num_open, streams, consoles, buffer, due: None };
        let theirs = Arc::clone(&signals);
        let thread = std::thread::Builder::new()
            .name("drumline-output".to_string())
            .spawn(move || reading.run(&theirs))?;
        Ok(Self { signals, thread: Some(thread) })
    }
}

/// Waits for the rest of the output, for a bounded time.
impl Drop for Pump {
    fn drop(&mut self) {
        self.signals.ending.store(true, Ordering::Release);
        let _ = rustix::io::write(&self.signals.wake, &1_u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The thread's own things.
struct Reading {
    epoll: OwnedFd,
    /// `None` once the pipe has ended.
    sources: Vec<Option<Source>>,
    num_open: usize,
    streams: Arc<Streams>,
    consoles: Consoles,
    buffer: Vec<u8>,
    /// When a progress bar is to be shown again.
    due: Option<Instant>,
}

impl Reading {
    fn run(mut self, signals: &Signals) {
        let mut last = None;
        let mut events = Vec::with_capacity(128);
        while self.num_open > 0 {
            if signals.ending.load(Ordering::Acquire) && last.is_none() {
                last = Some(Instant::now() + DRAIN);
            }
            let now = Instant::now();
            if last.is_some_and(|last| last <= now) {
                self.sweep();
                break;
            }
            let next = last.into_iter().chain(self.due).min();
            let left = next.map(|next: Instant| next.saturating_duration_since(now));
            let timeout = left.and_then(|left| Timespec::try_from(left).ok());
            events.clear();
            // An error (interrupted) means that nothing is ready; the loop comes back here.
            let _ = epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), timeout.as_ref());
            for event in &events {
                match event.data.u64() {
                    WAKE => drop(rustix::io::read(&signals.wake, &mut [0; 8])),
                    CONSOLE => self.consoles.flush(),
                    index => self.read(index as usize),
                }
            }
            self.tick(Instant::now());
            self.consoles.watch(&self.epoll, CONSOLE);
        }
        // What has no end yet is given one, so that a last partial line is printed.
        (0..self.sources.len()).for_each(|index| self.end(index));
        self.consoles.finish();
    }

    /// Shows progress bars whose time has come.
    fn tick(&mut self, now: Instant) {
        if self.due.is_some_and(|due| due <= now) {
            let sinks = self.sources.iter_mut().flatten().map(|(_, sink)| sink);
            sinks.for_each(|sink| sink.tick(now, &mut self.consoles));
            self.consoles.tick(now);
            let sinks = self.sources.iter().flatten().map(|(_, sink)| sink);
            self.due = sinks.filter_map(Sink::due).chain(self.consoles.due()).min();
        }
    }

    /// Takes what lies in the pipes at the end of the time: none holds more than one read takes.
    fn sweep(&mut self) {
        for index in 0..self.sources.len() {
            let has_some = self.sources[index].as_ref().is_some_and(|(pipe, _)| {
                poll(&mut [PollFd::new(pipe, PollFlags::IN)], Some(&Timespec::default())) == Ok(1)
            });
            if has_some {
                self.read(index);
            }
        }
    }

    /// Reads once.
    fn read(&mut self, index: usize) {
        let Some((pipe, sink)) = &mut self.sources[index] else { return };
        match rustix::io::read(pipe, &mut *self.buffer) {
            Err(Errno::INTR) => {}
            Ok(0) | Err(_) => self.end(index),
            Ok(len) => {
                self.streams.take(index, &self.buffer[..len]);
                sink.take(&self.buffer[..len], Instant::now(), &mut self.consoles);
                self.due = self.due.into_iter().chain(sink.due()).chain(self.consoles.due()).min();
            }
        }
    }

    fn end(&mut self, index: usize) {
        let Some((_, mut sink)) = self.sources[index].take() else { return };
        sink.end(&mut self.consoles);
        self.streams.end(index);
        self.num_open -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::streams::Stream;

    #[test]
    fn what_lies_in_a_pipe_that_stays_open_is_swept_up() {
        let streams = Arc::new(Streams::default());
        let (mut sources, mut writers) = (Vec::new(), Vec::new());
        for rank in 0..2 {
            streams.lock().push(Stream::new(rank, Channel::Out, 100));
            let (reader, writer) = rustix::pipe::pipe().unwrap();
            sources.push(Some((reader, Sink::nowhere(Channel::Out))));
            writers.push(writer);
        }
        rustix::io::write(&writers[1], b"last words").unwrap();
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        let (consoles, buffer, theirs) = (Consoles::default(), vec![0; READ], Arc::clone(&streams));
        let mut reading =
            Reading { epoll, sources, num_open: 2, streams: theirs, consoles, buffer, due: None };
        reading.sweep();
        assert_eq!([0, 1].map(|rank| streams.of_rank(rank).0), [&b""[..], b"last words"]);
        assert_eq!(reading.num_open, 2, "an empty pipe was not waited for");
    }
}
