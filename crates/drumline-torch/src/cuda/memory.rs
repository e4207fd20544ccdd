//! GPU memory statistics, pinned memory, and asynchronous copies.
#![allow(unsafe_code)]

use std::ffi::c_void;

use tch::Tensor;
use torch_sys::C_tensor;

use super::library::functions;
use super::properties::index;
use super::stream::Stream;
use crate::error::TorchError;
use crate::status::{Message, check};

unsafe extern "C" {
    fn drumline_copy_async(to: *mut C_tensor, from: *const C_tensor) -> Message;
}

/// As the plugin writes it.
#[repr(C)]
#[derive(Debug, Default)]
pub(super) struct RawMemory {
    allocated: i64,
    peak_allocated: i64,
    reserved: i64,
    peak_reserved: i64,
    free: u64,
    total: u64,
    allocations: i64,
}

/// The memory use of a GPU, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// Used by this process's tensors.
    pub allocated: u64,
    /// The maximum so far, or since [`reset_peak`].
    pub peak_allocated: u64,
    /// Used by this process's tensors, or cached for later ones.
    pub reserved: u64,
    /// The maximum so far, or since [`reset_peak`].
    pub peak_reserved: u64,
    /// Not in use.
    pub free: u64,
    /// The total memory.
    pub total: u64,
    /// How often this process's tensors were given memory so far.
    pub allocations: u64,
}

/// The memory use of a GPU.
pub fn memory(device: usize) -> Result<Memory, TorchError> {
    let mut raw = RawMemory::default();
    // SAFETY: writes one struct.
    check(unsafe { (functions()?.memory)(index(device)?, &mut raw) }, "cannot read a GPU's memory use")?;
    let unsigned = |count: i64| u64::try_from(count).unwrap_or(0);
    Ok(Memory {
        allocated: unsigned(raw.allocated),
        peak_allocated: unsigned(raw.peak_allocated),
        reserved: unsigned(raw.reserved),
        peak_reserved: unsigned(raw.peak_reserved),
        free: raw.free,
        total: raw.total,
        allocations: unsigned(raw.allocations),
    })
}

/// Resets the peaks to the current use.
pub fn reset_peak(device: usize) -> Result<(), TorchError> {
    // SAFETY: takes a number.
    check(unsafe { (functions()?.reset_peak)(index(device)?) }, "cannot reset a GPU's peaks")
}

/// Returns cached memory to the driver, for other processes.
pub fn empty_cache() -> Result<(), TorchError> {
    // SAFETY: takes nothing.
    check(unsafe { (functions()?.empty_cache)() }, "cannot empty the memory cache")
}

/// An uninitialised tensor in pinned host memory, with the shape and type of `tensor`. Copies between pinned memory and
/// a GPU are asynchronous.
pub fn pinned_like(tensor: &Tensor) -> Result<Tensor, TorchError> {
    let mut made = std::ptr::null_mut();
    // SAFETY: the tensor lives; the result is a new handle that we own.
    unsafe {
        check((functions()?.pinned_like)(tensor.as_ptr(), &mut made), "cannot pin memory")?;
        Ok(Tensor::from_ptr(made))
    }
}

/// A copy of a tensor in pinned memory.
pub fn pinned(tensor: &Tensor) -> Result<Tensor, TorchError> {
    let mut copy = pinned_like(tensor)?;
    copy.f_copy_(tensor)?;
    Ok(copy)
}

/// Pins a tensor's host memory as long as this lives, so that copies between it and a GPU need no extra buffer.
#[derive(Debug)]
pub(crate) struct Pinned {
    /// Keeps the memory alive.
    tensor: Tensor,
}

impl Pinned {
    /// Pins the memory of a contiguous tensor on the host.
    pub(crate) fn new(tensor: &Tensor) -> Result<Self, TorchError> {
        let bytes = tensor.numel() * tensor.kind().elt_size_in_bytes();
        // SAFETY: the memory is the tensor's, which this keeps alive until it is unpinned.
        unsafe { pin(tensor.data_ptr(), bytes)? };
        Ok(Self { tensor: tensor.shallow_clone() })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: pinned by `new`, once.
        unsafe { unpin(self.tensor.data_ptr()) };
    }
}

/// Pins host memory, so that GPUs copy from and to it.
///
/// # Safety
/// The memory is there until it is [unpinned](unpin).
pub(crate) unsafe fn pin(start: *mut c_void, bytes: usize) -> Result<(), TorchError> {
    // SAFETY: the caller's promise.
    check(unsafe { (functions()?.host_register)(start, bytes) }, "cannot pin host memory")
}

/// Unpins memory.
///
/// # Safety
/// It was [pinned](pin), and no GPU copies from or to it.
pub(crate) unsafe fn unpin(start: *mut c_void) {
    if let Ok(functions) = functions() {
        // If the CUDA context has ended, the memory is already unpinned.
        // SAFETY: the caller's promise.
        let _ = check(unsafe { (functions.host_unregister)(start) }, "cannot unpin memory");
    }
}

/// Queues a copy on the current stream. One side is on the GPU. The other should be in pinned memory; otherwise this
/// waits for the copy. Neither side may change before the copy is done.
pub fn copy_async(to: &mut Tensor, from: &Tensor) -> Result<(), TorchError> {
    // SAFETY: both live; libtorch checks shapes and types.
    check(unsafe { drumline_copy_async(to.as_mut_ptr(), from.as_ptr()) }, "cannot copy")
}

/// Keeps a tensor's memory from being reused before the current work of `stream` is done, as PyTorch's `record_stream`.
pub fn keep_until(tensor: &Tensor, stream: Stream) -> Result<(), TorchError> {
    // SAFETY: the tensor lives.
    let message = unsafe { (functions()?.record_stream)(tensor.as_ptr(), stream.0.id, stream.0.device) };
    check(message, "cannot keep a tensor for a stream")
}
