//! Activations in pinned host memory between forward and backward.
//!
//! ```text
//!   forward    compute   ── x = f(…) ─┬─ g(x) ─ y = … ─┬─ …            backward   compute   ── … ─┬─ of y ─┬─ of x ──
//!              to host                └─ copy x ─      └─ copy y            from host    ─ copy y ┘ copy x ┘
//! ```
//! Costs no computation, but two copies over PCIe. When backward needs a tensor, copies of the ones that were saved before
//! it begin, because backward needs them next: about a block is under way while the GPU computes another. If copies to the
//! host fall further behind in forward, the GPU waits for them, because the host would queue the whole forward otherwise,
//! with memory for all of it.
//!
//! Host memory comes from libtorch's allocator, which keeps pinned memory for the next step.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use tch::{Device, Kind, Tensor};

use super::{Modified, Unchanged, Unpack, saved_tensor_hooks};
use crate::cuda::{Event, Priority, Stream, Timing, copy_async, is_recorded, keep_until, pinned_like};
use crate::error::TorchError;
use crate::function::FunctionError;
use crate::recordable::NotRecordable;

/// Smaller tensors stay: a copy would take longer than it saves.
const SMALL_BYTES: usize = 1 << 16;

/// How much of a GPU's memory copies of each direction use at a time: a block of a GPT of 1.6 billion parameters, for 4
/// texts of 1024 tokens.
const UNDER_WAY_BYTES: usize = 256 << 20;

/// Runs `body`. What its operations on GPUs save for backward is moved to pinned host memory, and comes back before
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
    let pack = |tensor: &Tensor| -> Result<Unpack, FunctionError> {
        match (tensor.device(), size(tensor)) {
            (Device::Cuda(device), Some(bytes)) if bytes >= SMALL_BYTES => {
                let line = Line::of(device)?;
                let saved = line.add(tensor, bytes)?;
                Ok(Box::new(move || line.take(&saved)))
            }
            _ => {
                let kept = Unchanged::new(tensor.shallow_clone());
                Ok(Box::new(move || Ok(kept.get()?.shallow_clone())))
            }
        }
    };
    saved_tensor_hooks(pack, body)
}

/// The bytes of its elements, if their type has a name.
fn size(tensor: &Tensor) -> Option<usize> {
    Some(tensor.numel() * tensor.f_kind().ok()?.elt_size_in_bytes())
}

/// The tensors of a GPU that are on the host, in the order in which they were saved.
#[derive(Debug)]
struct Line {
    /// The streams of copies to the host and back, which run at the same time.
    to_host: Stream,
    from_host: Stream,
    waiting: Mutex<Vec<Weak<Mutex<OnHost>>>>,
    leaving: Mutex<VecDeque<Leaving>>,
}

/// A tensor that is being copied to the host.
#[derive(Debug)]
struct Leaving {
    /// Keeps its memory. A later change is harmless, but one while the copy runs may be in the copy.
    tensor: Unchanged,
    saved: Weak<Mutex<OnHost>>,
    copied: Event,
    bytes: usize,
}

type Saved = Arc<Mutex<OnHost>>;

impl Line {
    /// That of a GPU.
    fn of(device: usize) -> Result<Arc<Self>, TorchError> {
        static LINES: Mutex<Vec<Arc<Line>>> = Mutex::new(Vec::new());
        let mut lines = lock(&LINES);
        if let Some(line) = lines.iter().find(|line| line.to_host.device() == device) {
            return Ok(Arc::clone(line));
        }
        let stream = || Stream::new(device, Priority::Normal);
        let line = Self {
            to_host: stream()?,
            from_host: stream()?,
            waiting: Mutex::default(),
            leaving: Mutex::default(),
        };
        lines.push(Arc::new(line));
        Ok(Arc::clone(&lines[lines.len() - 1]))
    }

    fn add(&self, tensor: &Tensor, bytes: usize) -> Result<Saved, TorchError> {
        if is_recorded(tensor.device())? {
            return Err(NotRecordable::OffloadedActivations.into());
        }
        let (host, copied) = self.to_host(tensor)?;
        let options = (tensor.kind(), tensor.device());
        let saved = Arc::new(Mutex::new(OnHost { host, options, bytes, modified: None, back: None }));
        let tensor = Unchanged::new(tensor.shallow_clone());
        lock(&self.leaving).push_back(Leaving { tensor, saved: Arc::downgrade(&saved), copied, bytes });
        self.release(UNDER_WAY_BYTES)?;
        let mut waiting = lock(&self.waiting);
        // Those of a forward without backward.
        while waiting.last().is_some_and(|last| last.strong_count() == 0) {
            waiting.pop();
        }
        waiting.push(Arc::downgrade(&saved));
        Ok(saved)
    }

