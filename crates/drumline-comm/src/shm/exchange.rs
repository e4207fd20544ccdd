//! The collectives that move data without reducing all of it: broadcast, (all-)gather, scatter, all-to-all, reduce-scatter.
//!
//! They are of two forms. In a **row** exchange a rank stages one row for all ranks that read it. In a **column** exchange its
//! staging buffer is cut into one cell for each rank, and rank `j` reads cell `j` of every rank.
//!
//! ```text
//!            rows                                columns
//!   stage 0 [ for all      ]            stage 0 [ →0 | →1 | →2 ]
//!   stage 1 [ for all      ]            stage 1 [ →0 | →1 | →2 ]      rank 1 reads the middle cells
//! ```
//! Lengths may differ between ranks. The number of rounds follows from the longest, which all ranks know.

use std::ops::Range;

use super::all_reduce::Keep;
use super::copy::{copy, copy_for};
use super::heap::Symmetric;
use super::layout::Area;
use super::node::{Context, Node, blocks};
use super::wait::Stop;
use crate::element::Element;
use crate::reduce::{ReduceOp, reduce_into};
use crate::select::node_chunk;
use crate::slices::{Cells, CellsMut, chunks, clip, offsets, part};

/// Bytes of a block that is reduced beside its place: small enough to stay in a core's cache.
const IN_PLACE_BLOCK: usize = 64 << 10;

/// What a rank passes to a collective.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Input<'a, T> {
    pub(crate) data: &'a [T],
    /// Where the data lies in the symmetric heap, if it does.
    pub(crate) heap: Option<Symmetric>,
}

impl<'a, T> Input<'a, T> {
    /// Data that is not in the symmetric heap.
    pub(crate) fn private(data: &'a [T]) -> Self {
        Self { data, heap: None }
    }
}

/// The rows of a row exchange.
#[derive(Debug, Clone, Copy)]
struct Rows<'a> {
    /// The length of each rank's row.
    lens: &'a [usize],
    /// The ranks that read them.
    keep: Keep,
}

impl Node {
    /// Row exchange. This rank stages `mine` (empty if it has no row). `take` is
    /// called with a rank, a range of its row and the data there: for this rank's own row, and, if this rank reads, for those
    /// of its peers.
    fn rows<T: Element>(
        &mut self,
        cx: &Context<'_>,
        mine: &[T],
        rows: Rows<'_>,
        mut take: impl FnMut(usize, Range<usize>, &[T]),
    ) -> Result<(), Stop> {
        let Rows { lens, keep } = rows;
        let alone = self.ranks() == 2 || keep == Keep::Only(self.me());
        let longest = lens.iter().copied().max().unwrap_or(0);
        for window in
            chunks(longest, node_chunk(longest * size_of::<T>(), self.core_share()) / size_of::<T>())
        {
            let given = clip(mine.len(), &window);
            // SAFETY: all ranks were awaited in the round before, and nothing is published until the copy is done.
            let place = unsafe { self.fill(Area::Stage, 0, given.len()) };
            for block in blocks::<T>(given.len()) {
                let range = shifted(&block, given.start);
                copy(&mut place[block], &mine[range.clone()]);
                take(self.me(), range.clone(), &mine[range]);
            }
            self.data_round(cx)?;
            for peer in self.peers().filter(|_| keep.kept_by(self.me())) {
                let range = clip(lens[peer], &window);
                if alone {
                    let take = |block, given: &[T]| take(peer, shifted(&block, range.start), given);
                    // SAFETY: all were awaited in this round, and no other rank reads this staging buffer.
                    unsafe { self.consume(peer, Area::Stage, 0..range.len(), take) };
                } else {
                    // SAFETY: all were awaited in this round.
                    take(peer, range.clone(), unsafe { self.filled(peer, Area::Stage, 0..range.len()) });
                }
            }
        }
        Ok(())
    }

    /// The windows of a column exchange whose longest cell has `longest` elements.
    fn cell_windows<T>(&self, longest: usize) -> impl Iterator<Item = Range<usize>> + use<T> {
        let chunk = node_chunk(longest * self.ranks() * size_of::<T>(), self.core_share())
            / size_of::<T>()
            / self.ranks();
        chunks(longest, chunk.clamp(1, self.cell_capacity::<T>()))
    }

