//! All-reduce and reduce among ranks that share memory.
//!
//! - **in-line**: up to 48 bytes travel in the flag's own cache line; every rank combines all of them.
//! - **one-shot**: each rank stages its chunk, every rank reduces all chunks into its own buffer.
//! - **two-phase**: each rank stages its chunk, reduces its own part of it, and collects the other parts. The parts of one
//!   chunk are collected in the round in which the next chunk is staged.
//! - **direct**: the buffers themselves are shared; each rank reduces its part and writes it to all of them.
//!
//! In each of them an element is reduced in rank order, by its owner or by every rank: the same bits on all ranks.

use std::ops::Range;

use super::bytes;
use super::copy::copy;
use super::heap::Symmetric;
use super::layout::Area;
use super::line::INLINE;
use super::node::{Context, Node, blocks};
use super::wait::Stop;
use crate::element::Element;
use crate::reduce::{Order, ReduceOp, reduce_everywhere, reduce_into, reduce_with};
use crate::select::{NodeReduce, node_reduce};
use crate::slices::{chunks, part};

/// Who keeps the result.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Keep {
    All,
    Only(usize),
}

/// How values are combined, and who keeps the result.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reduction {
    pub(crate) op: ReduceOp,
    pub(crate) keep: Keep,
}

impl Keep {
    pub(super) fn kept_by(self, rank: usize) -> bool {
        self == Keep::All || self == Keep::Only(rank)
    }
}

impl Node {
    /// `data` becomes the reduction over the ranks of this node, on those that `keep` names. On the others it is unchanged:
    /// direct all-reduce is used only if all ranks keep the result.
    pub(crate) fn all_reduce<T: Element>(
        &mut self,
        cx: &Context<'_>,
        data: &mut [T],
        reduction: Reduction,
        heap: Option<Symmetric>,
    ) -> Result<(), Stop> {
        let Reduction { op, keep } = reduction;
        let choice = node_reduce(size_of_val(data), size_of::<T>(), self.ranks(), self.core_share());
        if choice == NodeReduce::Inline {
            return self.reduce_inline(cx, data, reduction);
        }
        let heap = heap.filter(|_| keep == Keep::All);
        if self.reduce_direct(cx, data, op, heap)? {
            return Ok(());
        }
        self.staged(|node| match choice {
            NodeReduce::TwoPhase { chunk } => node.reduce_two_phase(cx, data, reduction, chunk),
            NodeReduce::OneShot { chunk } => node.reduce_one_shot(cx, data, reduction, chunk),
            NodeReduce::Inline => unreachable!("handled above"),
        })
    }

    /// Reduces symmetric buffers in place; returns whether that was possible.
    fn reduce_direct<T: Element>(
        &mut self,
        cx: &Context<'_>,
        data: &mut [T],
        op: ReduceOp,
        heap: Option<Symmetric>,
    ) -> Result<bool, Stop> {
        let outcome = self.agree_on_heap(cx, size_of_val(data), heap).and_then(|agreed| {
            let Some(place) = agreed else { return Ok(false) };
            self.reduce_part_everywhere::<T>(data.len(), place, op);
            self.round(cx, &[]).map(|()| true)
        });
        if let (Err(_), Some(place)) = (&outcome, heap) {
            // SAFETY: the group is given up after a stop, so this rank makes no further use of the shared slice.
            unsafe { place.detach() };
        }
        outcome
    }

    fn reduce_inline<T: Element>(
        &mut self,
        cx: &Context<'_>,
        data: &mut [T],
        Reduction { op, keep }: Reduction,
    ) -> Result<(), Stop> {
        const WORDS: usize = INLINE / 8;
        let bytes = size_of_val(data);
        let words = bytes.div_ceil(8);
        let mut mine = [0u64; WORDS];
        bytemuck::bytes_of_mut(&mut mine)[..bytes].copy_from_slice(bytes::of(data));
        self.round(cx, &mine[..words])?;
        if !keep.kept_by(self.me()) || data.is_empty() {
            return Ok(());
        }
        if self.ranks() == 2 {
            let theirs = self.words::<WORDS>(1 - self.me());
            reduce_with(data, bytes::view(&theirs, data.len()), self.order(), op);
            return Ok(());
        }
        let all: Vec<[u64; WORDS]> = (0..self.ranks()).map(|rank| self.words(rank)).collect();
        let inputs: Vec<&[T]> = all.iter().map(|words| bytes::view(words, data.len())).collect();
        reduce_into(data, &inputs, op);
        Ok(())
    }

    /// Which of two ranks is first.
    fn order(&self) -> Order {
        if self.me() == 0 { Order::MineFirst } else { Order::TheirsFirst }
    }

