//! Where kernels run: compiled once for each GPU, and counters that blocks of a stream's kernels share.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use tch::{Device, Kind, Tensor};

use crate::cuda::{Kernels, Properties, Stream};
use crate::error::TorchError;

/// Counters of a stream: kernels leave them at zero.
const COUNTERS: i64 = 256;

/// A source, compiled where it is first used.
pub(super) struct Source {
    text: &'static str,
    compiled: LazyLock<Mutex<HashMap<usize, Arc<Kernels>>>>,
}

impl Source {
    pub(super) const fn new(text: &'static str) -> Self {
        Self { text, compiled: LazyLock::new(Mutex::default) }
    }

    /// The kernels for a GPU.
    pub(super) fn on(&self, device: usize) -> Result<Arc<Kernels>, TorchError> {
        let mut compiled = self.compiled.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernels) = compiled.get(&device) {
            return Ok(Arc::clone(kernels));
        }
        let kernels = Arc::new(Kernels::compile(device, self.text)?);
        compiled.insert(device, Arc::clone(&kernels));
        Ok(kernels)
    }
}

/// How many multiprocessors a GPU has.
pub(super) fn multiprocessors(device: usize) -> Result<u32, TorchError> {
    static KNOWN: LazyLock<Mutex<HashMap<usize, u32>>> = LazyLock::new(Mutex::default);
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(count) = known.get(&device) {
        return Ok(*count);
    }
    let count = u32::try_from(Properties::of(device)?.multiprocessors).unwrap_or(1);
    known.insert(device, count);
    Ok(count)
}

/// Zeros that the kernels of the current stream use one after the other.
pub(super) fn counters(device: usize) -> Result<Tensor, TorchError> {
    static KNOWN: LazyLock<Mutex<HashMap<Stream, Tensor>>> = LazyLock::new(Mutex::default);
    let stream = Stream::current(device)?;
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(counters) = known.get(&stream) {
        return Ok(counters.shallow_clone());
    }
    let counters = Tensor::f_zeros([COUNTERS], (Kind::Int, Device::Cuda(device)))?;
    known.insert(stream, counters.shallow_clone());
    Ok(counters)
}
