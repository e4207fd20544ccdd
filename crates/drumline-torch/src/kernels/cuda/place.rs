//! Where kernels run: compiled once for each GPU and type of elements, and counters that blocks of a stream's kernels share.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use tch::{Device, Kind, Tensor};

use crate::cuda::{Argument, Grid, Kernels, Properties, Stream};
use crate::error::TorchError;

/// Counters of a stream: kernels leave them at zero.
const COUNTERS: i64 = 4096;

/// The type of a tensor's elements, of those that kernels are made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Element {
    Bf16,
    F16,
    F32,
}

impl Element {
    /// Where kernels for it can be compiled: those of bfloat16 need the eighth generation.
    pub(super) fn on(device: usize, kind: Kind) -> Option<Self> {
        let element = match kind {
            Kind::BFloat16 => Self::Bf16,
            Kind::Half => Self::F16,
            Kind::Float => Self::F32,
            _ => return None,
        };
        let generation = generation(device).ok()?;
        (Kernels::can_be_compiled() && (element != Self::Bf16 || generation >= 8)).then_some(element)
    }

    /// How many of them a thread reads at once.
    pub(super) fn per_vector(self) -> i64 {
        if self == Self::F32 { 4 } else { 8 }
    }

    /// In the sources.
    fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::F32 => "float",
        }
    }
}

/// Whether vectors can be read from where the tensor begins.
pub(super) fn is_aligned(tensor: &Tensor) -> bool {
    (tensor.data_ptr() as usize).is_multiple_of(16)
}

/// Whether a tensor is of this type, there, of this size, without gaps, and begins where vectors can be read.
pub(super) fn is_plain(tensor: &Tensor, place: (Kind, Device), size: &[i64]) -> bool {
    (tensor.kind(), tensor.device()) == place
        && tensor.size() == size
        && tensor.is_contiguous()
        && is_aligned(tensor)
}

/// Kernels by the GPU and what the source began with.
type Compiled = HashMap<(usize, String), Arc<Kernels>>;

/// A source, compiled for a GPU and a type of elements when it is first used.
pub(super) struct Source {
    parts: &'static [&'static str],
    compiled: LazyLock<Mutex<Compiled>>,
}

impl Source {
    /// Of parts that follow each other.
    pub(super) const fn new(parts: &'static [&'static str]) -> Self {
        Self { parts, compiled: LazyLock::new(Mutex::default) }
    }

    pub(super) fn on(&self, device: usize, element: Element) -> Result<Arc<Kernels>, TorchError> {
        self.with(device, element, &[])
    }

    /// With constants that the source knows by their names.
    pub(super) fn with(
        &self,
        device: usize,
        element: Element,
        constants: &[(&str, i64)],
    ) -> Result<Arc<Kernels>, TorchError> {
        let constants = constants.iter().map(|(name, value)| format!("#define {name} {value}\n"));
        let begin = format!("#define ELEMENT {}\n{}", element.name(), constants.collect::<String>());
        let mut compiled = self.compiled.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernels) = compiled.get(&(device, begin.clone())) {
            return Ok(Arc::clone(kernels));
        }
        let text = [&begin, include_str!("numbers.cu"), &self.parts.concat()].concat();
        let kernels = Arc::new(Kernels::compile(device, &text)?);
        compiled.insert((device, begin), Arc::clone(&kernels));
        Ok(kernels)
    }
}

/// Launches a kernel by its name.
///
/// # Safety
/// As [`Kernel::launch`](crate::cuda::Kernel::launch).
pub(super) unsafe fn launch(
    kernels: &Kernels,
    name: &str,
    (device, grid): (usize, Grid),
    arguments: &[Argument],
) -> Result<(), TorchError> {
    // SAFETY: passed on to the caller.
    unsafe { kernels.get(name)?.launch(device, grid, arguments) }
}

/// A tensor's memory, or null.
pub(super) fn pointer(tensor: Option<&Tensor>) -> Argument {
    tensor.map_or_else(|| std::ptr::null_mut::<u8>().into(), Argument::from)
}

/// A GPU's number of its generation: 9 for Hopper.
pub(super) fn generation(device: usize) -> Result<i32, TorchError> {
    Ok(properties(device)?.0)
}

/// How many multiprocessors a GPU has.
pub(super) fn multiprocessors(device: usize) -> Result<u32, TorchError> {
    Ok(properties(device)?.1)
}

/// Generation and multiprocessors, asked for once.
fn properties(device: usize) -> Result<(i32, u32), TorchError> {
    static KNOWN: LazyLock<Mutex<HashMap<usize, (i32, u32)>>> = LazyLock::new(Mutex::default);
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(found) = known.get(&device) {
        return Ok(*found);
    }
    let properties = Properties::of(device)?;
    let found = (properties.capability.0, u32::try_from(properties.multiprocessors).unwrap_or(1));
    known.insert(device, found);
    Ok(found)
}

/// Zeros that the kernels of the current stream use one after the other.
pub(super) fn counters(device: usize) -> Result<Tensor, TorchError> {
    static KNOWN: LazyLock<Mutex<HashMap<Stream, Tensor>>> = LazyLock::new(Mutex::default);
    let stream = Stream::current(device)?;
    let zeros = || Ok(Tensor::f_zeros([COUNTERS], (Kind::Int, Device::Cuda(device)))?);
    if stream.is_recording()? {
        // They are the recording's, and zero only when that is launched.
        return zeros();
    }
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(counters) = known.get(&stream) {
        return Ok(counters.shallow_clone());
    }
    let counters = zeros()?;
    known.insert(stream, counters.shallow_clone());
    Ok(counters)
}
