//! Copies between the device on which a model trains and host memory, beside the work of both.
//!
//! ```text
//!   stream of the model   … backward, norm ─┬──────────────────────────────────────────┬─ next forward
//!   stream out                              ├─ gradients of unit 0 ─ of unit 1 ─ …     │
//!   CPU                                     │      └▶ step of unit 0 ─ of unit 1 ─ …   │
//!   stream back                             └─────────────└▶ weights of unit 0 ─ … ────┘
//! ```
//! For a model that trains on the CPU, which only tests do, a copy is done when it has begun.

use drumline_torch::cuda::{Event, Priority, Stream, Timing, copy_async};
use tch::{Device, Tensor};

use super::Result;
use crate::error::ParallelError;

/// The streams of copies.
#[derive(Debug)]
pub(super) enum Copier {
    /// Between a GPU and pinned memory.
    Gpu { device: usize, out: Stream, back: Stream },
    /// Within host memory.
    Host,
}

/// Copies to the host that have begun.
#[derive(Debug)]
#[must_use = "the copies are done after `wait`"]
pub(super) struct Fetched {
    done: Option<Event>,
    /// What is copied, until then.
    from: Vec<Tensor>,
}

impl Fetched {
    /// Waits until the host has the values.
    pub(super) fn wait(self) -> Result {
        self.done.map_or(Ok(()), |done| done.synchronize())?;
        drop(self.from);
        Ok(())
    }
}

impl Copier {
    pub(super) fn new(device: Device) -> Result<Self> {
        match device {
            Device::Cpu => Ok(Self::Host),
            Device::Cuda(device) => {
                let stream = || Stream::new(device, Priority::High);
                Ok(Self::Gpu { device, out: stream()?, back: stream()? })
            }
            device => Err(ParallelError::UnsupportedDevice { device }),
        }
    }

    /// The GPU of the model.
    pub(super) fn device(&self) -> Option<usize> {
        match self {
            Self::Gpu { device, .. } => Some(*device),
            Self::Host => None,
        }
    }

    /// Begins a step: copies wait for what the model computes at present.
    pub(super) fn begin(&self) -> Result {
        if let Self::Gpu { device, out, back } = self {
            let current = Stream::current(*device)?;
            out.wait_for_stream(current)?;
            back.wait_for_stream(current)?;
        }
        Ok(())
    }

    /// Begins copies to the host after these events, of each pair from the second to the first. One that is sparse, such as
    /// the gradient of an embedding, becomes dense in the stream of the copies: before the events it has no values.
    pub(super) fn fetch(&self, pairs: Vec<(Tensor, Tensor)>, ready: &[Event]) -> Result<Fetched> {
        match self {
            Self::Host => {
                copy_all(&dense(&pairs)?)?;
                Ok(Fetched { done: None, from: Vec::new() })
            }
            Self::Gpu { out, .. } => {
                ready.iter().try_for_each(|ready| out.wait_for(ready))?;
                let _scope = out.enter()?;
                let dense = dense(&pairs)?;
                copy_all(&dense)?;
                let done = Event::new(Timing::Off)?;
                done.record(*out)?;
                let from = pairs.into_iter().chain(dense).map(|(_, from)| from).collect();
                Ok(Fetched { done: Some(done), from })
            }
        }
    }

    /// Begins copies to the device, of each pair from the second to the first.
    pub(super) fn send(&self, pairs: &[(Tensor, Tensor)]) -> Result {
        match self {
            Self::Host => copy_all(pairs),
            Self::Gpu { back, .. } => {
                let _scope = back.enter()?;
                copy_all(pairs)
            }
        }
    }

    /// Ends a step: what the model computes from now on waits for all that was sent.
    pub(super) fn end(&self) -> Result {
        if let Self::Gpu { device, back, .. } = self {
            Stream::current(*device)?.wait_for_stream(*back)?;
        }
        Ok(())
    }
}

impl Drop for Copier {
    /// Copies may still run, from and to memory that is freed next. If the GPU fails here, nobody uses the result.
    fn drop(&mut self) {
        if let Self::Gpu { out, back, .. } = self {
            let _ = (out.synchronize(), back.synchronize());
        }
    }
}

fn dense(pairs: &[(Tensor, Tensor)]) -> Result<Vec<(Tensor, Tensor)>> {
    let pair = |(to, from): &(Tensor, Tensor)| {
        let from = if from.is_sparse() { from.f_to_dense(None, false)? } else { from.shallow_clone() };
        Ok((to.shallow_clone(), from))
    };
    pairs.iter().map(pair).collect()
}

fn copy_all(pairs: &[(Tensor, Tensor)]) -> Result {
    for (to, from) in pairs {
        copy_async(&mut to.shallow_clone(), from)?;
    }
    Ok(())
}
