//! A GPU's memory, pages of the host that a GPU reads by itself, and copies that nobody waits for.
#![allow(unsafe_code)]

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

/// As the plugin fills it.
#[repr(C)]
#[derive(Debug, Default)]
pub(super) struct RawMemory {
    allocated: i64,
    peak_allocated: i64,
    reserved: i64,
    peak_reserved: i64,
    free: u64,
    total: u64,
}

/// How much of a GPU's memory is in use, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// By this process's tensors.
    pub allocated: u64,
    /// The most so far, or since [`reset_peak`].
    pub peak_allocated: u64,
    /// By this process's tensors, and kept for its next ones.
    pub reserved: u64,
    /// The most so far, or since [`reset_peak`].
    pub peak_reserved: u64,
    /// By nobody.
    pub free: u64,
    /// All that there is.
    pub total: u64,
}

/// How much of a GPU's memory is in use.
pub fn memory(device: usize) -> Result<Memory, TorchError> {
    let mut raw = RawMemory::default();
    // SAFETY: fills what it is given.
    check(unsafe { (functions()?.memory)(index(device)?, &mut raw) }, "cannot ask for a GPU's memory")?;
    let bytes = |count: i64| u64::try_from(count).unwrap_or(0);
    Ok(Memory {
        allocated: bytes(raw.allocated),
        peak_allocated: bytes(raw.peak_allocated),
        reserved: bytes(raw.reserved),
        peak_reserved: bytes(raw.peak_reserved),
        free: raw.free,
        total: raw.total,
    })
}

/// The peaks begin at what is in use now.
pub fn reset_peak(device: usize) -> Result<(), TorchError> {
    // SAFETY: takes a number.
    check(unsafe { (functions()?.reset_peak)(index(device)?) }, "cannot reset a GPU's peaks")
}

/// Gives what is kept for later tensors back, for other processes.
pub fn empty_cache() -> Result<(), TorchError> {
    // SAFETY: takes nothing.
    check(unsafe { (functions()?.empty_cache)() }, "cannot give memory back")
}

/// A tensor of the host with this one's shape and type, in pages that stay where they are: copies from and to a GPU then run
/// beside other work. Its values are arbitrary.
pub fn pinned_like(tensor: &Tensor) -> Result<Tensor, TorchError> {
    let mut made = std::ptr::null_mut();
    // SAFETY: the tensor lives; what comes back is a new handle, ours.
    unsafe {
        check((functions()?.pinned_like)(tensor.as_ptr(), &mut made), "cannot pin memory")?;
        Ok(Tensor::from_ptr(made))
    }
}

/// A copy of a tensor in such pages.
pub fn pinned(tensor: &Tensor) -> Result<Tensor, TorchError> {
    let mut copy = pinned_like(tensor)?;
    copy.f_copy_(tensor)?;
    Ok(copy)
}

/// Memory of the host whose pages stay where they are as long as this lives, so that copies from and to a GPU need no stop-over.
#[derive(Debug)]
pub(crate) struct Pinned {
    /// Kept, as its memory is.
    tensor: Tensor,
}

impl Pinned {
    /// Pins the memory of a contiguous tensor of the host.
    pub(crate) fn new(tensor: &Tensor) -> Result<Self, TorchError> {
        let bytes = tensor.numel() * tensor.kind().elt_size_in_bytes();
        // SAFETY: the memory is the tensor's, which this keeps until it is unpinned.
        let message = unsafe { (functions()?.host_register)(tensor.data_ptr(), bytes) };
        check(message, "cannot pin shared memory")?;
        Ok(Self { tensor: tensor.shallow_clone() })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if let Ok(functions) = functions() {
            // SAFETY: pinned by `new`, once. A context that is gone has unpinned it itself.
            let _ =
                check(unsafe { (functions.host_unregister)(self.tensor.data_ptr()) }, "cannot unpin memory");
        }
    }
}

/// Copies on the current stream without waiting for it. One side lies on the GPU; the other in pinned memory, or it is waited for after
/// all. Neither may change before the stream has come that far.
pub fn copy_async(to: &mut Tensor, from: &Tensor) -> Result<(), TorchError> {
    // SAFETY: both live; libtorch checks shapes and types.
    check(unsafe { drumline_copy_async(to.as_mut_ptr(), from.as_ptr()) }, "cannot copy")
}

/// Keeps a tensor's memory from being used again before `stream` has done what it has to do now.
pub fn keep_until(tensor: &Tensor, stream: Stream) -> Result<(), TorchError> {
    // SAFETY: the tensor lives.
    let message = unsafe { (functions()?.record_stream)(tensor.as_ptr(), stream.0.id, stream.0.device) };
    check(message, "cannot keep a tensor for a stream")
}
