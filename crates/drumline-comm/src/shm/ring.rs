//! A ring of bytes from one rank to another: one writer, one reader.
//!
//! ```text
//!   taken ──▶ ░░░░░░▓▓▓▓▓▓▓▓░░░░ ◀── given        both count bytes from the beginning; the position is the count
//!                    ready                        modulo the capacity
//! ```
//! Neither side waits here: both calls do what they can and return how much that was.

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, Ordering};
#[cfg(not(loom))]
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
        self.counters().room(CAPACITY)
    }

    /// Bytes that can be taken now.
    pub(crate) fn ready(&self) -> usize {
        self.counters().ready(CAPACITY)
    }

    /// Copies as much of `bytes` into the ring as there is room for, and returns how much.
    pub(crate) fn give(&mut self, bytes: &[u8]) -> usize {
        let data = self.data.as_ptr();
        self.counters().give(CAPACITY, bytes.len(), |at, places| {
            // SAFETY: the positions lie inside the ring, and until `give` returns they are this side's alone.
            unsafe {
                std::ptr::copy_nonoverlapping(bytes[at..].as_ptr(), data.add(places.start), places.len())
            };
        })
    }

    /// Copies as much as is ready, at most `into.len()`, and returns how much.
    pub(crate) fn take(&mut self, into: &mut [u8]) -> usize {
        let data = self.data.as_ptr();
        self.counters().take(CAPACITY, into.len(), |at, places| {
            // SAFETY: the positions lie inside the ring, and until `take` returns they are this side's alone.
            unsafe {
                std::ptr::copy_nonoverlapping(data.add(places.start), into[at..].as_mut_ptr(), places.len())
            };
        })
    }
}

/// Which side may touch which positions of a ring. It needs no data.
impl Counters {
    fn room(&self, capacity: usize) -> usize {
        let held = self.given.0.load(Ordering::Relaxed).wrapping_sub(self.taken.0.load(Ordering::Acquire));
        capacity.saturating_sub(held as usize)
    }

    fn ready(&self, capacity: usize) -> usize {
        let held = self.given.0.load(Ordering::Acquire).wrapping_sub(self.taken.0.load(Ordering::Relaxed));
        (held as usize).min(capacity)
    }

    /// Lets `fill` write up to `most` bytes, then shows them to the reader; returns how many. Between `given` and
    /// `taken + capacity` only the writer touches the ring, and the reader does not look there until `given` moves.
    fn give(&self, capacity: usize, most: usize, fill: impl FnMut(usize, Range<usize>)) -> usize {
        let len = most.min(self.room(capacity));
        let given = self.given.0.load(Ordering::Relaxed);
        pieces(capacity, given, len, fill);
        self.given.0.store(given + len as u64, Ordering::Release);
        len
    }

    /// Lets `read` see up to `most` bytes, then gives their positions back to the writer, who does not touch them before.
    fn take(&self, capacity: usize, most: usize, read: impl FnMut(usize, Range<usize>)) -> usize {
        let len = most.min(self.ready(capacity));
        let taken = self.taken.0.load(Ordering::Relaxed);
        pieces(capacity, taken, len, read);
        self.taken.0.store(taken + len as u64, Ordering::Release);
        len
    }
}

/// The positions of `len` bytes from `count` on: up to the end of the ring, then from its start. `each` gets the number of bytes
/// that come before, and the positions.
fn pieces(capacity: usize, count: u64, len: usize, mut each: impl FnMut(usize, Range<usize>)) {
    let start = (count % capacity as u64) as usize;
    let before_end = len.min(capacity - start);
    each(0, start..start + before_end);
    each(before_end, 0..len - before_end);
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::shm::segment::create;

    #[test]
    fn a_stream_comes_out_as_it_went_in() {
        let fd = create(RING).unwrap();
        let segment = Arc::new(Segment::map(&fd, RING).unwrap());
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
        let fd = create(RING).unwrap();
        let segment = Arc::new(Segment::map(&fd, RING).unwrap());
        let mut ring = Ring::new(segment, 0);
        assert_eq!(ring.give(&vec![1; RING]), CAPACITY);
        assert_eq!((ring.room(), ring.ready(), ring.give(&[1])), (0, CAPACITY, 0));
        assert_eq!(ring.take(&mut [0; 10]), 10);
        assert_eq!(ring.room(), 10);
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use crate::shm::line::loom_cells::{Cell, cells, model};

    const PLACES: usize = 2;
    const BYTES: u64 = 3;

    fn counters() -> Counters {
        Counters { given: Counter(AtomicU64::new(0)), taken: Counter(AtomicU64::new(0)) }
    }

    fn write(counters: &Counters, places: &[Cell], most: usize) {
        let mut next = 1;
        while next <= BYTES {
            let left = (BYTES - next + 1) as usize;
            let given = counters.give(PLACES, left.min(most), |at, range| {
                range.enumerate().for_each(|(i, place)| places[place].write(next + (at + i) as u64));
            });
            next += given as u64;
            if given == 0 {
                loom::thread::yield_now();
            }
        }
    }

    fn read(counters: &Counters, places: &[Cell]) {
        let mut next = 1;
        while next <= BYTES {
            let taken = counters.take(PLACES, PLACES, |at, range| {
                range
                    .enumerate()
                    .for_each(|(i, place)| assert_eq!(places[place].read(), next + (at + i) as u64));
            });
            next += taken as u64;
            if taken == 0 {
                loom::thread::yield_now();
            }
        }
    }

    fn pass(most: usize, writer: fn(&Counters, &[Cell], usize)) {
        model(3, move || {
            let ring = loom::sync::Arc::new((counters(), cells(PLACES)));
            let theirs = ring.clone();
            let thread = loom::thread::spawn(move || writer(&theirs.0, &theirs.1, most));
            read(&ring.0, &ring.1);
            thread.join().unwrap();
        });
    }

    /// Three bytes go through two positions, so positions are used again.
    #[test]
    fn loom_a_ring_passes_all_bytes_in_order() {
        pass(1, write);
        pass(PLACES, write);
    }

    /// The control: a writer that does not check for room overwrites what the reader has not taken.
    #[test]
    #[should_panic]
    fn loom_finds_a_writer_without_room() {
        pass(1, |counters, places, _| {
            for next in 1..=BYTES {
                places[(next - 1) as usize % PLACES].write(next);
                counters.given.0.store(next, Ordering::Release);
            }
        });
    }
}
