//! When the gradients of units are complete, in a backward.
//!
//! ```text
//!   autograd   … gradient of h.3.b ─ of h.3.w: the last of h.3 ─┬─ of h.2.b ─ …
//!   channel                                                     └▶ unit h.3, and the events after which it can be read
//! ```

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};

use drumline_torch::cuda::{Event, Stream, Timing};
use drumline_torch::{GradHook, Named, grad};
use tch::Tensor;

use super::Result;
use super::twins::TwinUnit;
use crate::error::ParallelError;

/// A unit whose gradients are complete after these events.
pub(super) struct Arrival {
    pub(super) unit: usize,
    pub(super) ready: Vec<Event>,
}

/// What is known of a unit in this backward.
struct Known {
    /// How many gradients are missing; `None` once the unit was sent.
    missing: Option<usize>,
    /// The streams of a GPU that have computed gradients.
    streams: Vec<Stream>,
}

/// Sends units until it is dropped.
pub(super) struct Completion {
    units: Vec<(Arc<Mutex<Known>>, Vec<Tensor>)>,
    device: Option<usize>,
    arrivals: Sender<Arrival>,
    hooks: Vec<GradHook>,
}

impl Completion {
    /// Watches the gradients of a backward on this GPU, or on the CPU. A parameter has one hook, and one of the program stays:
    /// that is an error.
    pub(super) fn watch(units: &[TwinUnit], device: Option<usize>) -> Result<(Receiver<Arrival>, Self)> {
        let (arrivals, received) = channel();
        let mut watch = Self { units: Vec::new(), device, arrivals, hooks: Vec::new() };
        for (unit, twins) in units.iter().enumerate() {
            let leaves: Vec<Tensor> =
                twins.twins.iter().map(|twin| twin.parameter.tensor.shallow_clone()).collect();
            // One that is frozen gets no gradient.
            let trained = twins.twins.iter().map(|twin| &twin.parameter);
            let trained: Vec<_> = trained.filter(|parameter| parameter.tensor.requires_grad()).collect();
            let known = Known { missing: Some(trained.len()), streams: Vec::new() };
            let known = Arc::new(Mutex::new(known));
            for Named { name, tensor: leaf } in trained {
                if GradHook::is_on(leaf)? {
                    return Err(ParallelError::HookedParameter { parameter: name.clone() });
                }
                let (known, arrivals) = (Arc::clone(&known), watch.arrivals.clone());
                let hook = GradHook::new(leaf, move || {
                    let ready = known.lock().unwrap_or_else(PoisonError::into_inner).note(device)?;
                    // If nobody receives any more, a step has failed, which is returned where it was begun.
                    drop(ready.map(|ready| arrivals.send(Arrival { unit, ready })));
                    Ok(())
                })?;
                watch.hooks.push(hook);
            }
            watch.units.push((known, leaves));
        }
        Ok((received, watch))
    }

    /// After backward: sends units of which only some parameters were used.
    pub(super) fn send_rest(&self) -> Result {
        for (unit, (known, leaves)) in self.units.iter().enumerate() {
            let mut known = known.lock().unwrap_or_else(PoisonError::into_inner);
            if known.missing.take().is_none() {
                continue;
            }
            let grads = leaves.iter().map(grad).collect::<std::result::Result<Vec<_>, _>>()?;
            if grads.iter().any(Option::is_some) {
                // Backward has made the stream of this thread wait for all others.
                known.streams = self.device.map(Stream::current).transpose()?.into_iter().collect();
                let ready = known.events()?;
                let _ = self.arrivals.send(Arrival { unit, ready });
            }
        }
        Ok(())
    }
}

impl Known {
    /// Notes a gradient. Returns the events of the unit with the last one.
    fn note(&mut self, device: Option<usize>) -> Result<Option<Vec<Event>>> {
        if let Some(stream) = device.map(Stream::current).transpose()?
            && !self.streams.contains(&stream)
        {
            self.streams.push(stream);
        }
        let Some(missing) = self.missing.as_mut() else {
            let what = "a gradient was accumulated twice in one backward";
            return Err(ParallelError::Internal { what });
        };
        *missing = missing.saturating_sub(1);
        if *missing > 0 {
            return Ok(None);
        }
        self.missing = None;
        self.events().map(Some)
    }

    /// An event after the current work of each stream.
    fn events(&self) -> Result<Vec<Event>> {
        let event = |stream: &Stream| {
            let event = Event::new(Timing::Off)?;
            event.record(*stream)?;
            Ok(event)
        };
        self.streams.iter().map(event).collect()
    }
}
