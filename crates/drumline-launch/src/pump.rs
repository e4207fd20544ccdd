//! Reads the workers' output on one thread, so that no worker waits long for a reader.
//!
//! ```text
//!   worker's stdout, stderr ─pipe─▶ pump ─┬▶ the last bytes, for the report and for callers that wait for a line
//!                                         └▶ its sink (`logs`): a file, the console, both or neither
//! ```
//!
//! The supervisor owns the pump: it starts it with the workers and ends it after them. A process that escaped from its
//! worker's group and keeps a pipe open is waited for no longer than [`DRAIN`].

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

/// How long output may still arrive after a worker's end.
pub(crate) const DRAIN: Duration = Duration::from_millis(500);

/// How many bytes are read at once: the default capacity of a pipe.
const READ: usize = 64 << 10;

/// Mark the wake-up and the consoles among the pipes' indices in epoll's results.
const WAKE: u64 = u64::MAX;
const CONSOLE: u64 = u64::MAX - 1;

/// Where the workers' output goes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Output {
    /// To the launcher's own stdout and stderr, unchanged.
    #[default]
    Inherit,
    /// Into the report only.
    Capture,
    /// The last part into the report, and all of it where the log plan says: to files and, as whole lines behind
    /// `[rank 3]: `, to the launcher's own stdout and stderr.
    Logged(AttemptLogs),
}

impl Output {
    /// How many bytes of each stream are kept for the report: all that a test prints, or the last lines of a long run,
    /// which may have many ranks.
    pub(crate) fn kept(&self) -> usize {
        match self {
            Output::Inherit => 0,
            Output::Capture => 1 << 20,
            Output::Logged(_) => 32 << 10,
        }
    }

    /// The destination of a stream of the worker with this `rank` in the job and `local_rank` on its node.
    pub(crate) fn sink(&self, rank: usize, local_rank: usize, channel: Channel) -> Result<Sink, LogError> {
        match self {
            Output::Inherit | Output::Capture => Ok(Sink::nowhere(channel)),
            Output::Logged(logs) => Sink::open(logs, rank, local_rank, channel),
        }
    }
}

/// A pipe and the destination of its bytes.
type Source = (OwnedFd, Sink);

/// The reading thread.
#[derive(Debug)]
pub(crate) struct Pump {
    control: Arc<PumpControl>,
    thread: Option<JoinHandle<()>>,
}

/// How the owner controls the thread.
#[derive(Debug)]
struct PumpControl {
    ending: AtomicBool,
    wake: OwnedFd,
}

impl Pump {
    /// Starts reading `sources`, the n-th of which is the n-th of `streams`.
    pub(crate) fn start(sources: Vec<Source>, streams: Arc<Streams>) -> io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let control = Arc::new(PumpControl { ending: AtomicBool::new(false), wake });
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let input = epoll::EventFlags::IN;
        epoll::add(&epoll, &control.wake, epoll::EventData::new_u64(WAKE), input)?;
        for (index, (pipe, _)) in sources.iter().enumerate() {
            epoll::add(&epoll, pipe, epoll::EventData::new_u64(index as u64), input)?;
        }
        let num_open = sources.len();
        let sources = sources.into_iter().map(Some).collect();
        let reader = Reader {
            epoll,
            sources,
            num_open,
            streams,
            consoles: Consoles::default(),
            buffer: vec![0; READ],
            due: None,
        };
        let thread_control = Arc::clone(&control);
        let thread = std::thread::Builder::new()
            .name("drumline-output".to_string())
            .spawn(move || reader.run(&thread_control))?;
        Ok(Self { control, thread: Some(thread) })
    }
}

/// Waits for the rest of the output, for a bounded time.
impl Drop for Pump {
    fn drop(&mut self) {
        self.control.ending.store(true, Ordering::Release);
        let _ = rustix::io::write(&self.control.wake, &1_u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The state of the reading thread.
struct Reader {
    epoll: OwnedFd,
    /// `None` once the pipe has ended.
    sources: Vec<Option<Source>>,
    num_open: usize,
    streams: Arc<Streams>,
    consoles: Consoles,
    buffer: Vec<u8>,
    /// When a progress bar must be shown again.
    due: Option<Instant>,
}

impl Reader {
    fn run(mut self, control: &PumpControl) {
        let mut last = None;
        let mut events = Vec::with_capacity(128);
        while self.num_open > 0 {
            if control.ending.load(Ordering::Acquire) && last.is_none() {
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
            // An error (interrupted) means that nothing is ready; the loop polls again.
            let _ = epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), timeout.as_ref());
            for event in &events {
                match event.data.u64() {
                    WAKE => drop(rustix::io::read(&control.wake, &mut [0; 8])),
                    CONSOLE => self.consoles.flush(),
                    index => self.read(index as usize),
                }
            }
            self.tick(Instant::now());
            self.consoles.watch(&self.epoll, CONSOLE);
        }
        // End the streams that are still open, so that a last partial line is printed.
        (0..self.sources.len()).for_each(|index| self.end(index));
        self.consoles.finish();
    }

    /// Shows the progress bars that are due.
    fn tick(&mut self, now: Instant) {
        if self.due.is_some_and(|due| due <= now) {
            let sinks = self.sources.iter_mut().flatten().map(|(_, sink)| sink);
            sinks.for_each(|sink| sink.tick(now, &mut self.consoles));
            self.consoles.tick(now);
            let sinks = self.sources.iter().flatten().map(|(_, sink)| sink);
            self.due = sinks.filter_map(Sink::due).chain(self.consoles.due()).min();
        }
    }

    /// Reads what is left in the pipes when the time is over: one read empties a pipe.
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

    /// Reads a pipe once.
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
    fn the_rest_of_a_pipe_that_stays_open_is_read() {
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
        let mut reader = Reader {
            epoll,
            sources,
            num_open: 2,
            streams: Arc::clone(&streams),
            consoles: Consoles::default(),
            buffer: vec![0; READ],
            due: None,
        };
        reader.sweep();
        assert_eq!([0, 1].map(|rank| streams.of_rank(rank).0), [&b""[..], b"last words"]);
        assert_eq!(reader.num_open, 2, "an empty pipe was not waited for");
    }
}
