//! Reads what the workers print, on one thread, so that none of them ever waits for a reader.
//!
//! ```text
//!   worker's stdout, stderr ─pipe─▶ pump ─┬▶ the last bytes, for the report and for those who wait for a line
//!                                         └▶ `[rank 3]: line` on our own stdout or stderr (`Output::Prefix`)
//! ```
//!
//! The owner is the supervisor: it starts the pump with the workers and ends it when they have ended. A process
//! that escaped its worker's group and keeps a pipe open is not waited for longer than [`DRAIN`].

use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;

use crate::lines::Lines;
use crate::tail::Tail;

/// How long after a worker's end its output may still come.
pub(crate) const DRAIN: Duration = Duration::from_millis(500);

/// Where the workers' output goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Output {
    /// To the launcher's own stdout and stderr, untouched.
    #[default]
    Inherit,
    /// Into the report only.
    Capture,
    /// Into the report and, as whole lines behind `[rank 3]: `, to the launcher's own stdout and stderr.
    Prefix,
}

/// Which of a worker's two streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Std {
    Out,
    Err,
}

/// One worker's stream as it is kept.
#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) rank: usize,
    std: Std,
    pub(crate) tail: Tail,
    lines: Option<Lines>,
    pub(crate) open: bool,
}

impl Stream {
    pub(crate) fn new(rank: usize, std: Std, output: Output, limit: usize) -> Self {
        let lines = (output == Output::Prefix).then(|| Lines::new(format!("[rank {rank}]: ")));
        Self { rank, std, tail: Tail::new(limit), lines, open: true }
    }

    /// Takes what was read (nothing: the end) and returns what is to be printed.
    fn take(&mut self, bytes: &[u8]) -> Vec<u8> {
        let mut printed = Vec::new();
        self.tail.push(bytes);
        self.open &= !bytes.is_empty();
        if let Some(lines) = &mut self.lines {
            lines.feed(bytes, &mut printed);
            if bytes.is_empty() {
                lines.finish(&mut printed);
            }
        }
        printed
    }
}

/// All streams, shared with those who read them while the job runs.
#[derive(Debug, Default)]
pub(crate) struct Streams {
    streams: Mutex<Vec<Stream>>,
    changed: Condvar,
}

impl Streams {
    pub(crate) fn lock(&self) -> MutexGuard<'_, Vec<Stream>> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until something was read or closed, or `deadline`.
    pub(crate) fn wait<'a>(
        &self,
        guard: MutexGuard<'a, Vec<Stream>>,
        deadline: Instant,
    ) -> MutexGuard<'a, Vec<Stream>> {
        let left = deadline.saturating_duration_since(Instant::now());
        self.changed.wait_timeout(guard, left).unwrap_or_else(PoisonError::into_inner).0
    }

    /// Waits until `deadline` for the end of a worker's streams.
    pub(crate) fn wait_for_end(&self, rank: usize, deadline: Instant) {
        let mut streams = self.lock();
        while streams.iter().any(|stream| stream.rank == rank && stream.open) && Instant::now() < deadline {
            streams = self.wait(streams, deadline);
        }
    }

    /// What is held of a worker's stdout and stderr.
    pub(crate) fn of_rank(&self, rank: usize) -> (Vec<u8>, Vec<u8>) {
        let streams = self.lock();
        let held = |std| {
            let stream = streams.iter().find(|stream| stream.rank == rank && stream.std == std);
            stream.map(|stream| stream.tail.held()).unwrap_or_default()
        };
        (held(Std::Out), held(Std::Err))
    }

    fn take(&self, index: usize, bytes: &[u8]) {
        let mut streams = self.lock();
        let stream = &mut streams[index];
        let (printed, std) = (stream.take(bytes), stream.std);
        drop(streams);
        self.changed.notify_all();
        // Our own stdout may be gone (a closed pager); the job goes on and the report still has the output.
        let _ = match std {
            Std::Out => io::stdout().lock().write_all(&printed),
            Std::Err => io::stderr().lock().write_all(&printed),
        };
    }
}

/// The reading thread.
#[derive(Debug)]
pub(crate) struct Pump {
    ending: Arc<AtomicBool>,
    wake: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Pump {
    /// Reads `pipes`, the n-th of which is the n-th of `streams`, from now on.
    pub(crate) fn start(pipes: Vec<OwnedFd>, streams: Arc<Streams>) -> io::Result<Self> {
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let ending = Arc::new(AtomicBool::new(false));
        let mut pipes: Vec<_> = pipes.into_iter().map(Some).collect();
        let (theirs, flag) = (Arc::clone(&wake), Arc::clone(&ending));
        let thread = std::thread::Builder::new()
            .name("drumline-output".to_string())
            .spawn(move || pump(&mut pipes, &streams, &theirs, &flag))?;
        Ok(Self { ending, wake, thread: Some(thread) })
    }
}

/// Waits for the rest of the output, for a bounded time.
impl Drop for Pump {
    fn drop(&mut self) {
        self.ending.store(true, Ordering::Release);
        let _ = rustix::io::write(&*self.wake, &1_u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn pump(pipes: &mut [Option<OwnedFd>], streams: &Streams, wake: &OwnedFd, ending: &AtomicBool) {
    let mut last = None;
    let mut buffer = vec![0; 64 << 10];
    while pipes.iter().any(Option::is_some) {
        if ending.load(Ordering::Acquire) && last.is_none() {
            last = Some(Instant::now() + DRAIN);
        }
        let left = last.map(|last| last.saturating_duration_since(Instant::now()));
        if left == Some(Duration::ZERO) {
            break;
        }
        for index in ready(pipes, wake, left) {
            read_one(index, &mut pipes[index], streams, &mut buffer);
        }
    }
    // What has no end yet is given one, so that a last partial line is printed.
    let open = (0..pipes.len()).filter(|index| pipes[*index].is_some());
    open.for_each(|index| streams.take(index, &[]));
}

/// The indices of the pipes that have something to read or have ended.
fn ready(pipes: &[Option<OwnedFd>], wake: &OwnedFd, left: Option<Duration>) -> Vec<usize> {
    let indices: Vec<_> = (0..pipes.len()).filter(|index| pipes[*index].is_some()).collect();
    let mut polled: Vec<_> = pipes.iter().flatten().map(|pipe| PollFd::new(pipe, PollFlags::IN)).collect();
    // Once the drain has begun the wake-up has done its work, and its descriptor would stay ready.
    if left.is_none() {
        polled.push(PollFd::new(wake, PollFlags::IN));
    }
    let timeout = left.and_then(|left| Timespec::try_from(left).ok());
    // An error (interrupted, out of memory) means nobody is ready; the loop comes back here.
    let _ = poll(&mut polled, timeout.as_ref());
    let ready = indices.iter().zip(&polled).filter(|(_, polled)| !polled.revents().is_empty());
    ready.map(|(index, _)| *index).collect()
}

/// Reads once; a pipe that has ended or failed becomes `None`.
fn read_one(index: usize, pipe: &mut Option<OwnedFd>, streams: &Streams, buffer: &mut [u8]) {
    let Some(fd) = pipe else { return };
    match rustix::io::read(fd.as_fd(), &mut *buffer) {
        Err(Errno::INTR) => {}
        Ok(0) | Err(_) => {
            *pipe = None;
            streams.take(index, &[]);
        }
        Ok(len) => streams.take(index, &buffer[..len]),
    }
}