    /// One round of a column exchange: `cell(j)` is the range of `input` that is for rank `j` in this round.
    fn pass_cells<T: Element>(
        &mut self,
        cx: &Context<'_>,
        input: &[T],
        cell: impl Fn(usize) -> Range<usize>,
    ) -> Result<(), Stop> {
        for peer in self.peers() {
            let range = cell(peer);
            // SAFETY: as in `rows`; cells do not overlap.
            let place = unsafe { self.fill(Area::Stage, peer * self.cell_capacity::<T>(), range.len()) };
            copy(place, &input[range]);
        }
        self.data_round(cx)
    }

    /// Where this rank's cell lies in every peer's staging buffer.
    fn cell<T>(&self, range: &Range<usize>) -> Range<usize> {
        shifted(range, self.me() * self.cell_capacity::<T>())
    }

    /// Copies this rank's cell of `peer` with `copy`, after `pass_cells`.
    fn take_cell<T: Element>(&self, peer: usize, output: &mut [T], copy: fn(&mut [T], &[T])) {
        let cell = self.cell::<T>(&(0..output.len()));
        // SAFETY: `pass_cells` awaited all, and a cell has one reader.
        unsafe { self.consume(peer, Area::Stage, cell, |block, given| copy(&mut output[block], given)) };
    }

    /// `data` of the root is copied to all.
    pub(crate) fn broadcast<T: Element>(
        &mut self,
        cx: &Context<'_>,
        data: &mut [T],
        root: usize,
        heap: Option<Symmetric>,
    ) -> Result<(), Stop> {
        if let Some(heap) = self.agree_on_heap(cx, size_of_val(data), heap)? {
            if self.me() != root {
                // SAFETY: the root is inside this call and does not write; this rank's slice is its own.
                copy(data, unsafe { heap.slice(root, 0..data.len()) });
            }
            return self.round(cx, &[]);
        }
        let copy = copy_for(size_of_val(data));
        let mut rows = vec![0; self.ranks()];
        rows[root] = data.len();
        self.staged(|node| {
            if node.me() == root {
                node.rows(cx, data, Rows { lens: &rows, keep: Keep::All }, |_, _, _: &[T]| {})
            } else {
                node.rows(cx, &[], Rows { lens: &rows, keep: Keep::All }, |_, range, given| {
                    copy(&mut data[range], given)
                })
            }
        })
    }

    /// Every rank's `input` end to end in `output`, on the ranks that `keep` names. `counts[i]` is the length of rank `i`'s.
    pub(crate) fn gather<T: Element>(
        &mut self,
        cx: &Context<'_>,
        input: Input<'_, T>,
        mut output: Option<&mut [T]>,
        counts: &[usize],
        keep: Keep,
    ) -> Result<(), Stop> {
        let Input { data: input, heap } = input;
        let starts = offsets(counts);
        let copy = copy_for(size_of_val(input) + output.as_deref().map_or(0, size_of_val));
        let mut place = |peer: usize, range: Range<usize>, given: &[T]| {
            if let Some(output) = &mut output {
                copy(&mut output[starts[peer]..][range], given);
            }
        };
        let longest = counts.iter().copied().max().unwrap_or(0);
        if let Some(heap) = self.agree_on_heap(cx, longest * size_of::<T>(), heap)? {
            for (rank, &count) in counts.iter().enumerate() {
                // SAFETY: all ranks are inside this call and write no input.
                place(rank, 0..count, unsafe { heap.slice(rank, 0..count) });
            }
            return self.round(cx, &[]);
        }
        self.staged(|node| node.rows(cx, input, Rows { lens: counts, keep }, &mut place))
    }

