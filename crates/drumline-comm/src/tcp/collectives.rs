//! Collectives over links, among a **team**: some ranks of the group, in an order all of them know.
//!
//! Every rank has a link to every other, so each part is sent straight to its owner. An all-reduce moves `2 (n-1)/n` of the
//! data out of each rank, in two steps however many ranks there are. The owner reduces its part in team order, so all ranks
//! hold the same bits. What arrives is reduced in small windows while it is still in the cache.
//!
//! So each rank has n-1 flows in each direction at once, for any n and any size of data. This is on purpose. A ring or
//! recursive halving moves as many bytes, but in `2 (n-1)` or `2 log n` steps, each of which waits for the slowest rank, and
//! combines the inputs in another order than that of the ranks. They would save sockets, and packets that are lost where a
//! switch has small buffers and many ranks send to one. Ranks of one node share memory, and a rail has one rank of each node,
//! so n is the number of nodes, and parts get smaller as it grows.

use std::ops::Range;

use super::drive::{BURST, Drive, Paused, Piece};
use super::fabric::Fabric;
use crate::element::Element;
use crate::reduce::{Order, ReduceOp, reduce_into, reduce_with};
use crate::select::{LinkReduce, link_reduce};
use crate::shm::{Context, Stop, bytes};
use crate::slices::{chunks, offsets, own_and_others, part};

/// Bytes received from all peers together before they are reduced: with many ranks the windows are smaller.
const SCRATCH: usize = 8 << 20;

/// A collective over links: its ranks, and the number of its next step.
pub(crate) struct Team<'t> {
    pub(crate) fabric: &'t mut Fabric,
    /// Ranks of the group.
    pub(crate) ranks: &'t [usize],
    step: u32,
}

/// An exchange that has begun.
pub(crate) struct Step<'s, 'd> {
    drive: Paused<'s, 'd>,
    ranks: &'s [usize],
}

impl Step<'_, '_> {
    /// The second half: receives the data, and sends the rest.
    pub(crate) fn finish<'d, T: Element>(
        self,
        takes: impl IntoIterator<Item = (usize, &'d mut [T])>,
    ) -> Result<(), Stop> {
        take(self.drive.resume(), self.ranks, takes)
    }
}

/// Receives what these members of `ranks` send, and sends the rest.
fn take<'d, T: Element>(
    mut drive: Drive<'_, '_>,
    ranks: &[usize],
    takes: impl IntoIterator<Item = (usize, &'d mut [T])>,
) -> Result<(), Stop> {
    let piece = |(place, into): (usize, &'d mut [T])| Piece {
        peer: ranks[place],
        total: size_of_val(into),
        into: bytes::of_mut(into),
    };
    let mut pieces: Vec<Piece<'_>> = takes.into_iter().map(piece).collect();
    drive.receive(&mut pieces)?;
    drive.finish()
}

impl<'t> Team<'t> {
    pub(crate) fn new(fabric: &'t mut Fabric, ranks: &'t [usize]) -> Self {
        Self { fabric, ranks, step: 0 }
    }

    /// This rank's place in the team.
    fn me(&self) -> usize {
        let me = self.fabric.me();
        self.ranks.iter().position(|&rank| rank == me).expect("a rank drives only teams it belongs to")
    }

    fn len(&self) -> usize {
        self.ranks.len()
    }

    fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let me = self.me();
        (0..self.len()).filter(move |&place| place != me)
    }

    /// One step: sends data to members of the team, and receives data from members, each given by its index in the team.
    pub(crate) fn exchange<'d, T: Element>(
        &mut self,
        cx: &Context<'_>,
        gives: impl IntoIterator<Item = (usize, &'d [T])>,
        takes: impl IntoIterator<Item = (usize, &'d mut [T])>,
    ) -> Result<(), Stop> {
        let ranks = self.ranks;
        take(self.drive(cx, gives)?, ranks, takes)
    }

    /// The first half of an exchange: the data is sent while the caller does something else.
    pub(crate) fn begin<'s, 'd, T: Element>(
        &'s mut self,
        cx: &'s Context<'s>,
        gives: impl IntoIterator<Item = (usize, &'d [T])>,
    ) -> Result<Step<'s, 'd>, Stop> {
        let ranks = self.ranks;
        Ok(Step { drive: self.drive(cx, gives)?.pause(), ranks })
    }

    fn drive<'s, 'd, T: Element>(
        &'s mut self,
        cx: &'s Context<'s>,
        gives: impl IntoIterator<Item = (usize, &'d [T])>,
    ) -> Result<Drive<'s, 'd>, Stop> {
        let ranks = self.ranks;
        let sends = gives.into_iter().map(|(place, data)| (ranks[place], bytes::of(data)));
        let drive = self.fabric.drive(cx, self.step, sends)?;
        self.step += 1;
        Ok(drive)
    }

    /// Returns when all ranks have called it.
    pub(crate) fn barrier(&mut self, cx: &Context<'_>) -> Result<(), Stop> {
        let (me, n) = (self.me(), self.len());
        let mut distance = 1;
        while distance < n {
            let (to, from) = ((me + distance) % n, (me + n - distance) % n);
            self.exchange::<u8>(cx, [(to, &[][..])], [(from, &mut [][..])])?;
            distance *= 2;
        }
        Ok(())
    }

    pub(crate) fn all_reduce<T: Element>(
        &mut self,
        cx: &Context<'_>,
        data: &mut [T],
        op: ReduceOp,
    ) -> Result<(), Stop> {
        match link_reduce(size_of_val(data), self.len()) {
            LinkReduce::Alone => Ok(()),
            LinkReduce::Everything => self.reduce_everything(cx, data, op),
            LinkReduce::Parts => {
                let parts = self.parts(data);
                self.reduce_my_part(cx, data, &parts, op)?;
                self.share_parts(cx, data, &parts)
            }
        }
    }

    fn parts<T>(&self, data: &[T]) -> Vec<Range<usize>> {
        (0..self.len()).map(|place| part(data.len(), self.len(), place, size_of::<T>())).collect()
    }

    /// Every rank sends everything to every rank and reduces it all: one step, for small data.
    fn reduce_everything<T: Element>(
        &mut self,
        cx: &Context<'_>,
        data: &mut [T],
        op: ReduceOp,
    ) -> Result<(), Stop> {
        let mut all = vec![T::zeroed(); data.len() * self.len()];
        self.gather_all(cx, data, &mut all, &vec![data.len(); self.len()])?;
        if !data.is_empty() {
            let inputs: Vec<&[T]> = all.chunks(data.len()).collect();
            reduce_into(data, &inputs, op);
        }
        Ok(())
    }

    /// First half: each rank has the reduction of its own part, in place.
    fn reduce_my_part<T: Element>(
        &mut self,
        cx: &Context<'_>,
        data: &mut [T],
        parts: &[Range<usize>],
        op: ReduceOp,
    ) -> Result<(), Stop> {
        let (mine, others) = own_and_others(data, parts.iter().map(Range::len), self.me());
        let gives = others.into_iter().map(|(place, cell)| (place, &*cell));
        self.reduce_in_place(cx, mine, gives, op)
    }

    /// Second half: each rank's part is copied to all.
    fn share_parts<T: Element>(
        &mut self,
        cx: &Context<'_>,
        data: &mut [T],
        parts: &[Range<usize>],
    ) -> Result<(), Stop> {
        let (own, others) = own_and_others(data, parts.iter().map(Range::len), self.me());
        let own = &*own;
        self.exchange(cx, self.peers().map(|place| (place, own)), others)
    }

    /// Sends each peer its data; `mine` becomes its reduction with what all peers send, in team order.
    fn reduce_in_place<'d, T: Element>(
        &mut self,
        cx: &Context<'_>,
        mine: &mut [T],
        gives: impl Iterator<Item = (usize, &'d [T])>,
        op: ReduceOp,
    ) -> Result<(), Stop> {
        let (me, ranks) = (self.me(), self.ranks);
        let mut scratch = self.fabric.take_scratch();
        let sends = gives.map(|(place, data)| (ranks[place], bytes::of(data)));
        let mut drive = self.fabric.drive(cx, self.step, sends)?;
        self.step += 1;
        let total = size_of_val(mine);
        let window = total.next_multiple_of(8).min(BURST).min(SCRATCH / ranks.len() / 8 * 8).max(8);
        scratch.resize(window * ranks.len() / 8, 0);
        for range in chunks(mine.len(), window / size_of::<T>()) {
            let mine = &mut mine[range];
            let mut pieces = Vec::with_capacity(ranks.len());
            for (place, row) in bytemuck::cast_slice_mut(&mut scratch).chunks_mut(window).enumerate() {
                let into = &mut row[..size_of_val(mine)];
                if place != me {
                    pieces.push(Piece { peer: ranks[place], total, into });
                } else if ranks.len() != 2 {
                    into.copy_from_slice(bytes::of(mine));
                }
            }
            drive.receive(&mut pieces)?;
            let row = |place: usize| bytes::view::<T>(&scratch[place * window / 8..], mine.len());
            match (me, ranks.len()) {
                (0, 2) => reduce_with(mine, row(1), Order::MineFirst, op),
                (1, 2) => reduce_with(mine, row(0), Order::TheirsFirst, op),
                _ => reduce_into(mine, &(0..ranks.len()).map(row).collect::<Vec<_>>(), op),
            }
        }
        drive.finish()?;
        self.fabric.keep_scratch(scratch);
        Ok(())
    }

    /// Every rank's `input` end to end in every rank's `output`.
    pub(crate) fn gather_all<T: Element>(
        &mut self,
        cx: &Context<'_>,
        input: &[T],
        output: &mut [T],
        counts: &[usize],
    ) -> Result<(), Stop> {
        let (own, others) = own_and_others(output, counts.iter().copied(), self.me());
        own.copy_from_slice(input);
        self.exchange(cx, self.peers().map(|place| (place, input)), others)
    }

    /// Every rank's `input` end to end in the root's `output`.
    pub(crate) fn gather<T: Element>(
        &mut self,
        cx: &Context<'_>,
        input: &[T],
        output: Option<&mut [T]>,
        counts: &[usize],
        root: usize,
    ) -> Result<(), Stop> {
        let me = self.me();
        let Some(output) = output.filter(|_| me == root) else {
            return self.exchange(cx, [(root, input)], []);
        };
        let (own, others) = own_and_others(output, counts.iter().copied(), me);
        own.copy_from_slice(input);
        self.exchange(cx, [], others)
    }

    /// Copies the root's `data` to all: straight, or, if it is large and there are several ranks, in parts that all pass on.
    pub(crate) fn broadcast<T: Element>(
        &mut self,
        cx: &Context<'_>,
        data: &mut [T],
        root: usize,
    ) -> Result<(), Stop> {
        let me = self.me();
        if link_reduce(size_of_val(data), self.len()) != LinkReduce::Parts || self.len() == 2 {
            return if me == root {
                let data = &*data;
                self.exchange(cx, self.peers().map(|place| (place, data)), [])
            } else {
                self.exchange(cx, [], [(root, data)])
            };
        }
        let parts = self.parts(data);
        if me == root {
            let gives = self.peers().map(|place| (place, &data[parts[place].clone()]));
            self.exchange(cx, gives, [])?;
        } else {
            self.exchange(cx, [], [(root, &mut data[parts[me].clone()])])?;
        }
        self.share_parts(cx, data, &parts)
    }

    /// The root's `data` becomes the reduction; that of the others is unchanged.
    pub(crate) fn reduce<T: Element>(
        &mut self,
        cx: &Context<'_>,
        data: &mut [T],
        op: ReduceOp,
        root: usize,
    ) -> Result<(), Stop> {
        let counts: Vec<usize> = self.parts(data).iter().map(Range::len).collect();
        let mut reduced = vec![T::zeroed(); counts[self.me()]];
        self.reduce_scatter(cx, data, &mut reduced, &counts, op)?;
        self.gather(cx, &reduced, Some(data), &counts, root)
    }

    pub(crate) fn reduce_scatter<T: Element>(
        &mut self,
        cx: &Context<'_>,
        input: &[T],
        output: &mut [T],
        counts: &[usize],
        op: ReduceOp,
    ) -> Result<(), Stop> {
        let starts = offsets(counts);
        let cell = |place: usize| &input[starts[place]..][..counts[place]];
        output.copy_from_slice(cell(self.me()));
        let gives = self.peers().map(|place| (place, cell(place)));
        self.reduce_in_place(cx, output, gives, op)
    }
}
