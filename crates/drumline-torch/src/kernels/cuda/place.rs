//! What kernels need to run: sources compiled once for each GPU and element type, and counters that blocks share.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use tch::{Device, Kind, Tensor};

use crate::cuda::{Argument, Grid, Kernels, Properties, Rounding, Stream};
use crate::error::TorchError;

/// Counters per stream. Kernels reset them to zero.
const COUNTERS: i64 = 4096;

/// The element types that kernels support.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Element {
    Bf16,
    F16,
    F32,
}

impl Element {
    /// The element type, if kernels for it can be compiled. bfloat16 needs compute capability 8.
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

    /// How many elements a thread reads at once.
    pub(super) fn per_vector(self) -> i64 {
        if self == Self::F32 { 4 } else { 8 }
    }

    /// Its name in the sources.
    fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::F32 => "float",
        }
    }
}

/// Whether the tensor is aligned for vector reads.
pub(super) fn is_aligned(tensor: &Tensor) -> bool {
    (tensor.data_ptr() as usize).is_multiple_of(16)
}

/// Whether a tensor has this type, device and size, is contiguous, and is aligned for vector reads.
pub(super) fn is_plain(tensor: &Tensor, kind: Kind, device: Device, size: &[i64]) -> bool {
    tensor.kind() == kind
        && tensor.device() == device
        && tensor.size() == size
        && tensor.is_contiguous()
        && is_aligned(tensor)
}

/// Kernels by GPU and by the constants at the beginning of the source.
type Compiled = HashMap<(usize, String), Arc<Kernels>>;

/// A source, compiled for a GPU and an element type when it is first used.
pub(super) struct Source {
    parts: &'static [&'static str],
    rounding: Rounding,
    compiled: LazyLock<Mutex<Compiled>>,
}

impl Source {
    /// A source of several parts, in order.
    pub(super) const fn new(parts: &'static [&'static str]) -> Self {
        Self { parts, rounding: Rounding::Fast, compiled: LazyLock::new(Mutex::default) }
    }

    /// A source whose operations round as on a CPU.
    pub(super) const fn ieee(parts: &'static [&'static str]) -> Self {
        Self { parts, rounding: Rounding::Ieee, compiled: LazyLock::new(Mutex::default) }
    }

    pub(super) fn on(&self, device: usize, element: Element) -> Result<Arc<Kernels>, TorchError> {
        self.with(device, element, &[])
    }

    /// Compiles with constants, which the source uses by name.
    pub(super) fn with(
        &self,
        device: usize,
        element: Element,
        constants: &[(&str, i64)],
    ) -> Result<Arc<Kernels>, TorchError> {
        self.with_arrays(device, element, constants, &String::new)
    }

    /// The same with arrays, whose text follows from the constants.
    pub(super) fn with_arrays(
        &self,
        device: usize,
        element: Element,
        constants: &[(&str, i64)],
        arrays: &dyn Fn() -> String,
    ) -> Result<Arc<Kernels>, TorchError> {
        let constants = constants.iter().map(|(name, value)| format!("#define {name} {value}\n"));
        let begin = format!("#define ELEMENT {}\n{}", element.name(), constants.collect::<String>());
        let mut compiled = self.compiled.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernels) = compiled.get(&(device, begin.clone())) {
            return Ok(Arc::clone(kernels));
        }
        let text = [&begin, include_str!("numbers.cu"), &arrays(), &self.parts.concat()].concat();
        let kernels = Arc::new(Kernels::compile(device, &text, self.rounding)?);
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
    device: usize,
    grid: Grid,
    arguments: &[Argument],
) -> Result<(), TorchError> {
    // SAFETY: the caller's promise.
    unsafe { kernels.get(name)?.launch(device, grid, arguments) }
}

/// The address of a tensor's memory, or null.
pub(super) fn pointer(tensor: Option<&Tensor>) -> Argument {
    tensor.map_or_else(|| std::ptr::null_mut::<u8>().into(), Argument::from)
}

/// The major compute capability of a GPU: 9 for Hopper.
pub(super) fn generation(device: usize) -> Result<i32, TorchError> {
    Ok(properties(device)?.0)
}

/// The number of multiprocessors of a GPU.
pub(super) fn multiprocessors(device: usize) -> Result<u32, TorchError> {
    Ok(properties(device)?.1)
}

/// Compute capability and multiprocessors, cached.
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

/// Counters for the kernels of the current stream, which are zero between kernels.
pub(super) fn counters(device: usize) -> Result<Tensor, TorchError> {
    static KNOWN: LazyLock<Mutex<HashMap<Stream, Tensor>>> = LazyLock::new(Mutex::default);
    let stream = Stream::current(device)?;
    let zeros = || Ok(Tensor::f_zeros([COUNTERS], (Kind::Int, Device::Cuda(device)))?);
    if stream.is_recording()? {
        // They belong to the recording, and become zero only when it is launched.
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
