//! Gradients on a GPU are only queued when autograd tells of them: what comes after is ordered by streams, and no thread waits.
//!
//! ```text
//!   autograd's streams  ─ g7 ─ g6 ─┬─ copied into bucket 0 ─┬─ g5 ─ g4 ─ …
//!                                  (bucket full)            │ mark
//!   lane's stream                                           └──▶ reduced ─────────────┐
//!   the stream of who called backward                                 … end of backward ┴─▶ optimizer
//! ```

use drumline_torch::cuda::{Event, Priority, Stream, Timing, keep_until};
use drumline_torch::{grad, move_grads};
use tch::{Device, Tensor};

use crate::arena::Arena;
use crate::error::ParallelError;

type Result<T = ()> = std::result::Result<T, ParallelError>;

/// The streams of one model's gradients.
#[derive(Debug)]
pub(super) struct Queues {
    device: usize,
    /// On which the lane works.
    pub(super) lane: Stream,
    /// Streams on which gradients of this backward came: one, unless the model uses several.
    seen: Vec<Stream>,
}

impl Queues {
    /// Those of a GPU; a CPU has none.
    pub(super) fn of(device: Device) -> Result<Option<Self>> {
        match device {
            Device::Cpu => Ok(None),
            Device::Cuda(device) => {
                Ok(Some(Self { device, lane: Stream::new(device, Priority::High)?, seen: Vec::new() }))
            }
            other => Err(ParallelError::Unfit(format!(
                "several ranks cannot reduce gradients on {other:?}; try a GPU of NVIDIA's, or Device::Cpu"
            ))),
        }
    }

    /// A backward is about to begin.
    pub(super) fn begin(&mut self) {
        self.seen.clear();
    }

    /// A gradient has come on the current stream of this thread, which is autograd's.
    pub(super) fn note_current(&mut self) -> Result {
        let current = Stream::current(self.device)?;
        if !self.seen.contains(&current) {
            self.seen.push(current);
        }
        Ok(())
    }

    /// Queues the copies of a full bucket's gradients into their places; the mark comes after them.
    pub(super) fn fill(&self, arena: &Arena, bucket: usize) -> Result<Event> {
        let current = Stream::current(self.device)?;
        for other in self.seen.iter().filter(|stream| **stream != current) {
            current.wait_for_stream(*other)?;
        }
        let params = &arena.layout.buckets[bucket].params;
        let leaves: Vec<&Tensor> = params.iter().map(|param| &arena.tensors[*param].tensor).collect();
        let places: Vec<&Tensor> = params.iter().map(|param| &arena.places[*param]).collect();
        if self.seen.len() > 1 {
            // Each belongs to the stream on which it came, which may use its memory again before the copy.
            let gradients =
                leaves.iter().map(|leaf| grad(leaf)).collect::<std::result::Result<Vec<_>, _>>()?;
            let mut dense = gradients.iter().flatten().filter(|gradient| !gradient.is_sparse());
            dense.try_for_each(|gradient| keep_until(gradient, current))?;
        }
        move_grads(&leaves, &places)?;
        let ready = Event::new(Timing::Off)?;
        ready.record(current)?;
        Ok(ready)
    }

    /// What this thread queues from now on comes after all that the lane has queued.
    pub(super) fn join(&self) -> Result {
        Ok(Stream::current(self.device)?.wait_for_stream(self.lane)?)
    }
}
