//! Gradients on a GPU: when autograd reports one, its computation is only queued. Streams order all further work, and
//! no thread waits.
//!
//! ```text
//!   autograd's streams  ─ g7 ─ g6 ─┬─ copied into bucket 0 ─┬─ g5 ─ g4 ─ …
//!                                  (bucket full)            │ event
//!   lane's stream                                           └──▶ reduced ─────────────┐
//!   the stream that called backward                                … end of backward ┴─▶ optimizer
//! ```

use drumline_torch::cuda::{Event, Priority, Stream, Timing, keep_until};
use drumline_torch::{grad, move_grads};
use tch::{Device, Tensor};

use crate::error::ParallelError;

type Result<T = ()> = std::result::Result<T, ParallelError>;

/// The streams of one model's gradients.
#[derive(Debug)]
pub(crate) struct Queues {
    device: usize,
    /// The stream of the lane.
    pub(crate) lane: Stream,
    /// The streams that compute gradients in this backward: one, unless the model uses several.
    seen: Vec<Stream>,
}

impl Queues {
    /// The streams for a GPU; `None` for a CPU.
    pub(crate) fn of(device: Device) -> Result<Option<Self>> {
        match device {
            Device::Cpu => Ok(None),
            Device::Cuda(device) => {
                Ok(Some(Self { device, lane: Stream::new(device, Priority::High)?, seen: Vec::new() }))
            }
            device => Err(ParallelError::UnsupportedDevice { device }),
        }
    }

    /// A backward is about to begin.
    pub(crate) fn begin(&mut self) {
        self.seen.clear();
    }

    /// Notes the current stream of autograd's thread, which computes a gradient.
    pub(crate) fn note_current(&mut self) -> Result {
        let current = Stream::current(self.device)?;
        if !self.seen.contains(&current) {
            self.seen.push(current);
        }
        Ok(())
    }

    /// The current stream of this thread.
    pub(crate) fn current(&self) -> Result<Stream> {
        Ok(Stream::current(self.device)?)
    }

    /// Makes this thread's stream wait for all streams that have computed gradients.
    pub(crate) fn gather_streams(&self) -> Result<Stream> {
        let current = Stream::current(self.device)?;
        for other in self.seen.iter().filter(|stream| **stream != current) {
            current.wait_for_stream(*other)?;
        }
        Ok(current)
    }

    /// Queues copies of the leaves' gradients into their places. Returns an event after the copies.
    pub(crate) fn fill(&self, leaves: &[&Tensor], places: &[&Tensor]) -> Result<Event> {
        let current = self.gather_streams()?;
        if self.seen.len() > 1 {
            // Each gradient belongs to its stream, which may reuse the memory before the copy.
            let gradients =
                leaves.iter().map(|leaf| grad(leaf)).collect::<std::result::Result<Vec<_>, _>>()?;
            let mut dense = gradients.iter().flatten().filter(|gradient| !gradient.is_sparse());
            dense.try_for_each(|gradient| keep_until(gradient, current))?;
        }
        move_grads(leaves, places)?;
        self.mark()
    }

    /// An event after all current work of this thread's stream.
    pub(crate) fn mark(&self) -> Result<Event> {
        let ready = Event::new(Timing::Off)?;
        ready.record(Stream::current(self.device)?)?;
        Ok(ready)
    }

    /// Makes later work of this thread wait for all work of the lane.
    pub(crate) fn join(&self) -> Result {
        Ok(Stream::current(self.device)?.wait_for_stream(self.lane)?)
    }
}
