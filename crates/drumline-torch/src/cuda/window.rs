//! GPU memory that processes of one machine share (CUDA IPC), and flags by which their streams wait for each other.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};

use tch::{Kind, Tensor};

use super::library::functions;
use super::memory::Pinned;
use super::properties::index;
use super::stream::Stream;
use crate::error::TorchError;
use crate::status::check;

type Result<T = ()> = std::result::Result<T, TorchError>;

/// By which another process opens a window.
pub(crate) type WindowHandle = [u8; 64];

/// Who has made a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MadeBy {
    ThisProcess,
    AnotherProcess,
}

/// Memory of a GPU that several processes use.
#[derive(Debug)]
pub(crate) struct Window {
    /// Its bytes.
    pub(crate) bytes: Tensor,
    device: usize,
    made_by: MadeBy,
}

impl Window {
    /// New memory, and the handle for other processes. It must live as long as they use it.
    pub(crate) fn new(device: usize, len: usize) -> Result<(Self, WindowHandle)> {
        let (mut data, mut handle) = (std::ptr::null_mut(), [0u8; 64]);
        // SAFETY: fills a pointer and 64 bytes.
        let message =
            unsafe { (functions()?.window_new)(index(device)?, len, &mut data, handle.as_mut_ptr().cast()) };
        check(message, "cannot make memory that processes share")?;
        Ok((Self::over(device, data, len, MadeBy::ThisProcess)?, handle))
    }

    /// The memory of another process.
    pub(crate) fn open(device: usize, handle: &WindowHandle, len: usize) -> Result<Self> {
        let mut data = std::ptr::null_mut();
        // SAFETY: reads 64 bytes, and fills a pointer.
        let message =
            unsafe { (functions()?.window_open)(index(device)?, handle.as_ptr().cast(), &mut data) };
        check(message, "cannot open another process's memory on the GPU")?;
        Self::over(device, data, len, MadeBy::AnotherProcess)
    }

    fn over(device: usize, data: *mut c_void, len: usize, made_by: MadeBy) -> Result<Self> {
        let mut made = std::ptr::null_mut();
        // SAFETY: the memory has that many bytes; the result is a new handle that we own.
        let bytes = unsafe {
            let message = (functions()?.window_tensor)(index(device)?, data, len as i64, &mut made);
            check(message, "cannot make a tensor over shared memory")?;
            Tensor::from_ptr(made)
        };
        Ok(Self { bytes, device, made_by })
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        if let (Ok(functions), Ok(device)) = (functions(), index(self.device)) {
            let data = self.bytes.data_ptr();
            let release = match self.made_by {
                MadeBy::ThisProcess => functions.window_free,
                MadeBy::AnotherProcess => functions.window_close,
            };
            // SAFETY: made or opened once, and not used again.
            let _ = check(unsafe { release(device, data) }, "cannot release shared memory");
        }
    }
}

/// Numbers in host memory that processes share, which streams write and wait for.
#[derive(Debug)]
pub(crate) struct Flags {
    /// Dropped before the memory, to unpin it.
    _pinned: Pinned,
    host: Tensor,
    on_gpu: usize,
}

impl Flags {
    /// Over memory of 32-bit integers on the host.
    pub(crate) fn new(host: Tensor) -> Result<Self> {
        debug_assert_eq!(host.kind(), Kind::Int);
        let (pinned, mut address) = (Pinned::new(&host)?, std::ptr::null_mut());
        // SAFETY: the memory is pinned; fills a pointer.
        let message = unsafe { (functions()?.pinned_address)(host.data_ptr(), &mut address) };
        check(message, "cannot use pinned memory")?;
        Ok(Self { _pinned: pinned, host, on_gpu: address as usize })
    }

    fn on_gpu(&self, flag: usize) -> *mut c_void {
        assert!(flag < self.host.numel(), "flag {flag} of {}", self.host.numel());
        (self.on_gpu + flag * size_of::<u32>()) as *mut c_void
    }

    /// Later work of the stream waits until the flag has reached `value`, which is less than 2^31 away from it.
    pub(crate) fn wait(&self, stream: Stream, flag: usize, value: u32) -> Result {
        // SAFETY: the address is in pinned memory that lives until the group ends.
        let message = unsafe { (functions()?.flag_wait)(stream.raw()?, self.on_gpu(flag), value) };
        check(message, "cannot wait on a GPU")
    }

    /// The flag becomes `value` after the current work of the stream.
    pub(crate) fn write(&self, stream: Stream, flag: usize, value: u32) -> Result {
        // SAFETY: as above.
        let message = unsafe { (functions()?.flag_write)(stream.raw()?, self.on_gpu(flag), value) };
        check(message, "cannot signal on a GPU")
    }

    /// The flag, as the host sees it.
    pub(crate) fn on_host(&self, flag: usize) -> &AtomicU32 {
        assert!(flag < self.host.numel(), "flag {flag} of {}", self.host.numel());
        // SAFETY: a 32-bit integer in memory that lives as long as this, and that all sides access atomically.
        unsafe { AtomicU32::from_ptr(self.host.data_ptr().cast::<u32>().add(flag)) }
    }

    /// Whether the flag has reached `value`.
    pub(crate) fn has_reached(&self, flag: usize, value: u32) -> bool {
        self.on_host(flag).load(Ordering::Acquire).wrapping_sub(value) < 1 << 31
    }
}

// SAFETY: threads may share a handle of libtorch, because its reference count is atomic; flags are accessed atomically.
unsafe impl Sync for Flags {}
// SAFETY: as above. Who reads or writes the bytes of a window is up to its users.
unsafe impl Sync for Window {}
