//! The last output of each worker, kept for the report and for callers that wait for a line.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::logs::Channel;
use crate::tail::Tail;

/// The kept part of one stream of a worker.
#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) rank: usize,
    channel: Channel,
    pub(crate) tail: Tail,
    pub(crate) open: bool,
}

impl Stream {
    pub(crate) fn new(rank: usize, channel: Channel, limit: usize) -> Self {
        Self { rank, channel, tail: Tail::new(limit), open: true }
    }
}

/// All streams, shared with their readers while the job runs.
#[derive(Debug, Default)]
pub(crate) struct Streams {
    streams: Mutex<Vec<Stream>>,
    changed: Condvar,
}

impl Streams {
    pub(crate) fn lock(&self) -> MutexGuard<'_, Vec<Stream>> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until something is read or a stream ends, or until `deadline`.
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

    /// The kept bytes of a worker's stdout and stderr.
    pub(crate) fn of_rank(&self, rank: usize) -> (Vec<u8>, Vec<u8>) {
        let streams = self.lock();
        let held = |channel| {
            let stream = streams.iter().find(|stream| stream.rank == rank && stream.channel == channel);
            stream.map(|stream| stream.tail.held()).unwrap_or_default()
        };
        (held(Channel::Out), held(Channel::Err))
    }

    /// Adds bytes that were read from the stream at `index`.
    pub(crate) fn take(&self, index: usize, bytes: &[u8]) {
        self.lock()[index].tail.push(bytes);
        self.changed.notify_all();
    }

    /// Marks the stream at `index` as ended.
    pub(crate) fn end(&self, index: usize) {
        self.lock()[index].open = false;
        self.changed.notify_all();
    }
}
