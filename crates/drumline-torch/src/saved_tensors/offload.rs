//! Activations in pinned host memory between forward and backward.
//!
//! ```text
//!   compute stream   ── x = f(…) ─┬─ g(x) ────────── … backward of g needs x ─┬─ (waits for the copy) ─▶ x on the GPU
//!   offload stream                └─ copy x to the host ─┘                     host memory ────────────┘
//! ```
//! Costs no computation, but two copies over PCIe. A copy back begins when backward needs it, so it is not hidden.

use std::sync::{Mutex, PoisonError};

use tch::{Device, Kind, Tensor};

use super::{Unchanged, Unpack, saved_tensor_hooks};
use crate::cuda::{Event, Priority, Stream, Timing, copy_async, is_recorded, keep_until, pinned_like};
use crate::error::TorchError;
use crate::function::FunctionError;
use crate::recordable::NotRecordable;

/// Smaller tensors stay: a copy would take longer than it saves.
const SMALL_BYTES: usize = 1 << 16;

/// Runs `body`. What its operations on GPUs save for backward is moved to pinned host memory, and comes back when
/// backward needs it. Tensors in host memory stay where they are, and so do parameters.
///
/// ```
/// use drumline_torch::offload_saved;
/// use tch::{Device, Kind, Tensor};
///
/// let x = Tensor::ones([4], (Kind::Float, Device::Cpu)).set_requires_grad(true);
/// let y = offload_saved(|| (&x * 3.0).exp())?;
/// y.sum(Kind::Float).backward();
/// assert!(x.grad().defined());
/// # Ok::<(), drumline_torch::TorchError>(())
/// ```
pub fn offload_saved<R>(body: impl FnOnce() -> R) -> Result<R, TorchError> {
    let streams = Streams::default();
    let pack = |tensor: &Tensor| -> Result<Unpack, FunctionError> {
        match tensor.device() {
            Device::Cuda(device) if size(tensor) >= SMALL_BYTES => {
                let copy = OnHost::of(tensor, streams.of(device)?)?;
                Ok(Box::new(move || Ok(copy.back()?)))
            }
            _ => {
                let kept = Unchanged::new(tensor.shallow_clone());
                Ok(Box::new(move || Ok(kept.get()?.shallow_clone())))
            }
        }
    };
    saved_tensor_hooks(pack, body)
}

fn size(tensor: &Tensor) -> usize {
    tensor.numel() * tensor.kind().elt_size_in_bytes()
}

/// The stream of copies to the host, for each GPU that has any.
#[derive(Default)]
struct Streams(Mutex<Vec<Stream>>);

impl Streams {
    fn of(&self, device: usize) -> Result<Stream, TorchError> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(stream) = known.iter().find(|stream| stream.device() == device) {
            return Ok(*stream);
        }
        let stream = Stream::new(device, Priority::Normal)?;
        known.push(stream);
        Ok(stream)
    }
}

/// A tensor of a GPU, copied to the host.
struct OnHost {
    host: Tensor,
    copied: Event,
    options: (Kind, Device),
}

impl OnHost {
    /// Begins to copy. The tensor's memory is free when the copy is done.
    fn of(tensor: &Tensor, stream: Stream) -> Result<Self, TorchError> {
        if is_recorded(tensor.device())? {
            return Err(NotRecordable::OffloadedActivations.into());
        }
        let (mut host, copied) = (pinned_like(tensor)?, Event::new(Timing::Off)?);
        stream.wait_for_stream(Stream::current(stream.device())?)?;
        {
            let _scope = stream.enter()?;
            copy_async(&mut host, tensor)?;
        }
        keep_until(tensor, stream)?;
        copied.record(stream)?;
        Ok(Self { host, copied, options: (tensor.kind(), tensor.device()) })
    }

    /// Copies back, on the current stream.
    fn back(&self) -> Result<Tensor, TorchError> {
        if let Device::Cuda(device) = self.options.1 {
            Stream::current(device)?.wait_for(&self.copied)?;
        }
        let mut tensor = Tensor::f_empty_strided(self.host.size(), self.host.stride(), self.options)?;
        copy_async(&mut tensor, &self.host)?;
        Ok(tensor)
    }
}
