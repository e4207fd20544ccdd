//! The layout of the segment that the ranks of one node share.
//!
//! ```text
//!   control 0 | control 1 | …        flags, bells, last calls: a few cache lines per rank
//!   stage 0   | stage 1   | …        per rank: two staging buffers, two result buffers
//!   ring 0→0  | ring 0→1  | …        one byte ring for each ordered pair, for point-to-point messages
//! ```
//! The kernel allocates a page when it is first touched, so the rings of pairs that exchange no messages cost nothing.

use std::sync::atomic::{AtomicU32, AtomicU64};

use super::line::{Bell, Flags};
use super::record::Record;
use super::ring::RING;

/// Bytes of one staging buffer. Large enough to hide the flags' latency, small enough to stay in the second-level cache.
pub(crate) const STAGE: usize = 256 << 10;

const PAGE: usize = 4096;

/// What one rank publishes about itself. Only this rank writes it, except that others ring the bells.
#[repr(C)]
pub(crate) struct Control {
    pub(crate) flags: Flags,
    /// The bell of point-to-point messages. It is separate, since both kinds may be waited for at once.
    pub(crate) mail: Bell,
    /// Its last collective.
    pub(crate) record: Record,
    /// Its last call that sends or receives messages.
    pub(crate) messages: Record,
    /// The number of the collective before that.
    pub(crate) message_after: AtomicU64,
    /// Not zero once it has left the group.
    pub(crate) left: AtomicU32,
}

/// The two kinds of buffers that a rank fills.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Area {
    /// What the rank gives to the others.
    Stage,
    /// What it has reduced for the others.
    Result,
}

/// Offsets for a node with `ranks` ranks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layout {
    ranks: usize,
}

impl Layout {
    pub(crate) fn new(ranks: usize) -> Self {
        Self { ranks }
    }

    pub(crate) fn control(self, rank: usize) -> usize {
        rank * size_of::<Control>().next_multiple_of(PAGE)
    }

    pub(crate) fn place(self, rank: usize, area: Area, epoch: u64) -> usize {
        let index = rank * 4 + (area == Area::Result) as usize * 2 + (epoch & 1) as usize;
        self.control(self.ranks) + index * STAGE
    }

    pub(crate) fn ring(self, from: usize, to: usize) -> usize {
        self.place(self.ranks, Area::Stage, 0) + (from * self.ranks + to) * RING
    }

    pub(crate) fn len(self) -> usize {
        self.ring(self.ranks, 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_overlaps() {
        for ranks in [1, 2, 3, 8] {
            let layout = Layout::new(ranks);
            let mut pieces = Vec::new();
            for rank in 0..ranks {
                pieces.push((layout.control(rank), size_of::<Control>()));
                for area in [Area::Stage, Area::Result] {
                    pieces.extend([0, 1].map(|epoch| (layout.place(rank, area, epoch), STAGE)));
                }
                pieces.extend((0..ranks).map(|to| (layout.ring(rank, to), RING)));
            }
            pieces.sort();
            for pair in pieces.windows(2) {
                assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{pair:?}");
            }
            let (start, len) = pieces[pieces.len() - 1];
            assert_eq!(start + len, layout.len());
            assert!(pieces.iter().all(|(start, _)| start % 128 == 0));
        }
    }
}
