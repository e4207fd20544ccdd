//! What the ranks of a node publish about themselves: their last calls, and whether they have left the group.
//!
//! Reading it needs no lock and no answer, so it works for ranks that are frozen, and for this rank while it is in a call.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::layout::{Control, Layout};
use super::line::Bell;
use super::record::KnownTexts;
use super::segment::Segment;
use super::wait::wake;
use crate::call::{Call, Trace};

/// This process's view of the board. Ranks are counted in the group.
#[derive(Debug)]
pub(crate) struct Board {
    _segment: Arc<Segment>,
    controls: Vec<NonNull<Control>>,
    /// For each rank of the group its index on this node, if it is here.
    places: Vec<Option<usize>>,
    me: usize,
}

// SAFETY: the pointers lead into the segment, which is kept alive here; they point to atomics.
unsafe impl Send for Board {}
// SAFETY: as above.
unsafe impl Sync for Board {}

impl Board {
    /// The view of local rank `me`; `members` are the ranks of the group on this node.
    pub(super) fn new(segment: Arc<Segment>, layout: Layout, members: &[usize], me: usize) -> Self {
        let control = |place| segment.at(layout.control(place), size_of::<Control>()).cast();
        let controls = (0..members.len()).map(control).collect();
        let place = |rank| members.iter().position(|&member| member == rank);
        let places = (0..=members.iter().copied().max().unwrap_or(0)).map(place).collect();
        Self { controls, places, _segment: segment, me }
    }

    fn here(&self, place: usize) -> &Control {
        // SAFETY: as in `Node::control`.
        unsafe { self.controls[place].as_ref() }
    }

    fn control(&self, rank: usize) -> Option<&Control> {
        Some(self.here((*self.places.get(rank)?)?))
    }

    /// The last collective of a rank, if it is on this node.
    pub(crate) fn last_collective(&self, rank: usize) -> Option<Trace> {
        Some(self.control(rank)?.record.read())
    }

    /// The last call of a rank, collective or not, if it is on this node.
    pub(crate) fn last_call(&self, rank: usize) -> Option<Trace> {
        let control = self.control(rank)?;
        let (collective, message) = (control.record.read(), control.messages.read());
        let is_newer = control.message_after.load(Ordering::Relaxed) >= collective.sequence;
        Some(if message.sequence > 0 && is_newer { message } else { collective })
    }

    /// Records this rank's `number`-th call that sends or receives messages.
    pub(crate) fn note_message(&self, call: &Call, number: u64, known: &mut KnownTexts) {
        let control = self.here(self.me);
        control.message_after.store(control.record.sequence(), Ordering::Relaxed);
        control.messages.write(call, number, known);
    }

    /// Whether a rank of this node has left the group.
    pub(crate) fn has_left(&self, rank: usize) -> bool {
        self.control(rank).is_some_and(|control| control.left.load(Ordering::Acquire) != 0)
    }

    /// Publishes that this rank has left the group, and wakes those that wait for it.
    pub(crate) fn leave(&self) {
        self.here(self.me).left.store(1, Ordering::Release);
        Bell::order();
        for place in (0..self.controls.len()).filter(|&place| place != self.me) {
            wake(&self.here(place).flags.bell);
            wake(&self.here(place).mail);
        }
    }
}