    fn reduce_one_shot<T: Element>(
        &mut self,
        cx: &Context<'_>,
        data: &mut [T],
        Reduction { op, keep }: Reduction,
        chunk: usize,
    ) -> Result<(), Stop> {
        for range in chunks(data.len(), chunk) {
            // SAFETY: all ranks were awaited in the round before (`round`), and nothing is published until the copy is done.
            copy(unsafe { self.fill(Area::Stage, 0, range.len()) }, &data[range.clone()]);
            self.data_round(cx)?;
            if keep.kept_by(self.me()) {
                self.reduce_stages(&mut data[range], op);
            }
        }
        Ok(())
    }

    fn reduce_stages<T: Element>(&self, out: &mut [T], op: ReduceOp) {
        // SAFETY: all ranks were awaited in this round, and this rank publishes again only after this call.
        let stage = |rank| unsafe { self.filled::<T>(rank, Area::Stage, 0..out.len()) };
        if self.ranks() > 2 {
            let inputs: Vec<&[T]> = (0..self.ranks()).map(stage).collect();
            return reduce_into(out, &inputs, op);
        }
        let peer = 1 - self.me();
        let len = out.len();
        let reduce = |block, given: &[T]| reduce_with(&mut out[block], given, self.order(), op);
        // SAFETY: as above, and of two ranks only this one reads the other's staging buffer.
        unsafe { self.consume(peer, Area::Stage, 0..len, reduce) };
    }

    fn reduce_two_phase<T: Element>(
        &mut self,
        cx: &Context<'_>,
        data: &mut [T],
        Reduction { op, keep }: Reduction,
        chunk: usize,
    ) -> Result<(), Stop> {
        let mut staged: Option<Range<usize>> = None;
        for coming in chunks(data.len(), chunk).map(Some).chain([None]) {
            if let Some(range) = &staged {
                self.reduce_my_part::<T>(range.len(), op);
            }
            if let Some(range) = &coming {
                // SAFETY: as in one-shot; stage and result are different memory.
                copy(unsafe { self.fill(Area::Stage, 0, range.len()) }, &data[range.clone()]);
            }
            self.data_round(cx)?;
            if let Some(range) = staged.filter(|_| keep.kept_by(self.me())) {
                self.collect_parts(&mut data[range]);
            }
            staged = coming;
        }
        Ok(())
    }

    /// Reduces this rank's part of the chunk of `len` elements that was staged in the current round, for the next round.
    fn reduce_my_part<T: Element>(&self, len: usize, op: ReduceOp) {
        let mine = part(len, self.ranks(), self.me(), size_of::<T>());
        for block in blocks::<T>(mine.len()) {
            let block = mine.start + block.start..mine.start + block.end;
            // SAFETY: all ranks were awaited in the current round; the result buffer belongs to the next round, and its
            // last readers have published the current round.
            let (out, inputs) = unsafe {
                let out = self.fill::<T>(Area::Result, block.start, block.len());
                let stage = |rank| self.filled::<T>(rank, Area::Stage, block.clone());
                (out, (0..self.ranks()).map(stage).collect::<Vec<_>>())
            };
            reduce_into(out, &inputs, op);
            for peer in self.peers() {
                // SAFETY: only this rank reads its part of the peers' chunks.
                unsafe { self.take_over::<T>(peer, Area::Stage, block.clone()) };
            }
        }
    }

    fn collect_parts<T: Element>(&self, out: &mut [T]) {
        for rank in 0..self.ranks() {
            let range = part(out.len(), self.ranks(), rank, size_of::<T>());
            // SAFETY: `rank` was awaited in the current round, in which it published its part.
            copy(&mut out[range.clone()], unsafe { self.filled(rank, Area::Result, range) });
        }
    }

    /// Reduces this rank's part of symmetric buffers of `len` elements and writes it to all of them.
    fn reduce_part_everywhere<T: Element>(&self, len: usize, heap: Symmetric, op: ReduceOp) {
        let mine = part(len, self.ranks(), self.me(), size_of::<T>());
        // SAFETY: every rank has published that it is inside this call, so each touches only the part that it owns, in all
        // buffers; parts do not overlap; the caller holds its own buffer mutably and does not use it now.
        let slice = |rank| unsafe { heap.slice_mut::<T>(rank, mine.clone()) };
        if self.ranks() == 2 {
            return reduce_everywhere(&mut [slice(0), slice(1)], op);
        }
        let mut buffers: Vec<&mut [T]> = (0..self.ranks()).map(slice).collect();
        reduce_everywhere(&mut buffers, op);
    }
}
