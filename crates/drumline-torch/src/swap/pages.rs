//! Memory in whole pages: of this process, pinned for GPUs if they copy from and to it, or of a file.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use tch::{Kind, Tensor};

use crate::cuda;
use crate::error::TorchError;
use crate::kernels::on_threads;
use crate::memory::tensor_over;
use crate::status::Closure;

/// The bytes of a page, to which direct I/O is aligned.
pub const PAGE: usize = 4096;

/// The bytes that a thread touches at a time.
const TOUCHED: usize = 16 << 20;
/// The most bytes with which the rate of memory is measured: more than caches have.
const MEASURED: usize = 2 << 30;

/// Why memory cannot be pinned.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PinError {
    /// The system has no memory.
    #[error(
        "cannot allocate {bytes} bytes of host memory: {cause}; try a smaller part of the state, or more ranks"
    )]
    Memory {
        /// How much.
        bytes: usize,
        /// The error of the system.
        #[source]
        cause: io::Error,
    },
    /// CUDA refuses.
    #[error(
        "cannot pin {bytes} bytes of host memory: {cause}; try a higher limit of locked memory (ulimit -l), or a smaller part of the state"
    )]
    Pin {
        /// How much.
        bytes: usize,
        /// CUDA's error.
        #[source]
        cause: Box<TorchError>,
    },
}

#[derive(Debug)]
struct Mapping {
    start: NonNull<u8>,
    len: usize,
    is_pinned: AtomicBool,
}

// SAFETY: the memory belongs to nobody else. Who reads and writes which bytes when is up to the users, as with tensors.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        if *self.is_pinned.get_mut() {
            // SAFETY: pinned once, and nothing uses it any more.
            unsafe { cuda::unpin(self.start.as_ptr().cast()) };
        }
        // SAFETY: the mapping is ours, and no handle or tensor over it is left.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// Memory in whole pages. It lives until the last handle and the last tensor over it are dropped.
#[derive(Debug, Clone)]
pub struct Pages(Arc<Mapping>);

impl Pages {
    /// Zeros in host memory, exactly `len` bytes in whole pages.
    pub fn zeros(len: usize) -> io::Result<Self> {
        let len = len.max(1).next_multiple_of(PAGE);
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
        let start = unsafe { mmap_anonymous(std::ptr::null_mut(), len, access, MapFlags::PRIVATE)? };
        Self::at(start.cast(), len)
    }

    /// Zeros in host memory, exactly `len` bytes in whole pages, which are there already: all threads have touched them.
    pub fn touched(len: usize) -> io::Result<Self> {
        let pages = Self::zeros(len)?;
        // Larger pages of the CPU are faster, where the system has them.
        pages.advise(0..pages.num_bytes(), Advice::LinuxHugepage);
        let parts = pages.bytes_mut(0..pages.num_bytes()).chunks_mut(TOUCHED).collect();
        on_threads(parts, |part: &mut [u8]| part.chunks_mut(PAGE).for_each(|page| page[0] = 0));
        Ok(pages)
    }

    /// The same, pinned: a GPU copies from and to them without help of the CPU.
    pub fn pinned(len: usize) -> Result<Self, PinError> {
        let pages = Self::touched(len).map_err(|cause| PinError::Memory { bytes: len, cause })?;
        // SAFETY: the memory is the mapping's, which unpins it before it ends.
        let pinned = unsafe { cuda::pin(pages.0.start.as_ptr().cast(), pages.0.len) };
        pinned.map_err(|cause| PinError::Pin { bytes: len, cause: Box::new(cause) })?;
        pages.0.is_pinned.store(true, Ordering::Relaxed);
        Ok(pages)
    }