    /// Begins to copy a tensor.
    fn to_host(&self, tensor: &Tensor) -> Result<(Tensor, Event), TorchError> {
        let (mut host, copied) = (pinned_like(tensor)?, Event::new(Timing::Off)?);
        self.to_host.wait_for_stream(Stream::current(self.to_host.device())?)?;
        {
            let _scope = self.to_host.enter()?;
            copy_async(&mut host, tensor)?;
        }
        copied.record(self.to_host)?;
        Ok((host, copied))
    }

    /// Frees tensors that have been copied, until the others have at most so many bytes. Later work of the current stream
    /// may use their memory, so it waits for the copies.
    fn release(&self, most: usize) -> Result<(), TorchError> {
        let mut leaving = lock(&self.leaving);
        let mut bytes: usize = leaving.iter().map(|one| one.bytes).sum();
        while let Some(oldest) = leaving.front() {
            if bytes <= most && !oldest.copied.is_done()? {
                break;
            }
            Stream::current(self.to_host.device())?.wait_for(&oldest.copied)?;
            bytes -= oldest.bytes;
            if let (Err(modified), Some(saved)) = (oldest.tensor.get(), oldest.saved.upgrade()) {
                lock(&saved).modified = Some(modified);
            }
            drop(leaving.pop_front());
        }
        Ok(())
    }

    /// The tensor on the GPU, for the current stream. Begins to copy those that backward needs after it.
    fn take(&self, saved: &Saved) -> Result<Tensor, FunctionError> {
        // From here on the copies to the host are done for the current stream.
        self.release(0)?;
        if let Some(modified) = &lock(saved).modified {
            return Err(modified.clone().into());
        }
        let tensor = lock(saved).take(self.from_host)?;
        let mut waiting = lock(&self.waiting);
        let own = waiting.iter().rposition(|other| std::ptr::eq(other.as_ptr(), Arc::as_ptr(saved)));
        // A second backward finds it gone, and copies each tensor when it needs it.
        let Some(own) = own else { return Ok(tensor) };
        waiting.truncate(own);
        let mut ahead = 0;
        for next in waiting.iter().rev().filter_map(Weak::upgrade) {
            ahead += lock(&next).bytes;
            if ahead > UNDER_WAY_BYTES {
                break;
            }
            lock(&next).begin_back(self.from_host)?;
        }
        Ok(tensor)
    }
}

/// A tensor of a GPU, copied to the host.
#[derive(Debug)]
struct OnHost {
    host: Tensor,
    options: (Kind, Device),
    bytes: usize,
    /// Set if the tensor was modified in place before its copy was done.
    modified: Option<Modified>,
    back: Option<Back>,
}

/// A tensor that is being copied back.
#[derive(Debug)]
struct Back {
    tensor: Tensor,
    copied: Event,
    stream: Stream,
}

impl OnHost {
    /// Begins to copy back, into memory of the current stream, unless that has begun.
    fn begin_back(&mut self, stream: Stream) -> Result<(), TorchError> {
        if self.back.is_some() {
            return Ok(());
        }
        let mut tensor = Tensor::f_empty_strided(self.host.size(), self.host.stride(), self.options)?;
        // Earlier work may still use that memory, and has waited for the copy to the host.
        stream.wait_for_stream(Stream::current(stream.device())?)?;
        {
            let _scope = stream.enter()?;
            copy_async(&mut tensor, &self.host)?;
        }
        let copied = Event::new(Timing::Off)?;
        copied.record(stream)?;
        self.back = Some(Back { tensor, copied, stream });
        Ok(())
    }

    /// The tensor. The current stream waits for its copy.
    fn take(&mut self, stream: Stream) -> Result<Tensor, TorchError> {
        self.begin_back(stream)?;
        let internal = TorchError::Internal { what: "a tensor that was copied back is missing" };
        let back = self.back.take().ok_or(internal)?;
        Stream::current(stream.device())?.wait_for(&back.copied)?;
        Ok(back.tensor)
    }
}

impl Drop for OnHost {
    fn drop(&mut self) {
        // Backward may have ended before it needed the tensor. If the GPU fails here, the next call returns the error.
        if let Some(Back { tensor, stream, .. }) = &self.back {
            let _ = keep_until(tensor, *stream);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
