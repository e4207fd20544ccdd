//! The symmetric heap: buffers that every rank of a node can access, so that collectives need no copy.
//!
//! ```text
//!   one region   | slice of rank 0 | slice of rank 1 | …      one memfd, mapped by all; each rank owns its slice
//! ```
//! All ranks of a group make a region together; a buffer is the caller's slice of it. A collective recognises a buffer by its
//! address. If all ranks pass the same offset of the same region, it works on the peers' slices directly.
//! The kernel frees a region when the last process that maps it ends.

use std::collections::BTreeMap;
use std::io;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Range};
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::{Arc, Weak};

use super::segment::Segment;
use crate::element::Element;
use crate::select::DIRECT_MIN;
use rustix::mm::{MapFlags, ProtFlags};

const PAGE: usize = 4096;

/// Bytes of a region with a slice of `bytes` for each of `ranks` ranks.
pub(crate) fn region_len(bytes: usize, ranks: usize) -> usize {
    stride(bytes) * ranks
}

fn stride(bytes: usize) -> usize {
    // The extra page keeps equal offsets of different slices out of the same cache sets.
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
    /// Maps the region behind `fd`. `id` is the same on all ranks, and is not used again in the group.
    pub(crate) fn map(fd: impl AsFd, id: u64, bytes: usize, me: usize, ranks: usize) -> io::Result<Self> {
        Ok(Self { segment: Segment::map(fd, region_len(bytes, ranks))?, id, me, bytes })
    }

    /// The memory of all slices.
    pub(crate) fn segment(&self) -> &Segment {
        &self.segment
    }

    /// The address of this rank's slice.
    fn base(&self) -> usize {
        self.segment.at(self.me * stride(self.bytes), self.bytes).as_ptr() as usize
    }
}

/// An offset in a region, valid in every rank's slice, as long as the buffer that it was found for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Symmetric {
    region: NonNull<Region>,
    offset: usize,
}

impl Symmetric {
    fn region(&self) -> &Region {
        // SAFETY: made by `Heap::find` for a slice of a live buffer, which keeps its region; used only while the call that
        // was given the slice runs.
        unsafe { self.region.as_ref() }
    }

    /// What ranks compare to know that they mean the same offset of the same region. Never all zero.
    pub(crate) fn words(self) -> [u64; 2] {
        [self.region().id + 1, self.offset as u64]
    }

    /// Elements `range`, counted from this offset, in the slice of `rank`.
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

    /// Replaces this rank's slice by a private copy: after a failed call a late rank may still write to the shared one.
    ///
    /// # Safety
    /// The group must make no further use of the region.
    pub(super) unsafe fn detach(self) {
        let region = self.region();
        let start = region.segment.at(region.me * stride(region.bytes), region.bytes);
        // SAFETY: the slice is mapped, and this rank's own; private pages with the same bytes are mapped at the same
        // address, so a borrow of it stays valid. If there is no memory for that, it stays shared.
        unsafe {
            let kept = std::slice::from_raw_parts(start.as_ptr(), region.bytes).to_vec();
            let (protection, flags) =
                (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::FIXED);
            if rustix::mm::mmap_anonymous(start.as_ptr().cast(), region.bytes, protection, flags).is_ok() {
                start.as_ptr().copy_from_nonoverlapping(kept.as_ptr(), kept.len());
            }
        }
    }

    fn at<T>(self, rank: usize, range: &Range<usize>) -> *mut T {
        let (region, start) = (self.region(), self.offset + range.start * size_of::<T>());
        let len = range.len() * size_of::<T>();
        assert!(start + len <= region.bytes, "{start}+{len} beyond a slice of {} bytes", region.bytes);
        region.segment.at(rank * stride(region.bytes) + start, len).cast().as_ptr()
    }
}

/// The regions of one group, found by the address of a buffer.
#[derive(Debug, Default)]
pub(crate) struct Heap {
    /// By the address of this rank's slice.
    regions: BTreeMap<usize, Weak<Region>>,
}