    /// The first `len` bytes of a file. What is written here is written to the file.
    pub(super) fn of_file(file: &File, len: usize) -> io::Result<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: as above; the file has the bytes, and nobody else can shorten it, because it has no name.
        let start = unsafe { mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, file, 0)? };
        Self::at(start.cast(), len)
    }

    fn at(start: *mut u8, len: usize) -> io::Result<Self> {
        let start = NonNull::new(start).ok_or_else(|| io::Error::other("mmap returned address 0"))?;
        Ok(Self(Arc::new(Mapping { start, len, is_pinned: AtomicBool::new(false) })))
    }

    /// How many bytes all threads together read and write in a second, measured on these pages, whose content changes.
    pub fn measure(&self) -> f64 {
        let len = self.0.len.min(MEASURED);
        let pass = || {
            let parts = self.bytes_mut(0..len).chunks_mut(TOUCHED).collect();
            let began = Instant::now();
            on_threads(parts, |part: &mut [u8]| {
                part.iter_mut().for_each(|byte| *byte = byte.wrapping_add(1))
            });
            began.elapsed().as_secs_f64().max(1e-9)
        };
        let fastest = (0..3).map(|_| pass()).fold(f64::INFINITY, f64::min);
        2.0 * len as f64 / fastest
    }

    /// The number of bytes.
    pub fn num_bytes(&self) -> usize {
        self.0.len
    }

    /// The address of a byte.
    pub fn address(&self, offset: usize) -> usize {
        assert!(offset <= self.0.len, "byte {offset} of {}", self.0.len);
        self.0.start.as_ptr() as usize + offset
    }

    /// The bytes of `range`. As with handles of one tensor, nothing else may be reading or writing them meanwhile.
    #[expect(clippy::mut_from_ref, reason = "handles and tensors share the memory, as in libtorch")]
    pub fn bytes_mut(&self, range: Range<usize>) -> &mut [u8] {
        assert!(range.start <= range.end && range.end <= self.0.len, "{range:?} of {}", self.0.len);
        // SAFETY: the range is within the mapping, which this handle keeps, and any bytes are valid.
        unsafe { std::slice::from_raw_parts_mut(self.0.start.as_ptr().add(range.start), range.len()) }
    }

    /// A one-dimensional tensor over these pages, from a byte on.
    pub fn tensor(&self, offset: usize, kind: Kind, len: usize) -> Result<Tensor, TorchError> {
        let end = offset + len * kind.elt_size_in_bytes();
        if end > self.0.len {
            let expected = format!("at most {}", self.0.len);
            return Err(TorchError::value("the end of a tensor in bytes", end, expected));
        }
        let data = self.address(offset) as *mut c_void;
        // SAFETY: the memory has the elements, any bits are values, and the tensor keeps the pages.
        unsafe { tensor_over(data, kind, &[len as i64], Closure::keeping(self.clone())) }
    }

    /// Asks the kernel to read these bytes from the file, and does not wait.
    pub fn will_need(&self, range: Range<usize>) {
        self.advise(range, Advice::WillNeed);
    }

    fn advise(&self, range: Range<usize>, advice: Advice) {
        let (start, end) = (range.start / PAGE * PAGE, range.end.next_multiple_of(PAGE).min(self.0.len));
        // SAFETY: pages of the mapping; no advice that is given here changes their content.
        let _ = unsafe { madvise(self.0.start.as_ptr().add(start).cast(), end - start, advice) };
    }

    /// Pages of a file that this process has used are not counted as its memory any more. Their content stays.
    pub(super) fn forget(&self, range: Range<usize>) {
        self.advise(range, Advice::LinuxDontNeed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_begin_as_zeros_and_are_whole() {
        let pages = Pages::zeros(PAGE + 1).unwrap();
        assert_eq!(pages.num_bytes(), 2 * PAGE);
        assert_eq!(pages.address(0) % PAGE, 0);
        assert!(pages.bytes_mut(0..2 * PAGE).iter().all(|byte| *byte == 0));
        pages.bytes_mut(PAGE..PAGE + 2)[1] = 7;
        assert_eq!(pages.clone().bytes_mut(PAGE + 1..PAGE + 2), [7]);
        assert_eq!(Pages::zeros(0).unwrap().num_bytes(), PAGE);
    }

    #[test]
    fn touched_pages_are_zeros() {
        let len = TOUCHED + PAGE + 1;
        let pages = Pages::touched(len).unwrap();
        assert_eq!(pages.num_bytes(), TOUCHED + 2 * PAGE);
        assert!(pages.bytes_mut(0..pages.num_bytes()).iter().all(|byte| *byte == 0));
        assert!(pages.measure() > 0.0);
    }

    #[test]
    fn without_a_gpu_nothing_is_pinned() {
        if cuda::open().is_err() {
            let error = Pages::pinned(PAGE).unwrap_err().to_string();
            assert!(error.starts_with("cannot pin 4096 bytes of host memory: "), "{error}");
        }
    }
}
