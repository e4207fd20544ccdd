//! The memory that is measured: private to a rank or in the symmetric heap; one slot (hot) or many in rotation (cold).

use std::ops::{Deref, DerefMut, Range};
use std::process::Command;

use drumline_comm::{CommError, HeapBuffer, ProcessGroup};

use super::values::Value;

const PAGE: usize = 4096;
const CACHE_IF_UNKNOWN: usize = 64 << 20;

/// Where buffers are allocated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Memory {
    /// Ordinary memory of each rank
    Private,
    /// The symmetric heap, which the other ranks of the node access without a copy (gradient buckets use it)
    Heap,
}

/// Memory that begins at a page boundary and has been written to.
#[derive(Debug)]
pub(super) enum Buffer<T> {
    Private { data: Vec<T>, range: Range<usize> },
    Heap(HeapBuffer<T>),
}

impl<T: Value> Buffer<T> {
    pub(super) fn new(group: &ProcessGroup, memory: Memory, len: usize) -> Result<Self, CommError> {
        if memory == Memory::Heap {
            let mut buffer = group.heap_alloc(len)?;
            buffer.fill(T::of(1));
            return Ok(Self::Heap(buffer));
        }
        let data = vec![T::of(1); len + PAGE / size_of::<T>()];
        let start = data.as_ptr().align_offset(PAGE);
        Ok(Self::Private { data, range: start..start + len })
    }
}

impl<T: Value> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match self {
            Self::Private { data, range } => &data[range.clone()],
            Self::Heap(buffer) => buffer,
        }
    }
}

impl<T: Value> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match self {
            Self::Private { data, range } => &mut data[range.clone()],
            Self::Heap(buffer) => buffer,
        }
    }
}

/// How many buffers are in rotation, and the distance in bytes from one to the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Slots {
    pub(super) count: usize,
    pub(super) stride: usize,
}

impl Slots {
    pub(super) fn hot(bytes: usize) -> Self {
        Self { count: 1, stride: bytes.next_multiple_of(PAGE).max(PAGE) }
    }

    /// So many that a slot has left a cache of that size between rewriting and use.
    pub(super) fn cold(bytes: usize, cache: usize) -> Self {
        let stride = Self::hot(bytes).stride;
        Self { count: (2 * cache / stride).max(2), stride }
    }
}

/// Bytes of the last-level cache, from the C library's own tool, so that we and the peers use the same number.
pub(super) fn last_level_cache() -> usize {
    let printed = Command::new("getconf").arg("LEVEL3_CACHE_SIZE").output().map(|output| output.stdout);
    let bytes = printed.ok().and_then(|text| String::from_utf8(text).ok()?.trim().parse().ok());
    bytes.filter(|bytes| *bytes > 0).unwrap_or(CACHE_IF_UNKNOWN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_cover_twice_the_cache() {
        assert_eq!(Slots::hot(16), Slots { count: 1, stride: PAGE });
        assert_eq!(Slots::hot(PAGE + 1).stride, 2 * PAGE);
        assert_eq!(Slots::cold(16, 1 << 20), Slots { count: 512, stride: PAGE });
        assert_eq!(Slots::cold(64 << 20, 1 << 20).count, 2);
    }
}
