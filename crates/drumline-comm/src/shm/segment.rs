//! A piece of memory that several processes map: a sealed memfd.
//!
//! It has no name, so nobody else can open it and nothing is left behind: the kernel frees it when the last process that holds
//! it ends. Its size cannot change, so a peer cannot make this process fault. Not here: how the descriptor gets to the other
//! ranks (`descriptors`), what lies where (`layout`, `heap`).

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

/// The kernel allocates whole pages.
const PAGE: usize = 4096;

/// The bytes that Linux maps around a page that is read (`fault_around_bytes`).
const AROUND: usize = 64 << 10;

/// Memory shared between processes, mapped as long as this value lives.
#[derive(Debug)]
pub(crate) struct Segment {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping belongs to this value alone and does not depend on the thread; the users of `at` govern access to its
// bytes.
unsafe impl Send for Segment {}
// SAFETY: as above.
unsafe impl Sync for Segment {}

/// Makes a segment and the descriptor with which peers can map it. Its pages are not allocated yet.
pub(crate) fn create(len: usize) -> io::Result<OwnedFd> {
    let fd = rustix::fs::memfd_create("drumline", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&fd, len as u64)?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(fd)
}

/// The same, if the machine has that much memory.
pub(crate) fn create_within_memory(len: usize) -> io::Result<OwnedFd> {
    check_room(len)?;
    create(len)
}

/// The bytes of part `me` of `parts` of a segment, in whole pages.
pub(crate) fn part(len: usize, me: usize, parts: usize) -> Range<usize> {
    let part = len.div_ceil(parts).next_multiple_of(PAGE);
    (me * part).min(len)..((me + 1) * part).min(len)
}

/// Allocates the pages of these bytes of a segment, so that a lack of memory is an error here and not a fault later.
pub(crate) fn allocate(fd: impl AsFd, range: &Range<usize>) -> io::Result<()> {
    if range.is_empty() {
        return Ok(());
    }
    let none = rustix::fs::FallocateFlags::empty();
    Ok(rustix::fs::fallocate(fd, none, range.start as u64, range.len() as u64)?)
}

/// Memory that ranks share and that nobody has used yet, to be written once.
///
/// It is written as a file: the kernel clears a page that a process touches for the first time, but not one that is
/// written whole.
#[derive(Debug)]
pub struct FirstBytes<'a> {
    fd: BorrowedFd<'a>,
    len: usize,
}

impl<'a> FirstBytes<'a> {
    pub(crate) fn new(fd: &'a impl AsFd, len: usize) -> Self {
        Self { fd: fd.as_fd(), len }
    }

    /// Writes these bytes from byte `offset` on.
    pub fn write_at(&self, mut offset: usize, mut bytes: &[u8]) -> io::Result<()> {
        if bytes.len() > self.len.saturating_sub(offset) {
            let end = offset.saturating_add(bytes.len());
            let message = format!("bytes to {end} of shared memory that has {}", self.len);
            return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
        }
        while !bytes.is_empty() {
            let written = rustix::io::retry_on_intr(|| rustix::io::pwrite(self.fd, bytes, offset as u64))?;
            (offset, bytes) = (offset + written, &bytes[written..]);
        }
        Ok(())
    }
}

/// An error if the machine has less memory: the kernel would allocate what there is and then kill processes.
fn check_room(len: usize) -> io::Result<()> {
    let available = available_memory().unwrap_or(u64::MAX);
    if len as u64 <= available {
        return Ok(());
    }
    Err(io::Error::new(
        io::ErrorKind::OutOfMemory,
        format!("{len} bytes of shared memory are needed, {available} are available; try smaller buffers"),
    ))
}

/// The bytes of host memory that can be allocated without killing processes, if the system says: those of the machine, or
/// of the container (cgroup) if that has fewer.
pub fn available_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let of_machine = line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? << 10;
    Some(left_in_cgroup().map_or(of_machine, |left| left.min(of_machine)))
}

/// What is left of the limit of this process's cgroup, if there is one (version 2).
fn left_in_cgroup() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let folder = text.lines().find_map(|line| line.strip_prefix("0::"))?;
    let read = |name: &str| {
        let text = std::fs::read_to_string(format!("/sys/fs/cgroup{folder}/{name}")).ok()?;
        text.trim().parse::<u64>().ok()
    };
    Some(read("memory.max")?.saturating_sub(read("memory.current")?))
}

