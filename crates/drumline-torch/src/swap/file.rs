//! A file for state that is not in memory: its space is reserved when it is made, and no other process sees it.
//!
//! Reads and writes go past the kernel's caches (`O_DIRECT`), so that they take no memory; a file system that refuses
//! this is used through its caches. Large ones are divided among a few threads, because a disk is faster with several
//! requests.

use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Instant;

use rustix::fs::{FallocateFlags, OFlags, fallocate, fcntl_getfl, fcntl_setfl, statvfs};
use rustix::io::Errno;

use super::pages::Pages;

/// Requests of one read or write at a time.
const NUM_REQUESTS: usize = 4;
/// A request has at least this many bytes, in whole pages.
const REQUEST: usize = 8 << 20;

/// Why state cannot be in a file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SwapError {
    /// The file cannot be made.
    #[error("cannot make a file for state in {}: {cause}; try a folder that exists and can be written", folder.display())]
    Folder {
        /// The folder.
        folder: PathBuf,
        /// The system's error.
        #[source]
        cause: io::Error,
    },
    /// The disk has not enough space.
    #[error(
        "state needs {needed} bytes in {}, where {free} are free; try another folder, a smaller part of the state, or more ranks",
        folder.display()
    )]
    NoSpace {
        /// The folder.
        folder: PathBuf,
        /// The bytes of this rank's state.
        needed: u64,
        /// What is free.
        free: u64,
    },
    /// The file is shorter than it was.
    #[error("the file for state in {} ends before byte {end}; try another disk, and resume from the last checkpoint", folder.display())]
    Short {
        /// Its folder.
        folder: PathBuf,
        /// The end of what was to be read.
        end: u64,
    },
    /// A read or a write has failed.
    #[error("cannot {operation} the file for state in {} at byte {offset}: {cause}; try another disk, and resume from the last checkpoint", folder.display())]
    Io {
        /// What was done.
        operation: &'static str,
        /// The file's folder.
        folder: PathBuf,
        /// Where.
        offset: u64,
        /// The system's error.
        #[source]
        cause: io::Error,
    },
}

/// How many bytes are moved in a second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rates {
    /// From a file.
    pub read: f64,
    /// To a file.
    pub write: f64,
}

/// A file for state, and its bytes as memory.
#[derive(Debug)]
pub struct SwapFile {
    folder: PathBuf,
    file: File,
    pages: Pages,
    is_direct: bool,
}

impl SwapFile {
    /// A file of zeros in a folder. Its space is reserved. It has no name, so that the kernel deletes it when the process
    /// ends, however that happens.
    pub fn new(folder: &Path, num_bytes: u64) -> Result<Self, SwapError> {
        let failed = |cause: io::Error| SwapError::Folder { folder: folder.to_owned(), cause };
        let num_bytes = num_bytes.max(1).next_multiple_of(super::PAGE as u64);
        let file = without_name(folder).map_err(failed)?;
        match fallocate(&file, FallocateFlags::empty(), 0, num_bytes) {
            Ok(()) => {}
            Err(Errno::NOSPC | Errno::DQUOT | Errno::FBIG) => {
                drop(file);
                let free = Self::free(folder)?;
                return Err(SwapError::NoSpace { folder: folder.to_owned(), needed: num_bytes, free });
            }
            Err(error) => return Err(failed(error.into())),
        }
        let pages = Pages::of_file(&file, num_bytes as usize).map_err(failed)?;
        let flags = fcntl_getfl(&file).map_err(|error| failed(error.into()))?;
        let is_direct = fcntl_setfl(&file, flags | OFlags::DIRECT).is_ok();
        Ok(Self { folder: folder.to_owned(), file, pages, is_direct })
    }

    /// The bytes that are free in a folder.
    pub fn free(folder: &Path) -> Result<u64, SwapError> {
        let stat = statvfs(folder);
        let failed = |error: Errno| SwapError::Folder { folder: folder.to_owned(), cause: error.into() };
        stat.map(|stat| stat.f_bavail * stat.f_frsize).map_err(failed)
    }

    /// Writes zeros to a new file and reads them, at most 32 MiB. Returns how many bytes are read and written in a second.
    pub fn measure(&self) -> Result<Rates, SwapError> {
        let len = self.pages.num_bytes().min(4 * REQUEST);
        let failed = |cause| SwapError::Folder { folder: self.folder.clone(), cause };
        let buffer = Pages::zeros(len).map_err(failed)?;
        let rate = |begin: Instant| len as f64 / begin.elapsed().as_secs_f64().max(1e-9);
        let begin = Instant::now();
        self.write(0, buffer.bytes_mut(0..len))?;
        let write = rate(begin);
        let begin = Instant::now();
        self.read(0, buffer.bytes_mut(0..len))?;
        Ok(Rates { read: rate(begin), write })
    }

    /// Whether reads and writes go past the kernel's caches.
    pub fn is_direct(&self) -> bool {
        self.is_direct
    }

    /// The file's bytes as memory. The kernel reads and writes what is used of them.
    pub fn pages(&self) -> &Pages {
        &self.pages
    }

