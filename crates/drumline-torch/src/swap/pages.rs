//! Memory in whole pages: of this process, or of a file.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use tch::{Kind, Tensor};

use crate::error::TorchError;
use crate::memory::tensor_over;
use crate::status::Closure;

/// The bytes of a page, to which direct I/O is aligned.
pub const PAGE: usize = 4096;

#[derive(Debug)]
struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the memory belongs to nobody else. Who reads and writes which bytes when is up to the users, as with tensors.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
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

    /// The first `len` bytes of a file. What is written here is written to the file.
    pub(super) fn of_file(file: &File, len: usize) -> io::Result<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: as above; the file has the bytes, and nobody else can shorten it, because it has no name.
        let start = unsafe { mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, file, 0)? };
        Self::at(start.cast(), len)
    }

    fn at(start: *mut u8, len: usize) -> io::Result<Self> {
        let start = NonNull::new(start).ok_or_else(|| io::Error::other("mmap returned address 0"))?;
        Ok(Self(Arc::new(Mapping { start, len })))
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
}