impl Segment {
    /// Maps the memory behind `fd`, after a check that it has `len` bytes and cannot lose them.
    pub(crate) fn map(fd: impl AsFd, len: usize) -> io::Result<Self> {
        let fd = fd.as_fd();
        let size = rustix::fs::fstat(fd)?.st_size as u64;
        let seals = rustix::fs::fcntl_get_seals(fd)?;
        if size < len as u64 || !seals.contains(SealFlags::SHRINK) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!(
                    "shared memory of {size} bytes with seals {seals:?}, expected {len} bytes sealed against shrinking"
                ),
            ));
        }
        let len = len.max(1);
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory; the file has `len`
        // bytes and is sealed against losing them.
        let base = unsafe {
            let access = ProtFlags::READ | ProtFlags::WRITE;
            rustix::mm::mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, fd, 0)?
        };
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mmap returned address 0"))?;
        Ok(Self { base, len })
    }

    /// Lets the kernel clear these pages, which are allocated. That takes most of the time of allocating memory, and less
    /// if each rank does it for a part.
    pub(crate) fn clear(&self, range: &Range<usize>) {
        self.touch(range.clone(), PAGE);
    }

    /// Maps all pages, after all are cleared: the kernel maps those around a page that is read, up to [`AROUND`] bytes.
    /// With `MAP_POPULATE` it would look up each page, which takes ten times as long.
    pub(crate) fn map_pages(&self) {
        self.touch(0..self.len, AROUND);
    }

    fn touch(&self, range: Range<usize>, step: usize) {
        for offset in range.step_by(step) {
            // SAFETY: inside the mapping; a byte has no invalid values, and this one is not used, whoever writes it.
            unsafe { self.at(offset, 1).read_volatile() };
        }
    }

    /// The address of byte `offset`, with at least `len` bytes after it.
    pub(crate) fn at(&self, offset: usize, len: usize) -> NonNull<u8> {
        assert!(
            offset <= self.len && len <= self.len - offset,
            "{offset}+{len} beyond a segment of {} bytes",
            self.len
        );
        // SAFETY: checked to lie inside the mapping.
        unsafe { self.base.add(offset) }
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `map` with this length, and every borrow of it ended with `self`.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn two_mappings_share_bytes() {
        let fd = create(8192).unwrap();
        (0..2).for_each(|me| allocate(&fd, &part(8192, me, 2)).unwrap());
        let (a, b) = (Segment::map(&fd, 8192).unwrap(), Segment::map(&fd, 8192).unwrap());
        (0..3).for_each(|me| a.clear(&part(8192, me, 3)));
        b.map_pages();
        // SAFETY: both mappings are alive and no other thread touches them.
        unsafe {
            a.at(5000, 1).write(42);
            assert_eq!(b.at(5000, 1).read(), 42);
        }
    }

    #[test]
    fn first_bytes_are_written_where_they_belong_and_others_are_zero() {
        let fd = create(3 * PAGE).unwrap();
        allocate(&fd, &(0..3 * PAGE)).unwrap();
        let first = FirstBytes::new(&fd, 3 * PAGE);
        first.write_at(PAGE - 1, &[7; PAGE + 2]).unwrap();
        assert!(first.write_at(3 * PAGE - 1, &[1, 2]).is_err(), "beyond its end");
        assert!(first.write_at(usize::MAX, &[1]).is_err());
        let segment = Segment::map(&fd, 3 * PAGE).unwrap();
        // SAFETY: nobody else writes to the mapping.
        let bytes = unsafe { std::slice::from_raw_parts(segment.at(0, 3 * PAGE).as_ptr(), 3 * PAGE) };
        for (offset, byte) in bytes.iter().enumerate() {
            let is_written = (PAGE - 1..=2 * PAGE).contains(&offset);
            assert_eq!(*byte, if is_written { 7 } else { 0 }, "{offset}");
        }
    }

    #[test]
    fn a_shorter_or_unsealed_file_is_refused() {
        let fd = create(4096).unwrap();
        assert!(Segment::map(&fd, 4097).is_err());
        let open = rustix::fs::memfd_create("open", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&open, 4096).unwrap();
        assert!(Segment::map(&open, 4096).is_err());
    }

    #[test]
    fn a_segment_larger_than_memory_is_an_error_before_anything_is_allocated() {
        assert_eq!(create_within_memory(1 << 45).unwrap_err().kind(), io::ErrorKind::OutOfMemory);
        assert!(create(1 << 45).is_ok(), "control: nothing is allocated");
    }

    #[test]
    fn more_than_the_available_memory_is_an_error() {
        let available = available_memory().unwrap();
        let error = create_within_memory(available as usize * 2).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::OutOfMemory, "{error}");
    }

    #[test]
    fn a_segment_cannot_shrink() {
        let fd = create(4096).unwrap();
        assert!(rustix::fs::ftruncate(&fd, 0).is_err());
    }

    #[test]
    #[should_panic(expected = "beyond a segment")]
    fn addresses_outside_are_bugs() {
        let fd = create(4096).unwrap();
        Segment::map(&fd, 4096).unwrap().at(4090, 7);
    }
}