    /// Bytes that were used as memory are not counted as this process's any more.
    pub fn forget(&self, range: Range<usize>) {
        self.pages.forget(range);
    }

    /// Reads whole pages.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), SwapError> {
        let blocks = into.chunks_mut(request_of(into.len()));
        in_parallel(blocks, offset, |at, block| match self.file.read_exact_at(block, at) {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                Err(SwapError::Short { folder: self.folder.clone(), end: at + block.len() as u64 })
            }
            Err(error) => Err(self.failed("read", at, error)),
        })
    }

    /// Writes whole pages.
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<(), SwapError> {
        let blocks = from.chunks(request_of(from.len()));
        in_parallel(blocks, offset, |at, block| {
            self.file.write_all_at(block, at).map_err(|error| self.failed("write", at, error))
        })
    }

    fn failed(&self, operation: &'static str, offset: u64, cause: io::Error) -> SwapError {
        SwapError::Io { operation, folder: self.folder.clone(), offset, cause }
    }
}

/// A new file, whose name is removed at once if it gets one.
fn without_name(folder: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o600);
    if let Ok(file) = options.custom_flags(OFlags::TMPFILE.bits() as i32).open(folder) {
        return Ok(file);
    }
    let path = folder.join(format!(".offload-{}", std::process::id()));
    let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path)?;
    std::fs::remove_file(&path)?;
    Ok(file)
}

/// The bytes of a request, so that there are at most [`NUM_REQUESTS`].
fn request_of(len: usize) -> usize {
    len.div_ceil(NUM_REQUESTS).next_multiple_of(super::PAGE).max(REQUEST)
}

/// Carries out the requests for the blocks of a range, each on a thread of its own if there are several.
fn in_parallel<B: Send + AsRef<[u8]>>(
    blocks: impl ExactSizeIterator<Item = B>,
    offset: u64,
    carry_out: impl Fn(u64, B) -> Result<(), SwapError> + Sync,
) -> Result<(), SwapError> {
    let (mut at, carry_out) = (offset, &carry_out);
    let placed = blocks.map(|block| {
        let begin = at;
        at += block.as_ref().len() as u64;
        (begin, block)
    });
    let mut placed: Vec<_> = placed.collect();
    let Some((first_at, first)) = placed.pop() else { return Ok(()) };
    std::thread::scope(|scope| {
        let others: Vec<_> =
            placed.into_iter().map(|(at, block)| scope.spawn(move || carry_out(at, block))).collect();
        let own = carry_out(first_at, first);
        let others = others.into_iter().map(|thread| thread.join().expect("a request does not panic"));
        others.fold(own, Result::and)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::swap::PAGE;

    fn pattern(len: usize) -> Vec<u8> {
        (0..len).map(|index| (index * 31 % 251) as u8).collect()
    }

    #[test]
    fn what_is_written_is_read_and_seen_as_memory() {
        let folder = tempfile::tempdir().unwrap();
        let len = 3 * REQUEST + 2 * PAGE;
        let file = SwapFile::new(folder.path(), (len + PAGE) as u64).unwrap();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "it has no name");
        let buffer = Pages::zeros(len).unwrap();
        buffer.bytes_mut(0..len).copy_from_slice(&pattern(len));
        file.write(PAGE as u64, buffer.bytes_mut(0..len)).unwrap();
        assert!(file.pages().bytes_mut(0..PAGE).iter().all(|byte| *byte == 0));
        assert!(file.pages().bytes_mut(PAGE..PAGE + len) == pattern(len));
        // And the other way round, though the kernel has the pages in its caches.
        file.pages().bytes_mut(PAGE..PAGE + 3).copy_from_slice(&[250, 251, 252]);
        file.forget(0..len + PAGE);
        let read = Pages::zeros(len).unwrap();
        file.read(PAGE as u64, read.bytes_mut(0..len)).unwrap();
        assert_eq!(read.bytes_mut(0..4)[..3], [250, 251, 252]);
        assert!(read.bytes_mut(3..len) == &pattern(len)[3..]);
    }

    #[test]
    fn folders_that_cannot_be_used_are_named() {
        let error = SwapFile::new(Path::new("/no/such/folder"), 1).unwrap_err().to_string();
        assert!(
            error.starts_with("cannot make a file for state in /no/such/folder: No such file"),
            "{error}"
        );
        let folder = tempfile::tempdir().unwrap();
        let error = SwapFile::new(folder.path(), 1 << 60).unwrap_err();
        assert!(matches!(error, SwapError::NoSpace { needed: 0x1000_0000_0000_0000, .. }), "{error}");
    }

    #[test]
    fn a_file_that_was_shortened_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let file = SwapFile::new(folder.path(), 4 * PAGE as u64).unwrap();
        file.file.set_len(2 * PAGE as u64).unwrap();
        let buffer = Pages::zeros(PAGE).unwrap();
        file.read(PAGE as u64, buffer.bytes_mut(0..PAGE)).unwrap();
        let error = file.read(2 * PAGE as u64, buffer.bytes_mut(0..PAGE)).unwrap_err();
        assert!(matches!(error, SwapError::Short { end, .. } if end == 3 * PAGE as u64), "{error}");
    }
}