    /// Part `j` of `data`, which has equal parts, becomes rank `j`'s.
    pub(crate) fn gather_in_place<T: Element>(
        &mut self,
        cx: &Context<'_>,
        data: &mut [T],
        heap: Option<Symmetric>,
    ) -> Result<(), Stop> {
        let (copy, count) = (copy_for(size_of_val(data)), data.len() / self.ranks());
        if let Some(heap) = self.agree_on_heap(cx, size_of_val(data), heap)? {
            for peer in self.peers() {
                let part = peer * count..(peer + 1) * count;
                // SAFETY: all ranks are inside this call, and none writes its own part.
                copy(&mut data[part.clone()], unsafe { heap.slice(peer, part) });
            }
            return self.round(cx, &[]);
        }
        let own = data[self.me() * count..][..count].to_vec();
        let lens = vec![count; self.ranks()];
        self.staged(|node| {
            let rows = Rows { lens: &lens, keep: Keep::All };
            node.rows(cx, &own, rows, |peer, range, given| copy(&mut data[peer * count..][range], given))
        })
    }

    /// Part `j` of the root's `input` (all of length `output.len()`) becomes rank `j`'s `output`.
    pub(crate) fn scatter<T: Element>(
        &mut self,
        cx: &Context<'_>,
        input: Option<&[T]>,
        output: &mut [T],
        root: usize,
    ) -> Result<(), Stop> {
        let (count, copy) = (output.len(), copy_for(input.map_or(0, size_of_val) + size_of_val(output)));
        for window in self.cell_windows::<T>(count) {
            match input.filter(|_| self.me() == root) {
                Some(input) => {
                    let cell = |peer: usize| peer * count + window.start..peer * count + window.end;
                    self.pass_cells(cx, input, cell)?;
                    copy(&mut output[window.clone()], &input[cell(root)]);
                }
                None => {
                    self.pass_cells::<T>(cx, &[], |_| 0..0)?;
                    self.take_cell(root, &mut output[window], copy);
                }
            }
        }
        Ok(())
    }

    /// Cell `j` of this rank's `input` goes to rank `j`; `longest` is the longest cell between any two ranks.
    pub(crate) fn all_to_all<T: Element>(
        &mut self,
        cx: &Context<'_>,
        sends: Cells<'_, T>,
        receives: CellsMut<'_, T>,
        longest: usize,
    ) -> Result<(), Stop> {
        let Cells { data: input, counts: sends } = sends;
        let CellsMut { data: output, counts: receives } = receives;
        let (from, to, me) = (offsets(sends), offsets(receives), self.me());
        let copy = copy_for(size_of_val(input) + size_of_val(output));
        copy(&mut output[to[me]..][..receives[me]], &input[from[me]..][..sends[me]]);
        for window in self.cell_windows::<T>(longest) {
            self.pass_cells(cx, input, |peer| shifted(&clip(sends[peer], &window), from[peer]))?;
            for peer in self.peers() {
                let range = clip(receives[peer], &window);
                self.take_cell(peer, &mut output[to[peer]..][range], copy);
            }
        }
        Ok(())
    }

    /// Part `j` of the reduction of all inputs becomes rank `j`'s `output`; `counts[j]` is its length.
    pub(crate) fn reduce_scatter<T: Element>(
        &mut self,
        cx: &Context<'_>,
        input: Input<'_, T>,
        output: &mut [T],
        counts: &[usize],
        op: ReduceOp,
    ) -> Result<(), Stop> {
        let Input { data: input, heap } = input;
        let (starts, me, ranks) = (offsets(counts), self.me(), self.ranks());
        if let Some(heap) = self.agree_on_heap(cx, size_of_val(input), heap)? {
            let range = shifted(&(0..counts[me]), starts[me]);
            // SAFETY: all ranks are inside this call and write no input.
            let inputs: Vec<&[T]> =
                (0..ranks).map(|rank| unsafe { heap.slice(rank, range.clone()) }).collect();
            reduce_into(output, &inputs, op);
            return self.round(cx, &[]);
        }
        self.staged(|node| node.reduce_cells(cx, input, &mut *output, counts, op))
    }

