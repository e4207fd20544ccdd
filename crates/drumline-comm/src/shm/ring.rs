//! A ring of bytes from one rank to another: one writer, one reader.
//!
//! ```text
//!   taken ──▶ ░░░░░░▓▓▓▓▓▓▓▓░░░░ ◀── given        both count bytes since the beginning; the place is the count
//!                    ready                        modulo the capacity
//! ```
//! Neither side waits here: both calls do what they can and say how much that was.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::segment::Segment;

/// Bytes of a ring with its two counters.
pub(crate) const RING: usize = 128 << 10;

const CAPACITY: usize = RING - size_of::<Counters>();

#[repr(C)]
struct Counters {
    given: Counter,
    taken: Counter,
}

#[repr(C, align(128))]
struct Counter(AtomicU64);

/// One end of a ring. The writer calls `give` and `room`, the reader `take` and `ready`.
#[derive(Debug)]
pub(crate) struct Ring {
    _segment: Arc<Segment>,
    counters: NonNull<Counters>,
    data: NonNull<u8>,
}

// SAFETY: points into the segment it keeps alive; nothing is tied to a thread.
unsafe impl Send for Ring {}

impl Ring {
    pub(crate) fn new(segment: Arc<Segment>, offset: usize) -> Self {
        let counters = segment.at(offset, RING).cast();
        let data = segment.at(offset + size_of::<Counters>(), CAPACITY);
        Self { _segment: segment, counters, data }
    }

    fn counters(&self) -> &Counters {
        // SAFETY: aligned, inside the mapping, made of atomics that may be zero at first.
        unsafe { self.counters.as_ref() }
    }

    /// Bytes that can be given now.
    pub(crate) fn room(&self) -> usize {
        let Counters { given, taken } = self.counters();
        let held = given.0.load(Ordering::Relaxed).wrapping_sub(taken.0.load(Ordering::Acquire));
        CAPACITY.saturating_sub(held as usize)
    }

    /// Bytes that can be taken now.
    pub(crate) fn ready(&self) -> usize {
        let Counters { given, taken } = self.counters();
        let held = given.0.load(Ordering::Acquire).wrapping_sub(taken.0.load(Ordering::Relaxed));
        (held as usize).min(CAPACITY)
    }

    /// Copies as much of `bytes` into the ring as there is room for, and says how much.
    pub(crate) fn give(&mut self, bytes: &[u8]) -> usize {
        let len = bytes.len().min(self.room());
        let given = self.counters().given.0.load(Ordering::Relaxed);
        let start = (given % CAPACITY as u64) as usize;
        let before_end = len.min(CAPACITY - start);
        // SAFETY: only this side writes between `given` and `taken + CAPACITY`, and the reader does not look there until
        // the counter below is published; both pieces lie inside the ring.
        unsafe {
            let data = self.data.as_ptr();
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), data.add(start), before_end);
            std::ptr::copy_nonoverlapping(bytes.as_ptr().add(before_end), data, len - before_end);
        }
        self.counters().given.0.store(given + len as u64, Ordering::Release);
        len
    }

    /// Copies as much as is ready, at most `into.len()`, and says how much.
    pub(crate) fn take(&mut self, into: &mut [u8]) -> usize {
        let len = into.len().min(self.ready());
        let taken = self.counters().taken.0.load(Ordering::Relaxed);
        let start = (taken % CAPACITY as u64) as usize;
        let before_end = len.min(CAPACITY - start);
        // SAFETY: the writer published these bytes and does not touch them until the counter below moves on.
        unsafe {
            let data = self.data.as_ptr();
            std::ptr::copy_nonoverlapping(data.add(start), into.as_mut_ptr(), before_end);
            std::ptr::copy_nonoverlapping(data, into.as_mut_ptr().add(before_end), len - before_end);
        }
        self.counters().taken.0.store(taken + len as u64, Ordering::Release);
        len
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::shm::segment::{Pages, create};

    #[test]
    fn a_stream_comes_out_as_it_went_in() {
        let fd = create(RING, Pages::WhenTouched).unwrap();
        let segment = Arc::new(Segment::map(&fd, RING, Pages::WhenTouched).unwrap());
        let (mut giver, mut taker) = (Ring::new(segment.clone(), 0), Ring::new(segment, 0));
        let sent: Vec<u8> = (0..1_000_000u32).map(|i| (i * 7 % 251) as u8).collect();
        let expected = sent.clone();
        let thread = std::thread::spawn(move || {
            let mut rest = &sent[..];
            while !rest.is_empty() {
                let given = giver.give(&rest[..rest.len().min(70_001)]);
                rest = &rest[given..];
            }
        });
        let mut got = Vec::new();
        let mut piece = vec![0; 30_011];
        while got.len() < expected.len() {
            let taken = taker.take(&mut piece);
            got.extend_from_slice(&piece[..taken]);
        }
        thread.join().unwrap();
        assert!(got == expected);
    }

    #[test]
    fn a_full_ring_takes_no_more() {
        let fd = create(RING, Pages::WhenTouched).unwrap();
        let segment = Arc::new(Segment::map(&fd, RING, Pages::WhenTouched).unwrap());
        let mut ring = Ring::new(segment, 0);
        assert_eq!(ring.give(&vec![1; RING]), CAPACITY);
        assert_eq!((ring.room(), ring.ready(), ring.give(&[1])), (0, CAPACITY, 0));
        assert_eq!(ring.take(&mut [0; 10]), 10);
        assert_eq!(ring.room(), 10);
    }
}