impl Heap {
    pub(crate) fn add(&mut self, region: &Arc<Region>) {
        self.regions.retain(|_, region| region.strong_count() > 0);
        self.regions.insert(region.base(), Arc::downgrade(region));
    }

    /// The offset in the region that holds all of `slice`, if there is one and the slice is long enough to matter.
    #[inline]
    pub(crate) fn find<T>(&self, slice: &[T]) -> Option<Symmetric> {
        if size_of_val(slice) < DIRECT_MIN || self.regions.is_empty() {
            return None;
        }
        let address = slice.as_ptr() as usize;
        let (base, region) = self.regions.range(..=address).next_back()?;
        if region.strong_count() == 0 {
            return None;
        }
        let place = Symmetric { region: NonNull::new(region.as_ptr().cast_mut())?, offset: address - base };
        // The addresses of a freed region may be in use for something else, but then its count is 0. If the slice lies in a
        // region that is alive, it was borrowed from a buffer there, which lives at least as long.
        (place.offset + size_of_val(slice) <= place.region().bytes).then_some(place)
    }
}

/// A buffer in the symmetric heap: a slice like any other, but collectives access it without copies.
///
/// All ranks make it together with [`ProcessGroup::heap_alloc`](crate::ProcessGroup::heap_alloc). It starts as zeros.
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
        // to it only inside a collective that was given the buffer by `&mut`.
        unsafe { std::slice::from_raw_parts(self.region.base() as *const T, self.len) }
    }
}

impl<T: Element> DerefMut for HeapBuffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above; `&mut self` keeps other borrows away.
        unsafe { std::slice::from_raw_parts_mut(self.region.base() as *mut T, self.len) }
    }
}

/// Memory of which the ranks of a node have one copy together. It starts as zeros.
///
/// All ranks of a group make it together with [`ProcessGroup::shared_alloc`](crate::ProcessGroup::shared_alloc). Several
/// processes write to it, so that it is no slice: the program decides who writes which element, and orders writes and
/// reads by collectives.
#[derive(Debug)]
pub struct SharedBuffer<T> {
    region: Region,
    len: usize,
    element: PhantomData<T>,
}

impl<T: Element> SharedBuffer<T> {
    /// `region` has one slice.
    pub(crate) fn new(region: Region, len: usize) -> Self {
        assert!(len * size_of::<T>() <= region.bytes, "a buffer lies inside its region");
        Self { region, len, element: PhantomData }
    }

    /// The address of the first element. It is valid as long as this value.
    pub fn as_ptr(&self) -> *mut T {
        self.region.base() as *mut T
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::shm::segment::create;

    fn region(bytes: usize, id: u64) -> Arc<Region> {
        let fd = create(region_len(bytes, 2)).expect("memory is there");
        Arc::new(Region::map(&fd, id, bytes, 1, 2).expect("it was just made"))
    }

    #[test]
    fn buffers_are_found_by_address() {
        let mut heap = Heap::default();
        let (a, b) = (region(100_000, 0), region(400_000, 1));
        heap.add(&a);
        heap.add(&b);
        let buffer = HeapBuffer::<f32>::new(b.clone(), 100_000);
        let found = heap.find(&buffer[10..20_000]).unwrap();
        assert_eq!(found.words(), [2, 40]);
        assert!(heap.find(&buffer[10..20]).is_none(), "too short to matter");
        assert!(heap.find(&vec![0f32; 20_000]).is_none());
        drop((buffer, b));
        assert!(heap.find(&HeapBuffer::<u8>::new(a, 100_000)).is_some());
    }

    #[test]
    fn a_freed_region_is_forgotten() {
        let mut heap = Heap::default();
        let a = region(64, 0);
        heap.add(&a);
        drop(a);
        heap.add(&region(64, 1));
        assert_eq!(heap.regions.len(), 1);
        assert!(heap.find(&vec![1u8; DIRECT_MIN]).is_none());
    }
}