    /// This rank's part of `data`, which has equal parts, becomes that of the reduction.
    pub(crate) fn reduce_scatter_in_place<T: Element>(
        &mut self,
        cx: &Context<'_>,
        data: &mut [T],
        heap: Option<Symmetric>,
        op: ReduceOp,
    ) -> Result<(), Stop> {
        let (me, ranks) = (self.me(), self.ranks());
        let count = data.len() / ranks;
        let own = me * count..(me + 1) * count;
        if let Some(heap) = self.agree_on_heap(cx, size_of_val(data), heap)? {
            // A block is reduced beside its place, because the place is one of the inputs.
            let mut reduced = vec![T::zeroed(); count.min(IN_PLACE_BLOCK / size_of::<T>())];
            for block in chunks(count, reduced.len().max(1)) {
                let place = shifted(&block, own.start);
                // SAFETY: all ranks are inside this call, and only this one writes its part, after it has read it.
                let inputs: Vec<&[T]> =
                    (0..ranks).map(|rank| unsafe { heap.slice(rank, place.clone()) }).collect();
                reduce_into(&mut reduced[..block.len()], &inputs, op);
                data[place].copy_from_slice(&reduced[..block.len()]);
            }
            return self.round(cx, &[]);
        }
        let mut reduced = vec![T::zeroed(); count];
        self.staged(|node| node.reduce_cells(cx, data, &mut reduced, &vec![count; ranks], op))?;
        data[own].copy_from_slice(&reduced);
        Ok(())
    }

    fn reduce_cells<T: Element>(
        &mut self,
        cx: &Context<'_>,
        input: &[T],
        output: &mut [T],
        counts: &[usize],
        op: ReduceOp,
    ) -> Result<(), Stop> {
        let (starts, me, ranks) = (offsets(counts), self.me(), self.ranks());
        let longest = counts.iter().copied().max().unwrap_or(0);
        for window in self.cell_windows::<T>(longest) {
            self.pass_cells(cx, input, |peer| shifted(&clip(counts[peer], &window), starts[peer]))?;
            let now = clip(counts[me], &window);
            for block in blocks::<T>(now.len()) {
                let range = shifted(&block, now.start);
                let (mine, cell) = (&input[shifted(&range, starts[me])], self.cell::<T>(&block));
                // SAFETY: `pass_cells` awaited all.
                let given = |rank| unsafe { self.filled(rank, Area::Stage, cell.clone()) };
                let given = |rank| if rank == me { mine } else { given(rank) };
                if ranks == 2 {
                    reduce_into(&mut output[range], &[given(0), given(1)], op);
                } else {
                    let inputs: Vec<&[T]> = (0..ranks).map(given).collect();
                    reduce_into(&mut output[range], &inputs, op);
                }
                for peer in self.peers() {
                    // SAFETY: a cell has one reader.
                    unsafe { self.take_over::<T>(peer, Area::Stage, cell.clone()) };
                }
            }
        }
        Ok(())
    }

    /// The node's first half of a larger all-reduce: this rank's part of `data`, of `parts`, becomes the node's reduction. The
    /// rest of `data` is unchanged. Ranks beyond `parts` have no part.
    pub(crate) fn reduce_parts<T: Element>(
        &mut self,
        cx: &Context<'_>,
        data: &mut [T],
        parts: usize,
        op: ReduceOp,
    ) -> Result<(), Stop> {
        let ranges = self.ranges::<T>(data.len(), parts);
        let counts: Vec<usize> = ranges.iter().map(Range::len).collect();
        let mine = ranges[self.me()].clone();
        let mut reduced = vec![T::zeroed(); mine.len()];
        self.reduce_scatter(cx, Input::private(data), &mut reduced, &counts, op)?;
        data[mine].copy_from_slice(&reduced);
        Ok(())
    }

    /// The node's second half: every rank's part of `data` is copied to all.
    pub(crate) fn share_parts<T: Element>(
        &mut self,
        cx: &Context<'_>,
        data: &mut [T],
        parts: usize,
    ) -> Result<(), Stop> {
        let ranges = self.ranges::<T>(data.len(), parts);
        let counts: Vec<usize> = ranges.iter().map(Range::len).collect();
        let mine = data[ranges[self.me()].clone()].to_vec();
        self.gather(cx, Input::private(&mine), Some(data), &counts, Keep::All)
    }

    fn ranges<T>(&self, len: usize, parts: usize) -> Vec<Range<usize>> {
        let range = |place| if place < parts { part(len, parts, place, size_of::<T>()) } else { len..len };
        (0..self.ranks()).map(range).collect()
    }
}

fn shifted(range: &Range<usize>, by: usize) -> Range<usize> {
    range.start + by..range.end + by
}
