//! The point-to-point side of a node: a ring to and from each local rank, and the bell that means "look again".

use std::ptr::NonNull;
use std::sync::Arc;

use super::layout::{Control, Layout};
use super::line::Bell;
use super::ring::Ring;
use super::segment::Segment;
use super::wait::{Backoff, Stop, Watch, wake};

/// The rings of one rank.
#[derive(Debug)]
pub(crate) struct Mail {
    _segment: Arc<Segment>,
    controls: Vec<NonNull<Control>>,
    to: Vec<Ring>,
    from: Vec<Ring>,
    me: usize,
    backoff: Backoff,
}

// SAFETY: as for `Node`: pointers into a segment that is kept alive.
unsafe impl Send for Mail {}

impl Mail {
    pub(super) fn new(
        segment: Arc<Segment>,
        layout: Layout,
        me: usize,
        ranks: usize,
        backoff: Backoff,
    ) -> Self {
        let ring = |from, to| Ring::new(segment.clone(), layout.ring(from, to));
        Self {
            controls: (0..ranks)
                .map(|rank| segment.at(layout.control(rank), size_of::<Control>()).cast())
                .collect(),
            to: (0..ranks).map(|rank| ring(me, rank)).collect(),
            from: (0..ranks).map(|rank| ring(rank, me)).collect(),
            _segment: segment,
            me,
            backoff,
        }
    }

    fn bell(&self, rank: usize) -> &Bell {
        // SAFETY: as in `Node::control`.
        unsafe { &self.controls[rank].as_ref().mail }
    }

    /// Writes as many of the bytes to `rank`'s ring as it has room for.
    pub(crate) fn give(&mut self, rank: usize, bytes: &[u8]) -> usize {
        let given = self.to[rank].give(bytes);
        self.moved(rank, given)
    }

    /// Reads up to `into.len()` bytes that `rank` has written.
    pub(crate) fn take(&mut self, rank: usize, into: &mut [u8]) -> usize {
        let taken = self.from[rank].take(into);
        self.moved(rank, taken)
    }

    fn moved(&self, rank: usize, bytes: usize) -> usize {
        if bytes > 0 {
            Bell::order();
            wake(self.bell(rank));
        }
        bytes
    }

    /// Waits until one of `senders` has written something or one of `receivers` has room.
    pub(crate) fn wait(&self, watch: &Watch<'_>, senders: &[usize], receivers: &[usize]) -> Result<(), Stop> {
        self.backoff.wait(self.bell(self.me), watch, None, || self.can_move(senders, receivers))
    }

    /// Whether a `wait` for the same ranks would return at once.
    pub(crate) fn can_move(&self, senders: &[usize], receivers: &[usize]) -> bool {
        senders.iter().any(|&rank| self.from[rank].ready() > 0)
            || receivers.iter().any(|&rank| self.to[rank].room() > 0)
    }
}
