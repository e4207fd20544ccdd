//! Copies batches to a GPU during a step: first into separate memory, and when their step comes into the inputs of the
//! graph.
//!
//! ```text
//!   copies' stream   ─▶ host to `places` ─┐ uploaded      ┌─▶ host to `places` ─▶ …
//!   training's       ── graph of k ───────┴─▶ places to k+1's inputs ─┴ taken ── graph of k+1 ──▶
//! ```
//! The host waits for neither. Batches that are not in pinned memory are copied as well, but then the host waits for
//! the copies.

use drumline_torch::TorchError;
use drumline_torch::cuda::{Event, Priority, Stream, StreamScope, Timing, copy_async, keep_until};
use tch::{Device, Kind, Tensor};

use super::step_mode::Shapes;

/// Memory for the batches of one step.
#[derive(Debug)]
pub(super) struct Uploads {
    stream: Stream,
    places: Vec<Tensor>,
    /// Recorded when the copies to `places` are complete.
    uploaded: Event,
    /// Recorded when `places` may be overwritten.
    taken: Event,
    /// Recorded on the training's stream before the current step.
    before: Event,
}

impl Uploads {
    /// Allocates memory on a GPU for tensors of these shapes.
    pub(super) fn new(shapes: &Shapes, gpu: usize) -> Result<Self, TorchError> {
        let stream = Stream::new(gpu, Priority::Normal)?;
        let place = |(size, kind): &(Vec<i64>, Kind)| Tensor::f_empty(size, (*kind, Device::Cuda(gpu)));
        let places = shapes.iter().map(place).collect::<Result<Vec<_>, _>>()?;
        for place in &places {
            keep_until(place, stream)?;
        }
        let [uploaded, taken, before] =
            [Event::new(Timing::Off)?, Event::new(Timing::Off)?, Event::new(Timing::Off)?];
        // The memory may have belonged to another tensor, which is still in use on the current stream.
        taken.record(Stream::current(gpu)?)?;
        Ok(Self { stream, places, uploaded, taken, before })
    }

    /// Begins to copy these tensors, which have the shapes of the places. Returns false if they are not on the host, so
    /// that copying gains nothing.
    pub(super) fn begin(&mut self, tensors: &[&Tensor]) -> Result<bool, TorchError> {
        if tensors.iter().any(|tensor| tensor.device() != Device::Cpu) {
            return Ok(false);
        }
        let _scope = self.stream.enter()?;
        self.stream.wait_for(&self.taken)?;
        for (place, tensor) in self.places.iter_mut().zip(tensors) {
            copy_async(place, tensor)?;
        }
        self.uploaded.record(self.stream)?;
        Ok(true)
    }

    /// Marks that a step is about to be launched on the current stream.
    pub(super) fn mark(&self) -> Result<(), TorchError> {
        self.before.record(Stream::current(self.stream.device())?)
    }

    /// Makes the stream of the copies current until the scope is dropped. Its work starts after everything before the
    /// step.
    pub(super) fn enter(&self) -> Result<StreamScope, TorchError> {
        self.stream.wait_for(&self.before)?;
        self.stream.enter()
    }

    /// Makes the current stream wait for the stream of the copies, on which these tensors were made.
    pub(super) fn join(&self, made: &[&Tensor]) -> Result<(), TorchError> {
        let current = Stream::current(self.stream.device())?;
        current.wait_for_stream(self.stream)?;
        made.iter().try_for_each(|tensor| keep_until(tensor, current))
    }

    /// Copies what was uploaded into the inputs of a graph, on the current stream.
    pub(super) fn take(&self, inputs: &[&Tensor]) -> Result<(), TorchError> {
        let current = Stream::current(self.stream.device())?;
        current.wait_for(&self.uploaded)?;
        for (input, place) in inputs.iter().zip(&self.places) {
            copy_async(&mut input.shallow_clone(), place)?;
        }
        self.taken.record(current)
    }
}
