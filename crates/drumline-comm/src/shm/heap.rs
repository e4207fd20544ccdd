//! The symmetric heap: buffers that every rank of a node can reach, so that collectives need no copy.
//!
//! ```text
//!   one region   | slice of rank 0 | slice of rank 1 | …      one memfd, mapped by all; each rank owns its slice
//! ```
//! A region is made by all ranks of a group together; a buffer is the caller's slice of it. A collective recognises a
//! buffer by its address; if all ranks give the same place of the same region, it works on the peers' slices directly.
//! The kernel frees a region with the last process that maps it.

use std::collections::BTreeMap;
use std::io;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Range};
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::segment::{Pages, Segment};
use crate::element::Element;
use crate::select::DIRECT_MIN;

const PAGE: usize = 4096;

/// Bytes of a region with a slice of `bytes` for each of `ranks` ranks.
pub(crate) fn region_len(bytes: usize, ranks: usize) -> usize {
    stride(bytes) * ranks
}

fn stride(bytes: usize) -> usize {
    // The odd page keeps equal offsets of different slices out of the same cache sets.
    bytes.next_multiple_of(PAGE) + PAGE
}

/// Memory that the ranks of one node share, one slice each.
#[derive(Debug)]
pub(crate) struct Region {
    segment: Segment,
    id: u64,
    me: usize,
    bytes: usize,
}

impl Region {
    /// Maps the region behind `fd`. `id` is the same on all ranks and is never used again in the group.
    pub(crate) fn map(fd: impl AsFd, id: u64, bytes: usize, me: usize, ranks: usize) -> io::Result<Self> {
        Ok(Self { segment: Segment::map(fd, region_len(bytes, ranks), Pages::Now)?, id, me, bytes })
    }

    fn base(&self) -> usize {
        self.segment.at(self.me * stride(self.bytes), self.bytes).as_ptr() as usize
    }
}

/// A place in a region: the same place in every rank's slice.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Symmetric<'a> {
    region: &'a Region,
    offset: usize,
}

impl Symmetric<'_> {
    /// What ranks compare to know that they mean the same place. Never all zero.
    pub(crate) fn words(self) -> [u64; 2] {
        [self.region.id + 1, self.offset as u64]
    }

    /// Elements `range`, counted from this place, in the slice of `rank`.
    ///
    /// # Safety
    /// No other process and no other borrow may use these elements meanwhile.
    pub(super) unsafe fn slice_mut<'b, T: Element>(self, rank: usize, range: Range<usize>) -> &'b mut [T] {
        // SAFETY: passed on to the caller.
        unsafe { std::slice::from_raw_parts_mut(self.at(rank, &range), range.len()) }
    }

    /// The same, for reading.
    ///
    /// # Safety
    /// No other process may write these elements meanwhile.
    pub(super) unsafe fn slice<'b, T: Element>(self, rank: usize, range: Range<usize>) -> &'b [T] {
        // SAFETY: passed on to the caller.
        unsafe { std::slice::from_raw_parts(self.at(rank, &range), range.len()) }
    }

    fn at<T>(self, rank: usize, range: &Range<usize>) -> *mut T {
        let start = self.offset + range.start * size_of::<T>();
        let len = range.len() * size_of::<T>();
        assert!(start + len <= self.region.bytes, "{start}+{len} beyond a slice of {} bytes", self.region.bytes);
        self.region.segment.at(rank * stride(self.region.bytes) + start, len).cast().as_ptr()
    }
}

/// The regions of one group, found by the address of a buffer.
#[derive(Debug, Default)]
pub(crate) struct Heap {
    regions: Mutex<BTreeMap<usize, Weak<Region>>>,
}

impl Heap {
    pub(crate) fn add(&self, region: &Arc<Region>) {
        let mut regions = self.regions.lock().unwrap_or_else(PoisonError::into_inner);
        regions.retain(|_, region| region.strong_count() > 0);
        regions.insert(region.base(), Arc::downgrade(region));
    }

    /// The region that holds all of `slice`, and where in it, if there is one and the slice is long enough to matter.
    #[inline]
    pub(crate) fn find<T>(&self, slice: &[T]) -> Option<Found> {
        if size_of_val(slice) < DIRECT_MIN {
            return None;
        }
        let regions = self.regions.lock().unwrap_or_else(PoisonError::into_inner);
        if regions.is_empty() {
            return None;
        }
        let address = slice.as_ptr() as usize;
        let (base, region) = regions.range(..=address).next_back()?;
        let region = region.upgrade()?;
        let offset = address - base;
        (offset + size_of_val(slice) <= region.bytes).then_some(Found { region, offset })
    }
}

/// A buffer recognised as symmetric; keeps its region alive during the call.
#[derive(Debug)]
pub(crate) struct Found {
    region: Arc<Region>,
    offset: usize,
}

impl Found {
    pub(crate) fn symmetric(&self) -> Symmetric<'_> {
        Symmetric { region: &self.region, offset: self.offset }
    }
}

/// A buffer in the symmetric heap: a slice like any other, but collectives reach it without copies.
///
/// Made by [`ProcessGroup::heap_alloc`](crate::ProcessGroup::heap_alloc), on all ranks together; starts as zeros.
#[derive(Debug)]
pub struct HeapBuffer<T> {
    region: Arc<Region>,
    len: usize,
    element: PhantomData<T>,
}

impl<T: Element> HeapBuffer<T> {
    pub(crate) fn new(region: Arc<Region>, len: usize) -> Self {
        assert!(len * size_of::<T>() <= region.bytes, "a buffer lies inside its slice");
        Self { region, len, element: PhantomData }
    }
}

impl<T: Element> Deref for HeapBuffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: this rank's own slice, mapped as long as `region`, zeroed at first and holding `T`s since; peers write
        // it only inside a collective that was given the buffer by `&mut`.
        unsafe { std::slice::from_raw_parts(self.region.base() as *const T, self.len) }
    }
}

impl<T: Element> DerefMut for HeapBuffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above; `&mut self` keeps other borrows away.
        unsafe { std::slice::from_raw_parts_mut(self.region.base() as *mut T, self.len) }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::shm::segment::create;

    fn region(bytes: usize, id: u64) -> Arc<Region> {
        let fd = create(region_len(bytes, 2), Pages::Now).unwrap();
        Arc::new(Region::map(&fd, id, bytes, 1, 2).unwrap())
    }

    #[test]
    fn buffers_are_found_by_address() {
        let heap = Heap::default();
        let (a, b) = (region(100_000, 0), region(400_000, 1));
        heap.add(&a);
        heap.add(&b);
        let buffer = HeapBuffer::<f32>::new(b.clone(), 100_000);
        let found = heap.find(&buffer[10..20_000]).unwrap();
        assert_eq!(found.symmetric().words(), [2, 40]);
        assert!(heap.find(&buffer[10..20]).is_none(), "too short to matter");
        assert!(heap.find(&vec![0f32; 20_000]).is_none());
        drop((found, buffer, b));
        assert!(heap.find(&HeapBuffer::<u8>::new(a, 100_000)).is_some());
    }

    #[test]
    fn a_freed_region_is_forgotten() {
        let heap = Heap::default();
        let a = region(64, 0);
        heap.add(&a);
        drop(a);
        heap.add(&region(64, 1));
        assert!(heap.regions.lock().unwrap().len() <= 2);
        assert!(heap.find(&vec![1u8; DIRECT_MIN]).is_none());
    }
}
